"""Converts a Hugging Face checkpoint to one that restores directly onto any mesh.

    python -m jaxinfer.convert --hf DIR --out DIR [--precision auto|fp32|bf16] [--mesh cp=8]

Reads config.json, the safetensors files (float32, bfloat16, float16, or FP8 in blocks with scales, which are multiplied
out) and the tokenizer's files of a Hugging Face folder; writes an Orbax checkpoint with jaxinfer.json and the tokenizer
beside it.  The weights pass through the memory of the mesh's devices, divided among them; on a machine without GPUs
that is the machine's memory, which must hold the whole model in the output's precision.
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from absl import app, flags

from jaxinfer.checkpoint import open_checkpoint, orbax
from jaxinfer.configs.model import ModelConfig
from jaxinfer.model.transformer import parameter_specs
from jaxinfer.sharding.mesh import make, parse, start_platform
from jaxinfer.sharding.rules import Rules

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


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
    if precision not in ("auto", *_DTYPES):
        raise ValueError(f"expected precision auto, fp32 or bf16, got {precision!r}")
    if precision == "auto":
        precision = "fp32" if checkpoint.config.dtype == "float32" else "bf16"
    shape = parse(mesh)
    start_platform(shape)
    # What is written: no scales and no multi-token-prediction layers.
    config = dataclasses.replace(checkpoint.config, weight_block_size=None, num_mtp_layers=0, dtype=_DTYPES[precision])
    dtype = jnp.dtype(config.dtype)
    specs = parameter_specs(checkpoint.config, Rules(shape, shard_dense=True), make(shape), dtype)
    orbax.save(out, checkpoint.load(specs), config, hf, overwrite)
    return config


_HF = flags.DEFINE_string("hf", None, "Folder with the Hugging Face checkpoint.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write, which must be empty or not exist.", required=True)
_PRECISION = flags.DEFINE_enum(
    "precision", "auto", ["auto", *_DTYPES], "Type of the weights written; auto: fp32 for a float32 model, else bf16."
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
