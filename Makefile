# Every target sets up what it needs, once: a fresh clone needs nothing but Python 3.12 or newer with venv (or uv).
.PHONY: serve test test-all lint format clean
.DELETE_ON_ERROR:
SHELL := /bin/bash

VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# JAX's CUDA 13 build needs driver 580 or newer; no driver, no extra.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | grep -oE '^[0-9]+')
ACCELERATOR := $(if $(DRIVER),$(shell [ $(DRIVER) -ge 580 ] && echo cuda13 || echo cuda12),cpu)

# make serve ARGS="--model DIR --mesh cp=8"
serve: $(VENV)/.installed-$(ACCELERATOR)
	exec $(VENV)/bin/python -m jaxinfer.serve $(ARGS)

# Processes that run test files side by side; each takes up to 5 GB.  make test WORKERS=4
WORKERS := 2
PYTEST := $(VENV)/bin/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile

# make test ARGS="-k scheduler"
test: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

# The slow cases too; those that need a GPU are run with: pytest --gpu -m gpu
test-all: $(VENV)/.installed-test
	$(PYTEST) -m "not gpu" $(ARGS)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-cpu: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP_INSTALL) -e '.[test]'
	touch $@

$(VENV)/.installed-cuda%: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP_INSTALL) -e '.[cuda$*]'
	touch $@

# A candidate is asked for its version because a pyenv shim of that name may exist without the Python behind it.
$(VENV)/bin/pip:
	@set -e; \
	for python in $(PYTHON) python3.12 python3.13 python3.14 python3 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$python" --version)"; \
	    if "$$python" -m venv --clear $(VENV); then exit 0; fi; \
	    rm -rf $(VENV); \
	    echo "$$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; \
	  fi; \
	done; \
	if command -v uv >/dev/null; then exec uv venv --clear --seed --python '>=3.12' $(VENV); fi; \
	echo "expected Python 3.12 or newer on PATH (or uv); found none." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1
