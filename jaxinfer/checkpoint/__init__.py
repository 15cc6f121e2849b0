"""Weights from disk: `open_checkpoint` finds out what a folder holds, and loads it onto any mesh."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.checkpoint import huggingface, orbax
from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.random import random_parameters
from jaxinfer.configs.huggingface import end_of_sequence_ids, from_hf
from jaxinfer.configs.model import ModelConfig

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint", "random_parameters"]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model: a Hugging Face checkpoint or a converted one."""

    folder: Path
    kind: Literal["huggingface", "converted"]
    config: ModelConfig
    quantized: str | None = None
    """`fp8` or `int8` if the folder was converted to it."""

    def load(self, specs: dict[str, Any], progress: bool = True) -> dict[str, Any]:
        """The parameter tree in the shapes, types and shardings of `specs` (see `model.transformer.parameter_specs`).

        `progress` shows a bar on stderr while a Hugging Face checkpoint is read.
        Raises CheckpointError if the content does not fit the configuration or `specs`.
        """
        if self.kind == "converted":
            return orbax.restore(self.folder, specs, self.quantized)
        return huggingface.load(self.folder, self.config, specs, progress)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads the configuration of a checkpoint; no weights yet.

    Raises FileNotFoundError saying what was looked for if `folder` holds no checkpoint, ValueError if its configuration
    is not one that can be computed.
    """
    folder = Path(folder).expanduser()
    if (folder / orbax.DESCRIPTION).is_file():
        return Checkpoint(folder, "converted", *orbax.read_description(folder))
    if (folder / "config.json").is_file():
        config = from_hf(_read_object(folder / "config.json"))
        generation = folder / "generation_config.json"
        if generation.is_file():
            # Chat models name there the ids that end a turn, besides the one in config.json.
            more = end_of_sequence_ids(_read_object(generation))
            config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
        return Checkpoint(folder, "huggingface", config)
    came = "a folder without either" if folder.is_dir() else "no such folder"
    raise FileNotFoundError(
        f"expected a checkpoint in {folder}: config.json with safetensors files (Hugging Face), or {orbax.DESCRIPTION} "
        f"(converted by `python -m jaxinfer.convert`); found {came}"
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"expected JSON in {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a JSON object in {path}, got {type(value).__name__}")
    return value
