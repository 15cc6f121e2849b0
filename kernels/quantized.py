"""Quantised arrays that carry their scales: activations between two products, and weights."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.gemm import gemm
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.quantize import BLOCK, Scheme, quantize, quantize_weight, rms_norm_quantize, swiglu_quantize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """`values * scale`, a pytree of the two arrays.

    Activations: values `[T, K]`, float32 scales `[T]` (scheme `row`) or `[T, K / 128]` (`block`), the rows first in
    both, so that rows can be gathered, cut and exchanged.  Weights: values `[*lead, *rows, *columns]`, scales
    `[*lead, *rows]` or `[*lead, ceil(N / 128), K / 128]` with N and K the products of rows and columns.
    """

    values: Any
    scale: Any
    scheme: Scheme = field(metadata={"static": True})
    columns: int = field(default=1, metadata={"static": True})
    """Trailing dimensions that a product sums over."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def sharding(self):
        return self.values.sharding

    @property
    def lead(self) -> int:
        """Leading dimensions of a weight in blocks: those that number the matrices."""
        return self.scale.ndim - 2


Activation = jax.Array | Quantized
Weight = jax.Array | Quantized


def product(x: Quantized, w: Quantized, out_dtype) -> jax.Array:
    """Activations `[T, K]` times one weight of N rows: `[T, N]` of `out_dtype` (see `gemm`)."""
    values, scale = _matrices(w, (), x.shape[1])
    return gemm(x.values, values, _by_rows(x.scale), scale, out_dtype=out_dtype)


def grouped_product(
    x: Quantized, w: Quantized, group_sizes: jax.Array, first_group: jax.Array | int, out_dtype
) -> jax.Array:
    """Activations `[T, K]`, sorted by group, times the weights of their groups (see `grouped_gemm`).

    The weights are `[L, G, ...]`, of which `first_group` counts the groups of all L.
    """
    values, scale = _matrices(w, (w.shape[0] * w.shape[1],), x.shape[1])
    x_scale = _by_rows(x.scale)
    return grouped_gemm(x.values, values, group_sizes, x_scale, scale, first_group=first_group, out_dtype=out_dtype)


def _matrices(w: Quantized, groups: tuple[int, ...], k: int) -> tuple[jax.Array, jax.Array]:
    """Values `[*groups, N, K]` and scales `[*groups, N]` or `[*groups, N / 128, K / 128]`, as products take them."""
    columns = () if w.scheme == "row" else (k // BLOCK,)
    return w.values.reshape(*groups, -1, k), w.scale.reshape(*groups, -1, *columns)


def _by_rows(scale: jax.Array) -> jax.Array:
    """Between scales `[T, K / 128]` and the kernels' `[K / 128, T]`: XLA cancels two such steps in a row."""
    return scale.T


def quantize_for(reader: Quantized, x: jax.Array) -> Quantized:
    """`x [T, K]` in the form that the weight `reader` is multiplied with."""
    values, scale = quantize(x, scheme=reader.scheme, dtype=reader.dtype)
    return Quantized(values, _by_rows(scale), reader.scheme)


def rms_norm_for(reader: Quantized, x: jax.Array, weight: jax.Array, eps: float) -> Quantized:
    """The normalised rows of `x [T, K]` in the form that `reader` is multiplied with."""
    values, scale = rms_norm_quantize(x, weight, eps, scheme=reader.scheme, dtype=reader.dtype)
    return Quantized(values, _by_rows(scale), reader.scheme)


def swiglu_for(reader: Quantized, gate_up: jax.Array, count: jax.Array | None = None) -> Quantized:
    """`silu(gate) * up` of the first `count` of `[T, 2 I]`, or of all, in the form that `reader` is multiplied with."""
    values, scale = swiglu_quantize(gate_up, count, scheme=reader.scheme, dtype=reader.dtype)
    return Quantized(values, _by_rows(scale), reader.scheme)


def quantize_weight_like(w: jax.Array, like: Quantized) -> Quantized:
    """A weight quantised to the form of `like`, whose dimensions may be larger: the rest is zeros.

    Args: `w [*lead, *rows, *columns]` of any float type; `like` has shapes and types only.
    """
    split = w.ndim - like.columns
    lead = w.shape[: like.lead] if like.scheme == "block" else ()
    matrices = w.reshape(*lead, -1, math.prod(w.shape[split:]))

    def one(matrix):
        return quantize_weight(matrix, scheme=like.scheme, dtype=like.dtype)

    for _ in lead:
        one = jax.vmap(one)
    values, scale = one(matrices)
    scale = scale if like.scheme == "block" else scale.reshape(w.shape[:split])
    values = fill_up(values.reshape(w.shape), like.shape)
    return Quantized(values, fill_up(scale, like.scale.shape), like.scheme, like.columns)


def fill_up(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` in a corner of zeros of `shape`."""
    return jnp.pad(x, [(0, large - small) for small, large in zip(x.shape, shape, strict=True)])
