"""The kernel of `mla_blocks` for Hopper: absorbed attention of rows that share a list of key blocks.

A persistent grid; thread blocks attend 64 rows (queries times heads that share a list) each, in clusters of two that
copy every key tile once for both.  Two warpgroups hold the output, half of its columns each, and take turns at the
list's tiles of 64 keys, scores of the even ones and of the odd ones: while one is at its softmax, the tensor cores have
the other's products (the order of FlashMLA's decode kernel for Hopper).  Products with the other's values are started
after the scores, and run during the softmax.  Weights are multiplied from registers, and by the other warpgroup from
shared memory, where they take the place of the tile's rope part.  A third warpgroup copies.

A tile of keys lies in shared memory once: read along its rows it is K, along its columns V.  There is room for two, so
each half of a tile's columns makes room for the next as soon as the warpgroup of that half has multiplied it.

Softmax may subtract any number from the scores that keeps the weights in the range of float32 (see `attention`).  It is
the largest score of the first tile and a margin, and nothing is rescaled: the products of a warpgroup do not wait for
the other's maximum.  A row whose weights leave the range all the same, by scores more than 100 nats above those of the
first tile, is recognised by its sum; its log-sum-exp is NaN, and the caller computes its query block by the reference.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.decode_parts import TILE, tiles

BLOCK = 2 * TILE
"""Keys of an entry of a list as the kernel reads it: a tile for each warpgroup."""
_MATH_REGISTERS, _COPY_REGISTERS = 240, 24
_MARGIN = 64.0
"""How far, in powers of two, the largest weight of the first tile lies below 1: later ones may be much larger."""
_SMALL, _LARGE = 2.0**-100, 2.0**100
"""Bounds of a row's sum of weights: smaller ones may have lost some, larger ones make the output overflow."""
WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of queries are `[outer, heads]`: those of list (b, g) are outer rows `b * queries ...`, and of each of
    these the heads `g * heads_of_list ...`."""

    lists: int
    groups: int
    queries: int
    heads: int
    rank: int
    rope: int
    scale: float

    @property
    def half(self) -> int:
        return self.rank // 2

    @property
    def run(self) -> int:
        """Rows of a row tile that lie side by side: heads of one query."""
        return min(self.heads, TILE)

    @property
    def row_tiles(self) -> int:
        """Of a list."""
        return self.queries * self.heads // TILE

    @property
    def cluster(self) -> int:
        """Thread blocks that share the copies of keys."""
        return math.gcd(self.row_tiles, 2)

    @property
    def items(self) -> int:
        """Row tiles of all lists, as many at a time as a cluster has thread blocks."""
        return self.lists * self.row_tiles // self.cluster


def attend(shape, operands, multiprocessors):
    """Runs the kernel on the operands of `mla_blocks.mla_blocks`.

    Returns: output `[outer rows, heads of all lists, rank]` in bfloat16, log-sum-exp float32 `[lists, rows]`, NaN where
    the weights left the range of float32.
    """
    bfloat16 = jnp.dtype(jnp.bfloat16)
    scratch = {
        "q": tiles((1, TILE, shape.rank + shape.rope), bfloat16),
        "values": tiles((2, 2, TILE, shape.half), bfloat16),
        "rope": tiles((2, TILE, shape.rope), bfloat16),
        "bias": plgpu.SMEM((2, TILE), jnp.float32),
        "shift": plgpu.SMEM((TILE,), jnp.float32),
        "sums": plgpu.SMEM((2, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=TILE // shape.run),
        "q_empty": plgpu.Barrier(num_arrivals=2),
        "values_full": plgpu.Barrier(num_barriers=4),
        "rope_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "empty": plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=4),
        "weights_full": plgpu.Barrier(num_barriers=2),
        "shift_full": plgpu.Barrier(),
        "sums_full": plgpu.Barrier(num_barriers=2),
    }

    return launch(shape, operands, scratch, (_attend_half, _copy), "mla_blocks", multiprocessors)


def launch(shape, operands, scratch, roles, name, multiprocessors):
    """Runs a kernel of two math warpgroups, which each attend half of the output's columns, and one that copies.

    `roles` are `attend_half(shape, operands, out, lse, scratch, half)` and `copy(shape, operands, scratch)`.
    """
    attend_half, copy = roles

    def thread_block(operands, out, lse, scratch):
        def attend(half):
            plgpu.set_max_registers(_MATH_REGISTERS, action="increase")
            attend_half(shape, operands, out, lse, scratch, half)

        def copying():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            copy(shape, operands, scratch)

        lax.switch(lax.axis_index("wg"), [lambda: attend(0), lambda: attend(1), copying])

    def body(operands, out, lse):
        pl.run_scoped(lambda scratch: thread_block(operands, out, lse, scratch), scratch, collective_axes="wg")

    outer = operands["q"].shape[0]
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((outer, shape.groups * shape.heads, shape.rank), jnp.bfloat16),
            jax.ShapeDtypeStruct((shape.lists, shape.queries * shape.heads), jnp.float32),
        ),
        grid=(max(1, min(multiprocessors // shape.cluster, shape.items)),),
        grid_names=("block",),
        cluster=(shape.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        kernel_name=name,
        # Where a warp could overtake another, `commit_smem` has a barrier of the warpgroup.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(operands)


def row_tiles_of_block(shape, carry, function):
    """Calls `function(list, row tile, carry)` for the row tiles of this thread block."""

    def step(info, carry):
        clusters = shape.row_tiles // shape.cluster
        number = info.index[0]
        tile = lax.rem(number, jnp.int32(clusters)) * shape.cluster + lax.axis_index("cluster")
        return function(lax.div(number, jnp.int32(clusters)), tile, carry)

    return plgpu.nd_loop((shape.items,), collective_axes="block", init_carry=carry)(step)


def runs_of(shape, number, tile):
    """Where the runs of a row tile's rows lie: the outer row and the first head of each."""
    first = tile * TILE
    list_of_block, group = lax.div(number, jnp.int32(shape.groups)), lax.rem(number, jnp.int32(shape.groups))
    for start in range(0, TILE, shape.run):
        query, head = lax.div(first + start, jnp.int32(shape.heads)), lax.rem(first + start, jnp.int32(shape.heads))
        head = pl.multiple_of(group * shape.heads + head, 8)
        yield pl.ds(start, shape.run), list_of_block * shape.queries + query, pl.ds(head, shape.run)


def _place(half, slot):
    return 2 * half + slot


def hidden_zero(entry):
    """0, though the compiler does not know: it would compute the addresses of all products before the loop, more than
    there are registers, and read them back from memory."""
    return lax.shift_right_logical(entry, jnp.int32(31))


def _copy(shape, operands, scratch):
    """The copying warpgroup: the queries of a row tile once, then block after block of its list."""
    collective = "cluster" if shape.cluster > 1 else None

    def of_item(number, row_tile, carry):
        blocks_done, items_done = carry
        count = operands["counts"][number]

        @pl.when(count > 0)
        def _queries():
            @pl.when(items_done > 0)
            def _():
                plgpu.barrier_wait(scratch["q_empty"])

            for rows, outer, heads in runs_of(shape, number, row_tile):
                plgpu.copy_gmem_to_smem(operands["q"].at[outer, heads], scratch["q"].at[0, rows], scratch["q_full"])

        def block(index, done):
            entry = operands["entries"][number, index]
            for slot in range(2):
                tile = lax.div(entry, jnp.int32(4)) * 2 + slot
                rows = pl.ds(tile * TILE, TILE)

                def copy(half, slot=slot, rows=rows):
                    place = _place(half, slot)

                    @pl.when(done > 0)
                    def _():
                        plgpu.barrier_wait(scratch["empty"].at[place])

                    source = operands["context"].at[rows, pl.ds(half * shape.half, shape.half)]
                    target, full = scratch["values"].at[half, slot], scratch["values_full"].at[place]
                    plgpu.copy_gmem_to_smem(source, target, full, collective_axes=collective)

                copy(slot)
                copy(1 - slot)
                full = scratch["rope_full"].at[slot]
                rope = operands["context"].at[rows, pl.ds(shape.rank, shape.rope)]
                plgpu.copy_gmem_to_smem(rope, scratch["rope"].at[slot], full, collective_axes=collective)
                plgpu.copy_gmem_to_smem(operands["bias"].at[tile], scratch["bias"].at[slot], full)
            return done + 1

        return lax.fori_loop(0, count, block, blocks_done), items_done + jnp.minimum(count, 1)

    blocks_done, items_done = row_tiles_of_block(shape, (jnp.int32(0), jnp.int32(0)), of_item)

    @pl.when(items_done > 0)
    def _queries_read():
        plgpu.barrier_wait(scratch["q_empty"])

    # Not before the other thread block of the cluster has read what this one copied to it.
    @pl.when(blocks_done > 0)
    def _tiles_read():
        for place in range(4):
            plgpu.barrier_wait(scratch["empty"].at[place])


def _attend_half(shape, operands, out, lse, scratch, half):
    """A math warpgroup: half of the columns of the output, and the scores of every second tile."""
    own, other = half, 1 - half
    columns = pl.ds(half * shape.half, shape.half)

    def across(rows, width):
        return lax.broadcast_in_dim(rows, (TILE, width), [0])

    def wait(name, index):
        plgpu.barrier_wait(scratch[name].at[index])

    def release(slot):
        """This half of a tile's columns has been multiplied, by all four warps."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["empty"].at[_place(half, slot)])

    def start_other(accumulator, zero):
        wait("weights_full", other)
        wait("values_full", _place(half, other))
        plgpu.wgmma(accumulator, scratch["rope"].at[other + zero], scratch["values"].at[half, other + zero])

    def scores_of(entry, start_values):
        """Scores of the own tile without and with the mask; `start_values` starts products with the other's values."""
        zero = hidden_zero(entry)

        def multiply(scores, start, keys):
            queries = scratch["q"].at[zero, :, start : start + keys.shape[1]]
            plgpu.wgmma(scores, queries, keys.transpose((1, 0)))

        def products(scores):
            for part in (half, 1 - half):
                wait("values_full", _place(part, own))
                multiply(scores, part * shape.half, scratch["values"].at[part, own + zero])
            wait("rope_full", own)
            multiply(scores, shape.rank, scratch["rope"].at[own + zero])
            if start_values is None:
                return scores[...]
            start_values(zero)
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)

        scores = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))

        def masked(scores):
            bias = plgpu.load(scratch["bias"].at[own], layout=WGMMA.reduce(0))
            return scores + lax.broadcast_in_dim(bias, scores.shape, [1])

        return scores, lax.cond(lax.bitwise_and(entry, jnp.int32(1 + own)) != 0, masked, lambda scores: scores, scores)

    def weigh(accumulator, entry, scores, shift, after_other):
        """Adds the own tile, weighted; returns the sums of its weights."""
        weights = jnp.exp2(scores * shape.scale - across(shift, TILE))
        if after_other:
            plgpu.wgmma_wait(0)
            release(other)
        sums = jnp.sum(weights, axis=1)
        # Rounded once, for the product from registers and for the other warpgroup.
        weights = lax.optimization_barrier(weights.astype(jnp.bfloat16))
        plgpu.wgmma(accumulator, weights, scratch["values"].at[half, own + hidden_zero(entry)])
        # No warp overwrites the rope part that another's product still reads.
        plgpu.commit_smem()
        scratch["rope"].at[own][...] = weights
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["weights_full"].at[own])
        plgpu.wgmma_wait(0)
        return sums

    def attend(accumulator, number, count):
        plgpu.barrier_wait(scratch["q_full"])

        def entry_of(index):
            return operands["entries"][number, jnp.minimum(index, count - 1)]

        def queries_read(index):
            @pl.when(index == count - 1)
            def _():
                plgpu.barrier_arrive(scratch["q_empty"])

        def step(index, state):
            entry, shift, total = state
            next_entry = entry_of(index + 1)
            _, scores = scores_of(entry, functools.partial(start_other, accumulator))
            queries_read(index)
            total = total + weigh(accumulator, entry, scores, shift, True)
            if half == 0:
                release(own)
            else:  # the last tile makes room for the output first
                pl.when(index < count - 1)(lambda: release(own))
            return next_entry, shift, total

        entry = entry_of(0)
        if half == 0:
            all_scores, scores = scores_of(entry, None)
            queries_read(0)
            shift = jnp.max(all_scores, axis=1) * shape.scale + _MARGIN
            scratch["shift"][...] = shift
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["shift_full"])
            total = weigh(accumulator, entry, scores, shift, False)
            release(own)
            entry, shift, total = lax.fori_loop(1, count, step, (entry_of(1), shift, total))
            start_other(accumulator, hidden_zero(entry))
        else:
            plgpu.barrier_wait(scratch["shift_full"])
            shift = plgpu.load(scratch["shift"], layout=ROW)
            total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROW)
            _, shift, total = lax.fori_loop(0, count, step, (entry, shift, total))
        return accumulator[...], shift, total

    def of_item(number, row_tile, carry):
        count = operands["counts"][number]
        runs = list(runs_of(shape, number, row_tile))
        lse_rows = pl.ds(row_tile * TILE, TILE)

        @pl.when(count == 0)
        def _nothing():
            for _, outer, heads in runs:
                out.at[outer, heads, columns][...] = jnp.zeros((shape.run, shape.half), jnp.bfloat16)
            if half == 0:
                nothing = jnp.full((TILE,), -jnp.inf, jnp.float32)
                lse.at[number, lse_rows][...] = plgpu.layout_cast(nothing, ROW)

        @pl.when(count > 0)
        def _something():
            result, shift, total = pl.run_scoped(
                lambda accumulator: attend(accumulator, number, count),
                plgpu.WGMMAAccumulatorRef((TILE, shape.half), jnp.float32),
            )
            scratch["sums"].at[half][...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["sums_full"].at[half])
            wait("sums_full", other)
            total = total + plgpu.load(scratch["sums"].at[other], layout=ROW)
            # The last tile's place, all of it multiplied, holds the output on its way.
            place = scratch["values"].at[half, 1]
            place[...] = (result * across(1.0 / total, shape.half)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for rows, outer, heads in runs:
                plgpu.copy_smem_to_gmem(place.at[rows], out.at[outer, heads, columns])
            if half == 0:
                good = (total > _SMALL) & (total < _LARGE)
                found = (shift + jnp.log2(total)) * math.log(2)
                lse.at[number, lse_rows][...] = jnp.where(good, found, jnp.nan)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            release(1)

        return carry

    row_tiles_of_block(shape, jnp.int32(0), of_item)
    plgpu.wait_smem_to_gmem(0)
