"""`grouped_gemm` for Hopper through Pallas Mosaic GPU: the schedule of tiles and groups for the kernel of `matmul`."""

import jax
import jax.numpy as jnp

from jaxinfer.kernels.mosaic.gemm import prepare
from jaxinfer.kernels.mosaic.gemm import reason_against as reason_against
from jaxinfer.kernels.mosaic.matmul import ALIGNMENT, matmul
from jaxinfer.kernels.tiles import Device, Problem, Tiles, choose, device


def schedule(group_sizes: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Which tiles of rows there are, computed on the device: nothing depends on the sizes but the data.

    A group's first tile starts at its first row, rounded down to the alignment that swizzled copies need, so a tile
    may hold rows of its neighbours, which are computed and not stored.

    Args:
        group_sizes: int32 `[groups]`; their sum is at most `rows`.
        tile: rows of a tile.

    Returns: int32 `[4, most tiles]` (group, row where the tile starts, first and one past the last row of the tile that
    belong to the group) and the number of tiles, int32 `[1]`.
    """
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    aligned = starts // ALIGNMENT * ALIGNMENT
    tiles = jnp.where(group_sizes > 0, (ends - aligned + tile - 1) // tile, 0)
    tile_ends = jnp.cumsum(tiles)
    most = (rows + min(rows, group_sizes.shape[0]) * (tile + ALIGNMENT - 2)) // tile
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile_ends[None] <= index[:, None], axis=1), group_sizes.shape[0] - 1)
    row = aligned[group] + (index - (tile_ends - tiles)[group]) * tile
    first = jnp.maximum(starts[group] - row, 0)
    last = jnp.minimum(ends[group] - row, tile)
    return jnp.stack((group, row, first, last)).astype(jnp.int32), tile_ends[-1:].astype(jnp.int32)


def grouped_gemm(
    x,
    w,
    group_sizes,
    x_scale,
    w_scale,
    *,
    first_group: jax.Array | int = 0,
    out_dtype,
    tiles: Tiles | None,
    on: Device | None = None,
) -> jax.Array:
    """See `jaxinfer.kernels.grouped_gemm.grouped_gemm`; `on` as in `gemm`."""
    scheme, operands = prepare(x, w, x_scale, w_scale)
    problem = Problem(
        m=operands["x"].shape[0],
        n=w.shape[1],
        k=x.shape[1],
        dtype=x.dtype,
        out_dtype=jnp.dtype(out_dtype),
        scheme=scheme,
        groups=group_sizes.shape[0],
    )
    on = on or device()
    tiles = tiles or choose(problem, on)
    table, operands["row_tiles"] = schedule(group_sizes, problem.m, tiles.m)
    operands["schedule"] = table.at[0].add(first_group)
    return matmul(problem, tiles, operands, on.multiprocessors)[: x.shape[0]]
