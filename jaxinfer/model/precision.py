"""Types of weights and arithmetic, and the declaration of weight matrices in them."""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.quantize import BLOCK, Scheme
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.model.params import weight

log = logging.getLogger(__name__)

_QUANTIZED = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}


@dataclass(frozen=True)
class Precision:
    """How a model is held and computed.

    Without `quantized` every weight is of `dtype`.  With it the matrices of attention and feed-forward are held in that
    type with their scales, and what they are multiplied with is quantised in the same scheme.  Always of `dtype` (or
    float32) are norms, embedding, router, vocabulary head, and the expansions of the latent: decode multiplies those
    from the other side, along which their scales would not be constant.
    """

    dtype: jnp.dtype
    quantized: jnp.dtype | None = None
    """`float8_e4m3fn`, `int8` or None."""
    scheme: Scheme = "row"
    """A scale for each output channel and token, or for each 128x128 block and 1x128 block (see `kernels.quantize`)."""
    first_ffn: bool = True
    """Whether the first projection of each feed-forward (gate and up) is quantised as well."""
    e4m3_attention: bool = False
    """Whether attention in prefill multiplies in e4m3: dense attention, and that to retrieved blocks."""

    @staticmethod
    def named(name: str, config: ModelConfig, unquantized: jnp.dtype, first_ffn: bool = True) -> "Precision":
        """The precision of an option: `fp32`, `bf16`, `fp8` or `int8`.

        `unquantized` is the type of what `fp8` and `int8` leave unquantised.  A checkpoint with 128x128 blocks is held
        in them (fp8), every other in scales of output channels.
        """
        if name not in _QUANTIZED:
            return Precision(jnp.dtype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[name]))
        in_blocks = name == "fp8" and config.weight_block_size == (BLOCK, BLOCK)
        scheme: Scheme = "block" if in_blocks else "row"
        return Precision(unquantized, jnp.dtype(_QUANTIZED[name]), scheme, first_ffn)

    def width(self, size: int) -> int:
        """The width of a feed-forward as it is held: quantised, it is filled up with zeros to a multiple of 128."""
        return size if self.quantized is None else -(-size // BLOCK) * BLOCK

    def pieces(self, axis: str) -> str:
        """The logical axis along which quantised matrices are divided: in multiples of 128 only, as kernels want."""
        return axis if self.quantized is None else f"{axis}/{BLOCK}"

    def matrix(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        lead: int = 0,
        columns: int = 1,
        quantize: bool = True,
        in_place: bool = False,
    ) -> Any:
        """A weight `[*lead, *rows, *columns]` of one layer (see `params.weight`), quantised where this precision is.

        A matrix whose columns (the numbers it sums over) are no multiple of 128 stays as it is.
        """
        split = len(shape) - columns
        k = math.prod(shape[split:])
        if self.quantized is None or not quantize:
            return weight(shape, axes, self.dtype, in_place)
        if k % BLOCK:
            _log_unquantized(k)
            return weight(shape, axes, self.dtype, in_place)
        if self.scheme == "row":
            scale, scale_axes = shape[:split], axes[:split]
        else:
            rows = -(-math.prod(shape[lead:split]) // BLOCK)
            scale = *shape[:lead], rows, k // BLOCK
            scale_axes = *axes[:lead], _in_blocks(axes[lead:split]), _in_blocks(axes[split:])
        return nnx.Param(
            Quantized(
                jax.ShapeDtypeStruct(shape, self.quantized),
                jax.ShapeDtypeStruct(scale, jnp.float32),
                self.scheme,
                columns,
            ),
            axes=Quantized(axes, scale_axes, self.scheme, columns),
            in_place=in_place,
        )


def _in_blocks(axes: tuple[str | None, ...]) -> str | None:
    """What a dimension of blocks is called whose elements have the dimensions `axes`."""
    named = [axis for axis in axes if axis is not None]
    return named[0].removesuffix(f"/{BLOCK}") if named else None


@functools.cache
def _log_unquantized(k: int) -> None:
    log.info("matrices of %d inputs stay unquantised: %d does not divide them", k, BLOCK)
