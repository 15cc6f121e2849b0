"""Converts a Hugging Face checkpoint to one that restores directly onto any mesh.

    python -m jaxinfer.convert --hf DIR --out DIR [--precision auto|fp32|bf16|fp8|int8] [--mesh cp=8]

Reads config.json, the safetensors files (float32, bfloat16, float16, or FP8 in blocks with scales, which are multiplied
out, or for fp8 kept as they are) and the tokenizer's files of a Hugging Face folder; writes an Orbax checkpoint with
jaxinfer.json and the tokenizer beside it.  The weights pass through the memory of the mesh's devices, divided among
them; on a machine without GPUs that is the machine's memory, which must hold the whole model in the output's precision.
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax.numpy as jnp
from absl import app, flags

from jaxinfer.checkpoint import open_checkpoint, orbax
from jaxinfer.configs.model import ModelConfig, WeightDtype
from jaxinfer.kernels.quantize import BLOCK
from jaxinfer.model.precision import Precision
from jaxinfer.model.transformer import parameter_specs
from jaxinfer.sharding.mesh import make, parse, start_platform
from jaxinfer.sharding.rules import Rules

_PRECISIONS = ("auto", "fp32", "bf16", "fp8", "int8")


def convert(hf: Path, out: Path, precision: str = "auto", mesh: str = "", overwrite: bool = False) -> ModelConfig:
    """Converts the checkpoint in `hf` to one in `out`; returns the configuration that was written.

    `precision` "auto" keeps float32 checkpoints in float32 and makes all others bfloat16.  Raises FileNotFoundError if
    there is no checkpoint in `hf`, FileExistsError if `out` holds files and `overwrite` is not set, ValueError for
    anything else that cannot be converted.
    """
    # Everything that can be refused is refused before hours of reading.
    checkpoint = open_checkpoint(hf)
    if checkpoint.kind != "huggingface":
        raise ValueError(f"expected a Hugging Face checkpoint, but {hf} is converted already")
    if hf.resolve() == out.resolve():
        raise ValueError(f"expected two different folders, got {hf} for both")
    orbax.check_output(out, overwrite)
    if precision not in _PRECISIONS:
        raise ValueError(f"expected precision {', '.join(_PRECISIONS)}, got {precision!r}")
    plain = "float32" if checkpoint.config.dtype == "float32" else "bfloat16"
    if precision == "auto":
        precision = "fp32" if plain == "float32" else "bf16"
    held = Precision.named(precision, checkpoint.config, jnp.dtype(plain))
    shape = parse(mesh)
    start_platform(shape)
    # What is written: blocks only where they are kept, and no multi-token-prediction layers.
    config = dataclasses.replace(
        checkpoint.config,
        weight_block_size=(BLOCK, BLOCK) if held.scheme == "block" else None,
        num_mtp_layers=0,
        dtype=cast(WeightDtype, str(held.dtype)),
    )
    specs = parameter_specs(checkpoint.config, Rules(shape, shard_dense=True), make(shape), held)
    orbax.save(out, checkpoint.load(specs), config, hf, overwrite)
    return config


_HF = flags.DEFINE_string("hf", None, "Folder with the Hugging Face checkpoint.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write, which must be empty or not exist.", required=True)
_PRECISION = flags.DEFINE_enum(
    "precision",
    "auto",
    _PRECISIONS,
    "Type of the weights written; auto: fp32 for a float32 model, else bf16. fp8 and int8 write the matrices of "
    "attention and feed-forward in 8 bits with their scales, and the rest as auto.",
)
_MESH = flags.DEFINE_string("mesh", "", "Devices that hold the model meanwhile, as in cp=8; the result fits any mesh.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a checkpoint that is in the output folder.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {' '.join(argv[1:])}")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)
    try:
        config = convert(Path(_HF.value), Path(_OUT.value), _PRECISION.value, _MESH.value, _OVERWRITE.value)
    except (OSError, ValueError) as error:
        sys.exit(f"convert: {error}")
    print(f"{_OUT.value}: {config.architecture}, {config.num_layers} layers, {config.dtype}")


if __name__ == "__main__":
    app.run(main)
