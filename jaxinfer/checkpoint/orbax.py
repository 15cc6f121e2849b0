"""Converted checkpoints: the parameter tree in Orbax's form beside the configuration, restored onto any mesh.

A folder holds `params/` (Orbax), the tokenizer's files, and `jaxinfer.json` with the format's version, the
`ModelConfig`, and the precision if the weights are quantised.  That file is written last: a folder without it is not a
whole checkpoint.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.mapping import TreePath
from jaxinfer.checkpoint.quantize import fits, held_as
from jaxinfer.checkpoint.tree import flatten, unflatten
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.quantized import Quantized

log = logging.getLogger(__name__)

DESCRIPTION = "jaxinfer.json"
_PARAMS = "params"
_VERSION = 1
_NAMES = {"float8_e4m3fn": "fp8", "int8": "int8"}
"""Type of quantised weights -> the precision it belongs to."""
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
    flat = flatten(params)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder / _PARAMS, unflatten(_apart(flat)), force=overwrite)
    for name in _TOKENIZER_FILES:
        if tokenizer_folder is not None and (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    types = {str(array.dtype) for array in flat.values() if isinstance(array, Quantized)}
    description = {"format": "jaxinfer", "version": _VERSION, "model": config.to_dict()}
    if types:
        description["quantized"] = _NAMES[types.pop()]
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


def read_description(folder: Path) -> tuple[ModelConfig, str | None]:
    """The configuration of a converted checkpoint, and the precision it is quantised to (`fp8`, `int8`), if it is.

    Raises CheckpointError for a format this code does not know.
    """
    description = json.loads((folder / DESCRIPTION).read_text())
    found = description.get("format"), description.get("version")
    if found != ("jaxinfer", _VERSION):
        raise CheckpointError(f"expected format 'jaxinfer' version {_VERSION} in {folder / DESCRIPTION}, got {found}")
    return ModelConfig.from_dict(description["model"]), description.get("quantized")


def restore(folder: Path, specs: dict[str, Any], quantized: str | None = None) -> dict[str, Any]:
    """The parameters of a converted checkpoint in the types and shardings of `specs`, each device reading its shards.

    `quantized` is the precision that the folder says it is quantised to.  A folder that is not is quantised, if `specs`
    are, parameter by parameter after all have been read.
    Raises CheckpointError if the tree, a shape or that precision differs from `specs`.
    """
    folder = folder.resolve()
    flat = flatten(specs)
    types = {str(spec.dtype) for spec in flat.values() if isinstance(spec, Quantized)}
    wanted = _NAMES[types.pop()] if types else None
    if quantized not in (None, wanted):
        raise CheckpointError(f"the weights in {folder} are {quantized}: expected precision {quantized}, got {wanted}")
    with _checkpointer() as checkpointer:
        saved = checkpointer.metadata(folder / _PARAMS).item_metadata
        if saved is None:
            raise CheckpointError(f"expected parameters in {folder / _PARAMS}, found none that Orbax can read")
        stored = flatten(saved.tree)
        read = _apart(flat) if quantized else {path: _plain(spec, stored.get(path)) for path, spec in flat.items()}
        _check(folder, stored, read)
        log.info("loading %s", folder)
        arrays = flatten(checkpointer.restore(folder / _PARAMS, unflatten(read)))
    parameters: dict[TreePath, Any] = {}
    for path, spec in flat.items():
        if quantized and isinstance(spec, Quantized):
            parameters[path] = replace(spec, values=arrays[*path, "values"], scale=arrays[*path, "scale"])
        else:
            array = arrays.pop(path)
            as_it_is = not isinstance(spec, Quantized) and array.shape == spec.shape
            parameters[path] = array if as_it_is else held_as(array, spec)
    return unflatten(parameters)


def _apart(flat: dict[TreePath, Any]) -> dict[TreePath, Any]:
    """Quantised parameters as two: what is stored."""
    apart: dict[TreePath, Any] = {}
    for path, value in flat.items():
        if isinstance(value, Quantized):
            apart |= {(*path, "values"): value.values, (*path, "scale"): value.scale}
        else:
            apart[path] = value
    return apart


def _plain(spec: jax.ShapeDtypeStruct | Quantized, stored: Any) -> jax.ShapeDtypeStruct:
    """What is read for a parameter from a folder that is not quantised: if it will be converted, as it lies there.

    The dimensions of one that is to be filled up may not divide as those of the result do: it is read whole.
    """
    plain = spec.values if isinstance(spec, Quantized) else spec
    if stored is None or (plain is spec and tuple(stored.shape) == spec.shape) or not fits(stored.shape, spec.shape):
        return plain
    sharding = plain.sharding
    if tuple(stored.shape) != plain.shape:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)


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
