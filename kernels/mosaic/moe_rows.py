"""Rows of tokens on their way to their experts and back, for Hopper through Pallas Mosaic GPU.

A thread block of a warpgroup for each row.  What lies behind the last row that is wanted costs next to nothing, so that
there may be room for all rows that a router could ask for.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_THREADS = 128
_MOST_BYTES = 16
"""Bytes that a thread reads at a time at most."""
_MOST = 16384
"""Numbers of a row that the registers hold."""


def reason_against(x: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot take rows like those of `x`, None if they can."""
    if x.shape[0] == 0:
        return "there are no rows"
    if x.shape[1] % (_THREADS * 4) or x.shape[1] > _MOST:
        return f"rows of {x.shape[1]} numbers are no multiple of {_THREADS * 4} up to {_MOST}"
    return None


def _layout(columns: int, dtype):
    return plgpu.Layout.WG_STRIDED((columns,), math.gcd(columns // _THREADS, _MOST_BYTES // dtype.itemsize))


def take_rows(x, index, count):
    """See `jaxinfer.kernels.moe_rows.take_rows`."""
    columns = x.shape[1]
    layout = _layout(columns, x.dtype)

    def body(x, index, count, out):
        row = lax.axis_index("row")

        @pl.when(row < count[0])
        def _():
            out[row] = plgpu.load(x.at[index[row]], layout=layout, optimized=False)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((index.shape[0], columns), x.dtype),
        grid=(index.shape[0],),
        grid_names=("row",),
        kernel_name="take_rows",
    )(x, index, count[None])


def sum_rows(x, index, count):
    """See `jaxinfer.kernels.moe_rows.sum_rows`."""
    (tokens, per_token), columns = index.shape, x.shape[1]
    layout = _layout(columns, x.dtype)
    # The rows of a token that there are come first, in their order.
    first = jnp.argsort(index >= count, axis=1, stable=True)
    index = jnp.take_along_axis(index, first, axis=1)
    counts = jnp.sum(index < count, axis=1, dtype=jnp.int32)

    def body(x, index, counts, out):
        token = lax.axis_index("token")

        def add(choice, total):
            row = plgpu.load(x.at[index[token * per_token + choice]], layout=layout, optimized=False)
            return total + row.astype(jnp.float32)

        nothing = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
        out[token] = lax.fori_loop(0, counts[token], add, nothing)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        grid=(tokens,),
        grid_names=("token",),
        kernel_name="sum_rows",
    )(x, index.reshape(-1), counts)
