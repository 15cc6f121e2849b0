"""First level of retrieval on Hopper: the largest product with a group of every key block, by row.

A persistent grid of clusters of two thread blocks.  Each holds 128 rows (queries that speak) in shared memory and reads
the index of some thousand groups, tile after tile, copied once for both; one warpgroup copies, two multiply 64 rows
each.  What leaves the registers is one number for each block instead of one for each group.

The groups of a tile are ordered by their place in the block: its first columns are the first groups of all its blocks,
and so on.  The maximum over the groups of a block is then one of registers of the same thread, and a tile falls into
pieces, some places of all its blocks each, whose maxima are found while the products of the next run.

Tensor cores multiply e4m3 so fast that the maxima of float32 sums would take as long.  Sums are float16: two lie in a
register, and one instruction takes the maximum of two or three such pairs.  They are off by about 2^-11 of the largest,
which is not much more than in float32, for which the tensor cores add up e4m3 products with about 14 bits.  Beyond
65,504 they saturate: with queries of up to 28 that takes an index ten times as large as its moments say (see
`kernels.selection.index`).
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from jaxinfer.kernels.mosaic.roles import copy_beside
from jaxinfer.kernels.mosaic.stores import store_some
from jaxinfer.kernels.tiles import SHARED_MEMORY
from jaxinfer.kernels.words import from_words, words

ROWS = 64
"""Rows of a math warpgroup."""
UNIT = 64
"""Numbers of the index come in multiples of it."""
_SWIZZLE = 128
"""Bytes of a row of shared memory at most, that is, numbers that are multiplied at a time."""
_AT_ONCE = 32
"""Numbers of a row that an instruction multiplies."""
SUMS = jnp.float16
"""In which products are added up."""
_LARGEST = jnp.finfo(SUMS).max
_WARPGROUPS, _CLUSTER = 2, 2
TOGETHER = ROWS * _WARPGROUPS * _CLUSTER
"""Rows of a cluster."""
_PIECES = 4
"""Of a tile: the more, the seldomer a warpgroup's products stand still; with eight ptxas runs out of registers."""
_IN_REGISTERS = 384
"""Numbers of a row at most: they are held in registers, so that products read less from shared memory."""
_ALIGNMENT = 8
_REGISTERS = 240, 24
"""Of a thread of the math warpgroups, and of the copying one."""
_STAGE_BYTES = 128 * 1024
"""Shared memory for the index at most."""
_PART = 1024
"""Blocks that a cluster reads with the same rows, about: their index stays in L2, and the copy of the rows is nothing
beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the work is cut.

    Attributes:
        piece: groups of a piece of a tile: those of some places of all its blocks.
        stages: steps of a piece held in shared memory at a time.
    """

    piece: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    rows: int
    dim: int
    blocks: int
    """Key blocks of a tile."""
    tiles: int
    part: int
    """Tiles of a part."""

    @property
    def step(self) -> int:
        """Numbers of a row that are multiplied at a time."""
        return _step(self.dim)

    @property
    def steps(self) -> int:
        """Of a piece."""
        return self.dim // self.step

    @property
    def tile_steps(self) -> int:
        return _PIECES * self.steps

    @property
    def pairs(self) -> int:
        return self.rows // TOGETHER

    @property
    def parts(self) -> int:
        return -(-self.tiles // self.part)


def reason_against(dim: int, per_block: int) -> str | None:
    """Why the kernel cannot take rows of `dim` numbers and blocks of `per_block` groups, None if it can."""
    if dim % UNIT:
        return f"rows of the index of {dim} numbers are no multiple of {UNIT}"
    if per_block not in (4, 8, 16, 32):
        return f"blocks have {per_block} groups, not 4, 8, 16 or 32"
    if dim > _IN_REGISTERS:
        return f"rows of the index of {dim} numbers do not fit into registers"
    return None


def choose(dim: int, per_block: int) -> Blocks:
    """The larger pieces where three accumulators, the rows and the maxima of all blocks fit into registers."""
    step = _step(dim)
    piece = 256 if dim == step and per_block > 8 else 128
    room = SHARED_MEMORY - _WARPGROUPS * ROWS * dim
    return Blocks(piece=piece, stages=min(_STAGE_BYTES, room) // (piece * step))


def _step(dim: int) -> int:
    return math.gcd(dim, _SWIZZLE)


def block_scores(
    q: jax.Array,
    index: jax.Array,
    first: jax.Array,
    end: jax.Array,
    *,
    multiprocessors: int,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Runs the kernel.

    Args:
        q: `[N, D]` e4m3 (see `kernels.selection.index.query_index`).
        index: `[NB, groups of a block, D]` e4m3; may hold anything in blocks that no row may retrieve.
        first, end: `[N]` int32: a row may retrieve the blocks `first .. end - 1`.
        multiprocessors: at least 2.
        blocks: chosen where it is None.

    Returns: `[N, B]` float16, `B` being `NB` rounded up to whole tiles, the largest `q index` of each block, and
    anything for blocks that the row may not retrieve.
    """
    count, dim = q.shape
    num_blocks, per_block, _ = index.shape
    blocks = blocks or choose(dim, per_block)
    rows, of_tile = -(-count // TOGETHER) * TOGETHER, _PIECES * blocks.piece // per_block
    tiles = -(-num_blocks // of_tile)
    parts = max(1, round(tiles * of_tile / _PART))
    part = -(-tiles // parts)
    shape = _Shape(rows=rows, dim=dim, blocks=of_tile, tiles=tiles, part=part)
    last = jnp.pad(jnp.where(first < end, end, 0), (0, rows - count))
    # A copy of the whole index, so that a step of a piece is one copy of the kernel's.
    index = jnp.pad(words(index), ((0, tiles * of_tile - num_blocks), (0, 0), (0, 0)))
    index = index.reshape(tiles, of_tile, per_block, -1).swapaxes(1, 2).reshape(-1, blocks.piece, dim // 4)
    operands = {
        # Swizzled copies want whole tiles of 8 rows.
        "q": jnp.pad(q, ((0, -count % _ALIGNMENT), (0, 0))),
        "index": from_words(index, q.dtype),
        "tiles": -(-jnp.max(last.reshape(-1, TOGETHER), axis=1) // of_tile),
    }

    def body(operands, best):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, blocks, operands, best, scratch),
            _scratch(shape, blocks),
            collective_axes="wg",
        )

    best = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, tiles * of_tile), SUMS),
        grid=(multiprocessors // _CLUSTER,),
        grid_names=("block",),
        cluster=(_CLUSTER,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="block_scores",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(operands)
    return best[:count]


def _transforms(step):
    """Of rows of so many bytes in shared memory: reads of eight rows meet all banks once."""
    tiling = plgpu.TilingTransform((_ALIGNMENT, step))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(step)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def _scratch(shape, blocks):
    def swizzled(*dimensions):
        return plgpu.SMEM(dimensions, jnp.float8_e4m3fn, transforms=_transforms(shape.step))

    return {
        "q": swizzled(_WARPGROUPS, ROWS, shape.dim),
        "index": swizzled(blocks.stages, blocks.piece, shape.step),
        "q_full": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "q_empty": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "full": plgpu.Barrier(num_barriers=blocks.stages),
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


def _thread_block(shape, blocks, operands, best, scratch):
    copy_beside(
        lambda warpgroup: _score(shape, blocks, operands, best, scratch, warpgroup),
        lambda: _copy(shape, blocks, operands, scratch),
        warpgroups=_WARPGROUPS,
        registers=_REGISTERS,
    )


def _copy(shape, blocks, operands, scratch):
    """The copying warpgroup: the rows of an item once, then step after step of the index, tile after tile."""

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
            piece, k = lax.div(index, jnp.int32(shape.steps)), lax.rem(index, jnp.int32(shape.steps))
            plgpu.copy_gmem_to_smem(
                operands["index"].at[part * shape.part * _PIECES + piece, :, pl.ds(k * shape.step, shape.step)],
                scratch["index"].at[slot],
                scratch["full"].at[slot],
                collective_axes="cluster",
            )
            return done + 1

        done = lax.fori_loop(0, tiles * shape.tile_steps, step, done)
        return done, before + jnp.where(tiles > 0, 1, 0)

    start = jnp.int32(0), jnp.int32(0)
    done, before = plgpu.nd_loop((shape.parts * shape.pairs,), collective_axes="block", init_carry=start)(copy_item)
    for warpgroup in range(_WARPGROUPS):
        await_free("q_empty", warpgroup, before > 0)

    # A barrier may not be given up before its last phase has been seen.
    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(blocks.stages))])

    lax.fori_loop(jnp.maximum(done - blocks.stages, 0), done, drain, None)


def _product(sums, rows, index):
    """Starts to add the product of `rows [64, K]` (registers) with `index [N, K]` to sums, which it returns.

    They are written until the product is waited for.  None: they are the product alone.  Below Pallas, whose
    accumulators cannot be float16, and have to be set before the first product.
    """
    shape, step = (ROWS, index.shape[0]), rows.shape[1]
    types = plgpu.Layout.WGMMA_8BIT, plgpu.RefType(_transforms(step))

    def multiply(_, rows, index, sums=None):
        i32, i64, layout = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), mgpu.WGMMA_LAYOUT
        (descriptor, (_, (stride, *_))), *_ = mma_utils.create_descriptor(
            mgpu.memref_transpose(index, (1, 0, 3, 2)),
            swizzle=step,
            large_tile=(step, step),
            group_size=(step, shape[1]),
            logical_k_major=True,
        )
        rows = mgpu.optimization_barrier(rows)
        nvvm.wgmma_fence_aligned()
        held = [] if sums is None else [mgpu.utils.bitcast(register, i32) for register in sums.registers.flat]
        for start in range(0, step, _AT_ONCE):
            part = rows[:, start : start + _AT_ONCE].registers.flat
            operands = [*(mgpu.utils.bitcast(register, i32) for register in part), descriptor]
            held = _start(held, operands, shape[1])
            descriptor = llvm.add(descriptor, mgpu.c(stride >> 4, i64), overflow_flags=llvm.IntegerOverflowFlags.none)
        nvvm.wgmma_commit_group_sync_aligned()
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        registers = np.empty(len(held), dtype=object)
        registers[:] = [mgpu.utils.bitcast(register, pair) for register in held]
        registers = registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    arguments = (rows, index) if sums is None else (rows, index, sums)
    return plgpu.inline_mgpu(
        arg_types=types if sums is None else (*types, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct(shape, SUMS, layout=plgpu.Layout.WGMMA),
    )(multiply)(*arguments)


def _start(held, operands, columns):
    """Starts one instruction: registers of two float16 sums each, `held` (none: 0) and the product of the operands."""
    count, i32 = columns // 4, ir.IntegerType.get_signless(32)
    names = iter(f"${number}" for number in itertools.count())
    out, _, rows, (index,) = (list(itertools.islice(names, n)) for n in (count, len(held), 4, 1))
    found = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * count),
        [*held, *operands],
        f"{{ .reg .pred add; setp.ne.b32 add, {int(bool(held))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{_AT_ONCE}.f16.e4m3.e4m3 "
        f"{{{','.join(out)}}}, {{{','.join(rows)}}}, {index}, add, 1, 1; }}",
        ",".join(["=r"] * count + [str(number) for number in range(len(held))] + ["r"] * 4 + ["l"]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, found, [number]) for number in range(count)]


def _score(shape, blocks, operands, best, scratch, warpgroup):
    """A math warpgroup: 64 rows of each item.

    Every piece of a tile has sums of its own.  No products run from one tile to the next: ptxas would then let all run
    one after the other.
    """

    def release(step):
        plgpu.barrier_arrive(scratch["empty"].at[lax.rem(step, jnp.int32(blocks.stages))])

    def multiply(sums, rows, step):
        slot = lax.rem(step, jnp.int32(blocks.stages))
        plgpu.barrier_wait(scratch["full"].at[slot])
        return _product(sums, rows, scratch["index"].at[slot])

    def finish(sums, step, running):
        """The maximum over the groups of a piece, whose last step is given and precedes `running` products."""
        plgpu.wgmma_wait(running)
        # Barriers, or the compiler would move the maximum to where products write to registers.
        sums = lax.optimization_barrier(sums)
        release(step)
        places = [sums[:, i : i + shape.blocks] for i in range(0, blocks.piece, shape.blocks)]
        return lax.optimization_barrier(functools.reduce(jnp.maximum, places))

    def highest(rows, step):
        """The maximum over the groups of a tile, the first step of which is given."""
        found, before = [], None
        for _ in range(_PIECES):
            sums = multiply(None, rows[0], step)
            if before is not None:
                found.append(finish(before, step - 1, running=1))
            for k in range(1, shape.steps):
                sums = multiply(sums, rows[k], step + k)
                # The products of the step before are finished, so its stage may be filled again.
                plgpu.wgmma_wait(1)
                release(step + k - 1)
            before, step = sums, step + shape.steps
        return functools.reduce(jnp.maximum, [*found, finish(before, step - 1, running=0)])

    @plgpu.nd_loop((shape.parts * shape.pairs,), collective_axes="block", init_carry=jnp.int32(0))
    def _of_item(info, carry):
        pair, part, tiles = _item(shape, operands, info.index[0])

        @pl.when(tiles > 0)
        def _of_tiles():
            plgpu.barrier_wait(scratch["q_full"].at[warpgroup])
            steps = range(0, shape.dim, shape.step)
            rows = [scratch["q"].at[warpgroup, :, pl.ds(start, shape.step)] for start in steps]
            rows = [plgpu.load(row, layout=plgpu.Layout.WGMMA_8BIT) for row in rows]
            # Read before the next item's rows are copied there, which may be from now on.
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["q_empty"].at[warpgroup])

            @pl.loop(0, tiles)
            def _of_tile(index):
                found = highest(rows, carry + index * shape.tile_steps)
                columns = pl.ds((part * shape.part + index) * shape.blocks, shape.blocks)
                # Infinity would have a share of all and of nothing.
                store_some(best.at[_rows(pair, warpgroup), columns], jnp.minimum(found, jnp.asarray(_LARGEST, SUMS)))

        return carry + tiles * shape.tile_steps
