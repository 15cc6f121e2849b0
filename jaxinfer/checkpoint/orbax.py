"""Converted checkpoints: the parameter tree in Orbax's form beside the configuration, restored onto any mesh.

A folder holds `params/` (Orbax), the tokenizer's files, and `jaxinfer.json` with the format's version and the
`ModelConfig`.  That file is written last: a folder without it is not a whole checkpoint.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.tree import flatten
from jaxinfer.configs.model import ModelConfig

log = logging.getLogger(__name__)

DESCRIPTION = "jaxinfer.json"
_PARAMS = "params"
_VERSION = 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def check_output(folder: Path, overwrite: bool):
    """Raises FileExistsError if `folder` has something in it and `overwrite` is not set."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise FileExistsError(f"expected an empty or new folder for the checkpoint, but {folder} holds files already")


def save(
    folder: Path,
    params: dict[str, Any],
    config: ModelConfig,
    tokenizer_folder: Path | None,
    overwrite: bool = False,
):
    """Writes a converted checkpoint; each process and device writes its own shards.

    The tokenizer's files are copied from `tokenizer_folder`, those that are there.  `overwrite` replaces a checkpoint
    in `folder` (and nothing else there); without it a folder with content raises FileExistsError.
    """
    folder = folder.resolve()
    check_output(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    log.info("writing %.2f GB to %s", sum(array.nbytes for array in jax.tree.leaves(params)) / 1e9, folder)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder / _PARAMS, params, force=overwrite)
    for name in _TOKENIZER_FILES:
        if tokenizer_folder is not None and (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    description = {"format": "jaxinfer", "version": _VERSION, "model": config.to_dict()}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a converted checkpoint.  Raises CheckpointError for a format this code does not know."""
    description = json.loads((folder / DESCRIPTION).read_text())
    found = description.get("format"), description.get("version")
    if found != ("jaxinfer", _VERSION):
        raise CheckpointError(f"expected format 'jaxinfer' version {_VERSION} in {folder / DESCRIPTION}, got {found}")
    return ModelConfig.from_dict(description["model"])


def restore(folder: Path, specs: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a converted checkpoint in the types and shardings of `specs`, each device reading its shards.

    Raises CheckpointError if the tree or a shape differs from `specs`.
    """
    folder = folder.resolve()
    with _checkpointer() as checkpointer:
        saved = checkpointer.metadata(folder / _PARAMS).item_metadata
        if saved is None:
            raise CheckpointError(f"expected parameters in {folder / _PARAMS}, found none that Orbax can read")
        _check(folder, flatten(saved.tree), flatten(specs))
        log.info("loading %s", folder)
        return checkpointer.restore(folder / _PARAMS, specs)


@contextmanager
def _checkpointer() -> Iterator[ocp.StandardCheckpointer]:
    """Orbax's checkpointer, without the dozens of lines of progress that it logs through absl."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


def _check(folder: Path, saved: dict[tuple[str, ...], Any], specs: dict[tuple[str, ...], Any]):
    wrong = [
        f"{'.'.join(path)} (expected {list(spec.shape)}, got {list(saved[path].shape)})"
        for path, spec in specs.items()
        if path in saved and tuple(saved[path].shape) != tuple(spec.shape)
    ]
    faults = {
        "missing": [".".join(path) for path in specs if path not in saved],
        "unexpected": [".".join(path) for path in saved if path not in specs],
        "of the wrong shape": wrong,
    }
    if any(faults.values()):
        raise CheckpointError.of_faults(str(folder), faults)
