"""Second level of retrieval on Hopper: the log-sum-exp of the keys of listed blocks, for the rows that list each.

What one list reads, some others read too, and a block of keys is larger than the rows of a list: the lists are turned
around.  Entries (a list and a block) are sorted by block, and up to 256 rows of entries of one block are multiplied
with its keys at a time, as experts multiply their tokens (see `grouped_gemm`).  A persistent grid takes such tiles one
after another; one warpgroup copies rows and keys, 64 numbers at a time, two multiply 128 rows each.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.roles import copy_beside

STEP = 64
"""Numbers of a latent that are multiplied at a time: rows of 128 bytes."""
_WARPGROUPS, _WARPGROUP_ROWS = 2, 128
TILE = _WARPGROUPS * _WARPGROUP_ROWS
"""Rows of a tile."""
_PADDED = 16, 32, 64
"""Rows of a list with those that are added."""
_STAGES = 4
_REGISTERS = 232, 40
"""Of a thread of the math warpgroups, and of the copying one."""
_WGMMA = plgpu.Layout.WGMMA
_ROW, _COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    rows: int
    """Of a list, padded: a divisor of a warpgroup's."""
    listed: int
    """Entries of a list."""
    block: int
    dim: int
    scale: float

    @property
    def steps(self) -> int:
        return self.dim // STEP

    @property
    def entries(self) -> int:
        """Entries of a warpgroup's rows."""
        return _WARPGROUP_ROWS // self.rows


def reason_against(rows: int, block: int, dim: int) -> str | None:
    """Why the kernel cannot take lists of so many rows, and blocks of `block` keys of `dim` numbers, None if it can."""
    if rows > _PADDED[-1]:
        return f"lists have {rows} rows, more than {_PADDED[-1]}"
    if block not in (64, 128):
        return f"blocks have {block} keys, not 64 or 128"
    if dim % STEP:
        return f"latents of {dim} numbers are no multiple of {STEP}"
    return None


def block_masses(
    q: jax.Array, keys: jax.Array, lists: jax.Array, free: jax.Array, *, scale: float, multiprocessors: int
) -> jax.Array:
    """Runs the kernel.

    Args:
        q: `[L, R, D]` bfloat16, the rows of each list, R up to 64.
        keys: `[NB, block, D]` bfloat16; keys that are not free may hold anything.
        lists: `[L, C]` int32, the blocks of each list; -1: none.
        free: `[NB, block]` bool, the keys that count.
        scale: positive.

    Returns: `[L, C, R]` float32, the log-sum-exp of `scale q key` over the keys of each block that count, -inf where
    there are none; anything where a list has no block.
    """
    count, rows, dim = q.shape
    num_blocks, block, _ = keys.shape
    listed, padded = lists.shape[1], next(size for size in _PADDED if rows <= size)
    shape = _Shape(rows=padded, listed=listed, block=block, dim=dim, scale=scale * math.log2(math.e))
    order, tiles, number = schedule(lists, num_blocks, TILE // padded)
    operands = {
        "q": jnp.pad(q, ((0, 0), (0, padded - rows), (0, 0))),
        "keys": keys,
        "bias": jnp.where(free, 0.0, -jnp.inf).astype(jnp.float32),
        "order": order,
        "tiles": tiles,
        "number": number,
    }
    tiling = plgpu.TilingTransform((8, STEP))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    scratch = {
        "q": plgpu.SMEM((_STAGES, TILE, STEP), jnp.bfloat16, transforms=(tiling, swizzle)),
        "keys": plgpu.SMEM((_STAGES, block, STEP), jnp.bfloat16, transforms=(tiling, swizzle)),
        "out": plgpu.SMEM((_WARPGROUPS, _WARPGROUP_ROWS), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=1 + TILE // padded, num_barriers=_STAGES),
        "empty": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
    }

    def body(operands, out):
        pl.run_scoped(lambda scratch: _thread_block(shape, operands, out, scratch), scratch, collective_axes="wg")

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count * listed, padded), jnp.float32),
        grid=(multiprocessors,),
        grid_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="block_masses",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(operands)
    return out.reshape(count, listed, padded)[..., :rows]


def schedule(lists: jax.Array, num_blocks: int, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Entries by block, in tiles of at most `most` entries of one block.

    Args:
        lists: `[L, C]` int32, block numbers below `num_blocks`; negative: none.

    Returns: int32 `[L C]`, the entries by block, those of no block last, an entry being `list * C + place`; int32
    `[3, T]`, the block of each tile, its first place among the entries, and how many it has; int32 `[1]`, the tiles.
    """
    entries = lists.size
    blocks = jnp.where(lists < 0, num_blocks, lists).reshape(-1).astype(jnp.int32)
    sorted_blocks, order = lax.sort((blocks, jnp.arange(entries, dtype=jnp.int32)), num_keys=1, is_stable=False)
    del sorted_blocks
    counts = jnp.zeros(num_blocks + 1, jnp.int32).at[blocks].add(1)[:num_blocks]
    ends = jnp.cumsum(counts)
    tile_ends = jnp.cumsum((counts + most - 1) // most)
    tile = jnp.arange(min(entries, entries // most + num_blocks), dtype=jnp.int32)
    # A sum over all pairs is one kernel; a binary search is a loop of small ones.
    block = jnp.minimum(jnp.sum(tile_ends <= tile[:, None], axis=1, dtype=jnp.int32), num_blocks - 1)
    start = (ends - counts)[block] + (tile - (tile_ends - (counts + most - 1) // most)[block]) * most
    return order, jnp.stack((block, start, jnp.clip(ends[block] - start, 0, most))), tile_ends[-1:]


def _thread_block(shape, operands, out, scratch):
    copy_beside(
        lambda warpgroup: _multiply(shape, operands, out, scratch, warpgroup),
        lambda: _copy(shape, operands, scratch),
        warpgroups=_WARPGROUPS,
        registers=_REGISTERS,
    )


def _entry(operands, tile, place):
    """The entry of a place of the tile; of a place that it does not have, the last one."""
    first, count = operands["tiles"][1, tile], operands["tiles"][2, tile]
    return operands["order"][first + jnp.minimum(place, count - 1)]


def _copy(shape, operands, scratch):
    """The copying warpgroup."""

    def copy_tile(info, carry):
        (tile,) = info.index
        block, count = operands["tiles"][0, tile], operands["tiles"][2, tile]
        sources = [
            lax.div(_entry(operands, tile, place), jnp.int32(shape.listed)) for place in range(TILE // shape.rows)
        ]

        def step(k, done):
            slot = lax.rem(done, jnp.int32(_STAGES))

            @pl.when(done >= _STAGES)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[slot])

            numbers, full = pl.ds(k * STEP, STEP), scratch["full"].at[slot]
            plgpu.copy_gmem_to_smem(operands["keys"].at[block, :, numbers], scratch["keys"].at[slot], full)
            for place, source in enumerate(sources):

                def rows(place=place, source=source):
                    target = scratch["q"].at[slot, pl.ds(place * shape.rows, shape.rows)]
                    plgpu.copy_gmem_to_smem(operands["q"].at[source, :, numbers], target, full)

                # Rows of no entry keep what was there before.
                lax.cond(place < count, rows, lambda: plgpu.barrier_arrive(full))
            return done + 1

        return lax.fori_loop(0, shape.steps, step, carry)

    count = operands["number"][0]
    done = plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))(copy_tile)

    # A barrier may not be given up before its last phase has been seen.
    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(_STAGES))])

    lax.fori_loop(jnp.maximum(done - _STAGES, 0), done, drain, None)


def _multiply(shape, operands, out, scratch, warpgroup):
    """A math warpgroup: 128 rows of each tile."""
    rows = pl.ds(warpgroup * _WARPGROUP_ROWS, _WARPGROUP_ROWS)
    staged = scratch["out"].at[warpgroup]

    def release(step):
        plgpu.barrier_arrive(scratch["empty"].at[lax.rem(step, jnp.int32(_STAGES))])

    def products(accumulator, done):
        def step(k, _):
            slot = lax.rem(done + k, jnp.int32(_STAGES))
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.wgmma(accumulator, scratch["q"].at[slot, rows], scratch["keys"].at[slot].transpose((1, 0)))
            # The products of the step before are finished, so its stage may be filled again.
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: release(done + k - 1))

        lax.fori_loop(0, shape.steps, step, None)
        result = accumulator[...]
        release(done + shape.steps - 1)
        return result

    def across(values):
        return lax.broadcast_in_dim(values, (_WARPGROUP_ROWS, shape.block), [0])

    def skip(done):
        """Lets the stages of a tile be filled again that has no rows for this warpgroup."""

        @pl.loop(done, done + shape.steps)
        def _step(step):
            plgpu.barrier_wait(scratch["full"].at[lax.rem(step, jnp.int32(_STAGES))])
            release(step)

    def of_rows(tile, count, done):
        bias = plgpu.load(operands["bias"].at[operands["tiles"][0, tile]], layout=_COLUMN, optimized=False)
        logits = pl.run_scoped(
            lambda accumulator: products(accumulator, done),
            plgpu.WGMMAAccumulatorRef((_WARPGROUP_ROWS, shape.block), jnp.float32),
        )
        counts = lax.broadcast_in_dim(bias, logits.shape, [1]) == 0.0
        # Keys that do not count may hold anything, also NaN.
        logits = jnp.where(counts, logits * shape.scale, -jnp.inf)
        top = jnp.max(logits, axis=1)
        # A row without keys would subtract infinity from infinity.
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        total = jnp.sum(jnp.exp2(logits - across(shift)), axis=1)
        empty = total == 0.0
        lse = jnp.where(empty, -jnp.inf, shift * math.log(2) + jnp.log(jnp.where(empty, 1.0, total)))
        # The copies of the tile before have read this.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = plgpu.layout_cast(lse, _ROW)
        plgpu.commit_smem()
        for place in range(shape.entries):
            number = warpgroup * shape.entries + place

            @pl.when(number < count)
            def _(place=place, number=number):
                source = staged.at[pl.ds(place * shape.rows, shape.rows)]
                plgpu.copy_smem_to_gmem(source, out.at[_entry(operands, tile, number)])

    @plgpu.nd_loop((operands["number"][0],), collective_axes="block", init_carry=jnp.int32(0))
    def _of_tile(info, carry):
        (tile,) = info.index
        count = operands["tiles"][2, tile]
        mine = count > warpgroup * shape.entries
        pl.when(mine)(lambda: of_rows(tile, count, carry))
        pl.when(~mine)(lambda: skip(carry))
        return carry + shape.steps

    plgpu.wait_smem_to_gmem(0)
