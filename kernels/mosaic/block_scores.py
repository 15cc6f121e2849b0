"""First level of retrieval on Hopper: the best group of every key block and the log-sum-exp over all groups, by row.

A persistent grid of clusters of two thread blocks.  Each holds 128 rows (queries that speak) in shared memory and reads
the means of some thousand groups, tile after tile, copied once for both; one warpgroup copies, two multiply 64 rows
each.  What leaves the registers is one number for each block instead of one for each group, and the sums of the
softmax, which is online as in FlashAttention (arXiv 2205.14135).

The groups of a tile are ordered by their place in the block: its first columns are the first groups of all its blocks,
and so on.  The maximum over the groups of a block is then one of registers of the same thread.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.tiles import SHARED_MEMORY

ROWS = 64
"""Rows of a math warpgroup."""
STEP = 64
"""Numbers of a latent that are multiplied at a time: rows of 128 bytes."""
_WARPGROUPS, _CLUSTER = 2, 2
TOGETHER = ROWS * _WARPGROUPS * _CLUSTER
"""Rows of a cluster."""
_ALIGNMENT = 8
_MATH_REGISTERS, _COPY_REGISTERS = 232, 40
_PART = 1024
"""Blocks that a cluster reads with the same rows, about: the copy of the rows is a fiftieth of that of the means."""
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the work is cut.

    Attributes:
        columns: groups of a tile.
        stages: steps over the numbers of a latent, of the means of a tile, held in shared memory at a time.
    """

    columns: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    rows: int
    dim: int
    per_block: int
    blocks: int
    """Key blocks of a tile."""
    tiles: int
    part: int
    """Tiles of a part."""

    @property
    def steps(self) -> int:
        return self.dim // STEP

    @property
    def pairs(self) -> int:
        return self.rows // TOGETHER

    @property
    def parts(self) -> int:
        return -(-self.tiles // self.part)


CHOICES = Blocks(columns=192, stages=3), Blocks(columns=128, stages=4), Blocks(columns=64, stages=4)
"""Ways to cut the work, the fastest first."""


def reason_against(dim: int, per_block: int) -> str | None:
    """Why the kernel cannot take latents of `dim` numbers and blocks of `per_block` groups, None if it can."""
    if dim % STEP:
        return f"latents of {dim} numbers are no multiple of {STEP}"
    if not _fitting(dim, per_block):
        return f"{per_block} groups of {dim} numbers in a block do not fit into tiles and shared memory"
    return None


def _fitting(dim, per_block):
    """The choices whose tiles have whole blocks, halves of which two thread blocks copy, and fit."""
    return [
        blocks
        for blocks in CHOICES
        if blocks.columns % (2 * _ALIGNMENT * per_block) == 0 and _shared_memory_bytes(dim, blocks) <= SHARED_MEMORY
    ]


def _shared_memory_bytes(dim, blocks):
    return 2 * (_WARPGROUPS * ROWS * dim + blocks.stages * blocks.columns * STEP)


def block_scores(
    q: jax.Array,
    means: jax.Array,
    first: jax.Array,
    end: jax.Array,
    *,
    group: int,
    scale: float,
    multiprocessors: int,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        q: `[N, D]` bfloat16.
        means: `[NB, groups of a block, D]` bfloat16; may hold anything in blocks that no row may retrieve.
        first, end: `[N]` int32: a row may retrieve the blocks `first .. end - 1`.
        group: tokens of a group.
        scale: positive.
        multiprocessors: at least 2.
        blocks: chosen where it is None.

    Returns: `[N, B]` float32, `B` being `NB` rounded up to whole tiles, the largest `scale q mean + ln(group)` of each
    block, and anything for blocks that the row may not retrieve; and `[N]` float32, the log-sum-exp of all groups of
    the blocks it may retrieve.
    """
    count, dim = q.shape
    num_blocks, per_block, _ = means.shape
    blocks = blocks or _fitting(dim, per_block)[0]
    rows, of_tile = -(-count // TOGETHER) * TOGETHER, blocks.columns // per_block
    tiles = -(-num_blocks // of_tile)
    parts = max(1, round(tiles * of_tile / _PART))
    part = -(-tiles // parts)
    shape = _Shape(rows=rows, dim=dim, per_block=per_block, blocks=of_tile, tiles=tiles, part=part)
    limits = jnp.stack([jnp.pad(limit.astype(jnp.int32), (0, rows - count)) for limit in (first, end)])
    last = jnp.where(limits[0] < limits[1], limits[1], 0)
    operands = {
        # Swizzled copies want whole tiles of 8 rows.
        "q": jnp.pad(q, ((0, -count % _ALIGNMENT), (0, 0))),
        "means": jnp.pad(means, ((0, -num_blocks % _ALIGNMENT), (0, 0), (0, 0))),
        "limits": limits,
        "tiles": -(-jnp.max(last.reshape(-1, TOGETHER), axis=1) // of_tile),
    }

    def body(operands, best, lse):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, blocks, group, scale, operands, best, lse, scratch),
            _scratch(shape, blocks),
            collective_axes="wg",
        )

    best, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, tiles * of_tile), jnp.float32),
            jax.ShapeDtypeStruct((shape.parts, rows), jnp.float32),
        ),
        grid=(multiprocessors // _CLUSTER,),
        grid_names=("block",),
        cluster=(_CLUSTER,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="block_scores",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(operands)
    return best[:count], jax.nn.logsumexp(lse[:, :count], axis=0)


def _scratch(shape, blocks):
    tiling = plgpu.TilingTransform((_ALIGNMENT, STEP))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

    def swizzled(*dimensions):
        return plgpu.SMEM(dimensions, jnp.bfloat16, transforms=(tiling, swizzle))

    return {
        "q": swizzled(_WARPGROUPS, ROWS, shape.dim),
        "means": swizzled(blocks.stages, blocks.columns, STEP),
        "q_full": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "q_empty": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "full": plgpu.Barrier(num_arrivals=shape.per_block, num_barriers=blocks.stages),
        "empty": plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=_WARPGROUPS, num_barriers=blocks.stages
        ),
    }


def _item(shape, operands, index):
    """The pair of thread blocks' rows of an index, its part, and how many tiles of that are read.

    All rows pass over a part before the next, so that it stays in L2.
    """
    part, pair = lax.div(index, jnp.int32(shape.pairs)), lax.rem(index, jnp.int32(shape.pairs))
    return pair, part, jnp.clip(operands["tiles"][pair] - part * shape.part, 0, shape.part)


def _rows(pair, warpgroup):
    return pl.ds(pair * TOGETHER + (lax.axis_index("cluster") * _WARPGROUPS + warpgroup) * ROWS, ROWS)


def _thread_block(shape, blocks, group, scale, operands, best, lse, scratch):
    warpgroup = lax.axis_index("wg")

    def copy():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        _copy(shape, blocks, operands, scratch)

    def score():
        plgpu.set_max_registers(_MATH_REGISTERS, action="increase")
        _score(shape, blocks, group, scale, operands, best, lse, scratch, warpgroup)

    # Two branches of one: the assembler keeps to the limits only where no path leads from one role into the other.
    lax.cond(warpgroup == _WARPGROUPS, copy, score)


def _copy(shape, blocks, operands, scratch):
    """The copying warpgroup: the rows of an item once, then step after step of the means, tile after tile."""

    def await_free(name, slot, when):
        @pl.when(when)
        def _():
            plgpu.barrier_wait(scratch[name].at[slot])

    def copy_rows(pair, before):
        for warpgroup in range(_WARPGROUPS):
            await_free("q_empty", warpgroup, before > 0)
            source = operands["q"].at[_rows(pair, jnp.int32(warpgroup))]
            plgpu.copy_gmem_to_smem(source, scratch["q"].at[warpgroup], scratch["q_full"].at[warpgroup])

    def copy_item(info, carry):
        done, before = carry
        pair, part, tiles = _item(shape, operands, info.index[0])
        pl.when(tiles > 0)(lambda: copy_rows(pair, before))

        def step(index, done):
            slot = lax.rem(done, jnp.int32(blocks.stages))
            await_free("empty", slot, done >= blocks.stages)
            rows = pl.ds((part * shape.part + lax.div(index, jnp.int32(shape.steps))) * shape.blocks, shape.blocks)
            numbers = pl.ds(lax.rem(index, jnp.int32(shape.steps)) * STEP, STEP)
            for place in range(shape.per_block):
                plgpu.copy_gmem_to_smem(
                    operands["means"].at[rows, place, numbers],
                    scratch["means"].at[slot, pl.ds(place * shape.blocks, shape.blocks)],
                    scratch["full"].at[slot],
                    collective_axes="cluster",
                )
            return done + 1

        done = lax.fori_loop(0, tiles * shape.steps, step, done)
        return done, before + jnp.where(tiles > 0, 1, 0)

    start = jnp.int32(0), jnp.int32(0)
    done, before = plgpu.nd_loop((shape.parts * shape.pairs,), collective_axes="block", init_carry=start)(copy_item)
    for warpgroup in range(_WARPGROUPS):
        await_free("q_empty", warpgroup, before > 0)

    # A barrier may not be given up before its last phase has been seen.
    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(blocks.stages))])

    lax.fori_loop(jnp.maximum(done - blocks.stages, 0), done, drain, None)


def _score(shape, blocks, group, scale, operands, best, lse, scratch, warpgroup):
    """A math warpgroup: 64 rows of each item."""
    factor = scale * math.log2(math.e)
    q = scratch["q"].at[warpgroup]

    def across(rows):
        return lax.broadcast_in_dim(rows, (ROWS, shape.blocks), [0])

    def per_row(value):
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), _ROW)

    def products(accumulator, done):
        def release(step):
            plgpu.barrier_arrive(scratch["empty"].at[lax.rem(step, jnp.int32(blocks.stages))])

        for k in range(shape.steps):
            slot = lax.rem(done + k, jnp.int32(blocks.stages))
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.wgmma(accumulator, q.at[:, pl.ds(k * STEP, STEP)], scratch["means"].at[slot].transpose((1, 0)))
            if k:
                # The products of the step before are finished, so its stage may be filled again.
                plgpu.wgmma_wait(1)
                release(done + k - 1)
        result = accumulator[...]
        release(done + shape.steps - 1)
        return result

    @plgpu.nd_loop((shape.parts * shape.pairs,), collective_axes="block", init_carry=jnp.int32(0))
    def _of_item(info, carry):
        pair, part, tiles = _item(shape, operands, info.index[0])
        rows = _rows(pair, warpgroup)
        first, end = (plgpu.load(operands["limits"].at[i, rows], layout=_ROW, optimized=False) for i in range(2))
        pl.when(tiles > 0)(lambda: plgpu.barrier_wait(scratch["q_full"].at[warpgroup]))

        def tile(index, carry):
            done, top, total = carry
            logits = pl.run_scoped(
                lambda accumulator: products(accumulator, done),
                plgpu.WGMMAAccumulatorRef((ROWS, blocks.columns), jnp.float32),
            )
            pieces = [logits[:, i * shape.blocks : (i + 1) * shape.blocks] for i in range(shape.per_block)]
            start = (part * shape.part + index) * shape.blocks
            block = plgpu.broadcasted_iota(jnp.int32, (ROWS, shape.blocks), 1, layout=_WGMMA)
            eligible = (block >= across(first - start)) & (block < across(end - start))
            highest = pieces[0]
            for piece in pieces[1:]:
                highest = jnp.maximum(highest, piece)
            highest = jnp.where(eligible, highest, -jnp.inf)
            best[rows, pl.ds(start, shape.blocks)] = highest * scale + math.log(group)
            new_top = jnp.maximum(top, jnp.max(highest, axis=1) * factor)
            # A row that has seen no block yet would subtract infinity from infinity.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights = [jnp.exp2(piece * factor - across(shift)) for piece in pieces]
            # What is not eligible may hold anything, also NaN.
            weight = jnp.where(eligible, sum(weights[1:], weights[0]), 0.0)
            return done + shape.steps, new_top, total * jnp.exp2(top - shift) + jnp.sum(weight, axis=1)

        done, top, total = lax.fori_loop(0, tiles, tile, (carry, per_row(-jnp.inf), per_row(0.0)))
        pl.when(tiles > 0)(lambda: plgpu.barrier_arrive(scratch["q_empty"].at[warpgroup]))
        empty = total == 0.0
        sums = top * math.log(2) + jnp.log(jnp.where(empty, 1.0, total)) + math.log(group)
        lse.at[part, rows][...] = jnp.where(empty, -jnp.inf, sums)
        return done
