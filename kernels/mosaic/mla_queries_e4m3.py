"""Queries of `mla_blocks` in e4m3 for Hopper: one pass over memory.

XLA would read the latent parts twice, once for the largest number of each row.  Here a row lies in the registers of a
warp from its read to its write.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.stores import store_some
from jaxinfer.kernels.reference.expansion import E4M3
from jaxinfer.kernels.reference.mla_sparse import unit_of_row

ROWS = 16
"""Of a thread block: four of each warp."""
_WARPS, _LANES = 4, 32


def round_queries(
    rows: jax.Array, center: jax.Array, unit: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rounds the latent parts of queries to e4m3, each row over a power of two of its own.

    Args:
        rows: `[R, rank + rope]` bfloat16; `ROWS` divides R, 128 `rank`, and 64 `rope`.
        center: float32 `[rank]`, what is left away from all keys.
        unit: float32 `[1]`, a power of two, that of the keys.
        scale: factor on the scores.

    Returns: e4m3 `[R, rank]`, bfloat16 `[R, rope]` the rotary parts in the same unit, which has that of the keys in it,
    and float32 `[R]` twice: the factor that makes scores of their products, and the center's part of the scores.
    """
    (count, dim), rank = rows.shape, len(center)
    rope = dim - rank

    def body(rows, center, unit, latents, ropes, factors, offsets):
        mine = pl.ds(lax.axis_index("block") * ROWS, ROWS)

        def load(first, columns):
            """So many columns, as wide pieces of a row to a lane as there are; wide ones move fewer sectors."""
            vector = next(v for v in (8, 4, 2) if columns % (_LANES * v) == 0)
            tiling = plgpu.Tiling(((_WARPS, _LANES * vector), (vector,)))
            layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
            found = plgpu.load(rows.at[mine, pl.ds(first, columns)], layout=layout, optimized=False)
            return found.astype(jnp.float32), layout

        def across(numbers, like, layout):
            return lax.broadcast_in_dim(plgpu.layout_cast(numbers, layout.reduce(1)), like.shape, [0])

        latent, layout = load(0, rank)
        middle = plgpu.load(center, layout=layout.reduce(0), optimized=False)
        middle = jnp.sum(latent * lax.broadcast_in_dim(middle, latent.shape, [1]), axis=1)
        rope_part, rope_layout = load(rank, rope)
        row_unit = unit_of_row(jnp.max(jnp.abs(latent), axis=1))
        latents[mine] = (latent * across(_inverse(row_unit), latent, layout)).astype(E4M3)
        row_unit = row_unit * unit[0]
        ropes[mine] = (rope_part * across(_inverse(row_unit), rope_part, rope_layout)).astype(jnp.bfloat16)
        store_some(factors.at[mine], row_unit * scale)
        store_some(offsets.at[mine], middle * scale)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count, rank), E4M3),
            jax.ShapeDtypeStruct((count, rope), jnp.bfloat16),
            jax.ShapeDtypeStruct((count,), jnp.float32),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ),
        grid=(count // ROWS,),
        grid_names=("block",),
        kernel_name="queries_to_e4m3",
    )(rows, center, unit)


def _inverse(power):
    """Of powers of two, exact: the exponents of a number and its inverse add up to twice the bias."""
    bits = lax.bitcast_convert_type(power, jnp.int32)
    return lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
