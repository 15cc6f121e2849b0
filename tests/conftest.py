"""Sets the stage for every test: eight virtual CPU devices, and array annotations of jaxinfer checked at run time."""

import os

import hypothesis
import jax
import pytest

import tests.typechecker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run on the machine's GPUs (use with: -m gpu)")


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports jaxinfer or starts a backend.
    tests.typechecker.install()
    # How long an example takes says how busy the machine is, and nothing of the code.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    if config.getoption("--gpu"):
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    # Compiled programs are kept for the next engine and the next run; a limit of size makes JAX lock the folder.
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
    jax.config.update("jax_compilation_cache_max_size", 2**30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # Eight devices on few cores can come to a collective further apart than XLA's limit of 40 s, which would kill
    # the process.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=600"


@pytest.fixture(autouse=True)
def _gpu_only(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not request.config.getoption("--gpu"):
        pytest.skip("needs a GPU: run with --gpu")
