"""Quantisation for Hopper through Pallas Mosaic GPU: one pass over memory, a thread block of a warpgroup for each row.

A row lies in the registers of the 128 threads from its first read to the last write, four neighbouring numbers to a
thread at a time, so that the 128 numbers of a block belong to one warp.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.stores import store_some
from jaxinfer.kernels.reference.quantize import AMAX_FLOOR, BLOCK, scale_of

_VECTOR, _THREADS = 4, 128
_MOST = 18432
"""Numbers of a row that the registers hold."""


def reason_against(rows: int, columns: int, dtype) -> str | None:
    """Why the kernel cannot quantise `[rows, columns]`, None if it can."""
    if rows == 0:
        return "there are no rows"
    if columns % (_VECTOR * _THREADS) or not 0 < columns <= _MOST:
        return f"K = {columns} is no multiple of {_VECTOR * _THREADS} up to {_MOST}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the numbers are {dtype}"
    return None


def quantize(x, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.quantize`."""
    return _rows(_values, {"x": x}, x.shape[1], scheme, dtype, power_of_two)


def rms_norm_quantize(x, weight, eps, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.rms_norm_quantize`."""
    norm = functools.partial(_norm, eps)
    return _rows(norm, {"x": x, "weight": weight}, x.shape[1], scheme, dtype, power_of_two)


def swiglu_quantize(gate_up, count=None, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.swiglu_quantize`."""
    return _rows(_swiglu, {"x": gate_up}, gate_up.shape[1] // 2, scheme, dtype, power_of_two, count)


class _Row:
    """How a row of K numbers lies in the registers: flat, or as `[K / 128, 128]`, whose lines are reduced apart."""

    def __init__(self, columns, scheme):
        self.blocks = scheme == "block"
        if self.blocks:
            self.shape = columns // BLOCK, BLOCK
            tiling = plgpu.Tiling(((_THREADS // 32, BLOCK), (_VECTOR,)))
            self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        else:
            self.shape = (columns,)
            self.layout = plgpu.Layout.WG_STRIDED(self.shape, _VECTOR)

    def load(self, ref) -> jax.Array:
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

    def mean(self, x) -> jax.Array:
        total = jnp.sum(jnp.sum(x, axis=1) if self.blocks else x)
        return total * (1 / x.size)


def _values(row, refs, index):
    return row.load(refs["x"].at[index, 0])


def _norm(eps, row, refs, index):
    x = row.load(refs["x"].at[index, 0])
    return x * lax.rsqrt(row.mean(x * x) + eps) * row.load(refs["weight"].at[0, 0])


def _swiglu(row, refs, index):
    gate, up = (row.load(refs["x"].at[index, half]) for half in range(2))
    # The square of the reciprocal root is a reciprocal without a division.
    root = lax.rsqrt(1 + jnp.exp(-gate))
    return gate * (root * root) * up


def divide(x, scale, blocks):
    """`x / scale` rounded as a division is, for the price of three products where products and sums are fused.

    The quotient by the reciprocal is off in the last place; its remainder is exact and corrects it (P. Markstein,
    Computation of elementary functions on the IBM RISC System/6000 processor, 1990).
    """
    reciprocal = 1 / scale
    reciprocal = reciprocal + reciprocal * (1 - scale * reciprocal)
    if blocks:
        scale, reciprocal = (lax.broadcast_in_dim(a, x.shape, [0]) for a in (scale, reciprocal))
    quotient = x * reciprocal
    # In this order -0 stays -0.
    return quotient - (quotient * scale - x) * reciprocal


def _rows(prologue, operands, columns, scheme, dtype, power_of_two, count=None):
    """Quantises what `prologue` makes of each row, of the first `count` where that is given."""
    row = _Row(columns, scheme)
    operands = {name: a.reshape(-1, a.shape[-1] // columns, *row.shape) for name, a in operands.items()}
    rows = operands["x"].shape[0]
    if count is not None:
        operands["count"] = count[None]

    def body(operands, q, scales):
        index = lax.axis_index("row")

        def quantized():
            x = prologue(row, operands, index)
            amax = jnp.maximum(jnp.max(jnp.abs(x), axis=x.ndim - 1), AMAX_FLOOR)
            scale = scale_of(amax, dtype, power_of_two)
            x = divide(x, scale, row.blocks)
            q[index] = (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)
            if row.blocks:
                store_some(scales.at[:, index], scale)
            else:
                scales[index] = scale

        if count is None:
            quantized()
        else:
            pl.when(index < operands["count"][0])(quantized)

    q, scales = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, *row.shape), dtype),
            jax.ShapeDtypeStruct((columns // BLOCK, rows) if row.blocks else (rows,), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="quantize",
    )(operands)
    return q.reshape(rows, columns), scales
