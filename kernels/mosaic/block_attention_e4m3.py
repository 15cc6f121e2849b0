"""The kernel of `mla_blocks` in e4m3 for Hopper: absorbed attention of rows that share a list of key blocks.

The work is cut as in `block_attention`: thread blocks of 64 rows in clusters that share copies, two warpgroups that
hold half of the output's columns each and take turns at the list's tiles of 64 keys, and a third that copies.  A
product of 8-bit numbers needs both operands with the summed dimension innermost, so a tile lies in memory twice, as
keys and turned round as values.  Their places are freed apart: keys once they are scored, half of them at a time, and
each half of the values' columns once it is multiplied.  Half of the queries' latent parts lie in registers, as much as
there is room for: a product of 64 columns with both operands in shared memory reads all the bytes that this gives.

**Order.** A warpgroup starts the product of its tile before with the values, then the scores of its next tile; after
these the product of the other's tile, under which its softmax runs (of FlashMLA's decode kernel for Hopper, and of
FlashAttention-3 for what runs under what).  The other's tensor work fills what is left.

**References.** What softmax subtracts from the scores of a row has to keep the weights within e4m3, 2^-9 to 448.  It
goes from tile to tile, and from one warpgroup to the other beside the weights: kept while the largest weight is at most
448, else set such that this is `2^_MARGIN`.  Where a row's reference is raised, sums are multiplied by the power of two
of the difference, and the other warpgroup is told.  As the chain goes one way, no warpgroup waits for a maximum that is
not yet there, as it would if both had to agree on the reference of a pair of tiles.

**Errors.** Weights are rounded to e4m3, their sum is of the unrounded ones.  One up to 2^-10 counts 0 in the output,
2^-16 of the row's largest at most; where the scores of a row differ by 0.02 and less, all weights may be rounded one
way, by up to 1.5 %.  While they add up products of e4m3, the tensor cores drop what is below 2^-13 of the largest
(arXiv 2412.19437, section 3.3.2), and the output is summed over the whole list in one accumulator.  By that arithmetic
on the CPU, sums of normal numbers are off by 0.1 % for 20 blocks and 0.2 % for 56, but sums of positive ones are small
by 4 % and 12 %.  Hence the center that is left away from all latents, a mean of theirs (`mla_sparse.center_of` of the
reference), and comes back with the output.  Scores of 512 products are off both ways, by up to about 2^-9 of a query's
largest.
"""

import functools
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxinfer.kernels.mosaic.attention_e4m3 import FIRST_NAMED_BARRIER, as_e4m3
from jaxinfer.kernels.mosaic.block_attention import (
    ROW,
    WGMMA,
    hidden_zero,
    launch,
    row_tiles_of_block,
    runs_of,
)
from jaxinfer.kernels.mosaic.decode_parts import TILE, tiles
from jaxinfer.kernels.reference.expansion import E4M3

_MARGIN = 6.0
"""The power of two that the largest weight of a row has where its reference is set."""
_LARGEST = math.log2(448)
"""The largest power of two that it may have later."""
_UNSEEN = -1e30
"""The reference of rows without keys so far: any score is far above."""


def attend(shape, operands, multiprocessors):
    """Runs the kernel on the operands of `mla_blocks_e4m3.mla_blocks`.

    Returns: output `[outer rows, heads of all lists, rank]` in bfloat16, and log-sum-exp float32 `[lists, rows]` of the
    scores without the center's part.
    """
    bfloat16, e4m3 = jnp.dtype(jnp.bfloat16), jnp.dtype(E4M3)
    row_bytes = math.gcd(shape.half, 128)
    values = tiles((2, shape.half, TILE), e4m3, TILE), tiles((TILE, shape.half), bfloat16)
    empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=4)
    scratch = {
        "q": tiles((1, TILE, shape.rank), e4m3, row_bytes),
        "q_rope": tiles((1, TILE, shape.rope), bfloat16),
        "keys": tiles((2, 2, TILE, shape.half), e4m3, row_bytes),
        "rope": tiles((2, TILE, shape.rope), bfloat16),
        # Of each half of the columns, the values of two tiles; in the end their place holds the output on its way.
        "values": [plgpu.RefUnion(*values) for _ in range(2)],
        "weights": tiles((2, TILE, TILE), e4m3, TILE),
        "bias": plgpu.SMEM((2, TILE), jnp.float32),
        "references": plgpu.SMEM((2, TILE), jnp.float32),
        "raised": plgpu.SMEM((2,), jnp.int32),
        "sums": plgpu.SMEM((2, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=2 * (TILE // shape.run)),
        "q_empty": plgpu.Barrier(num_arrivals=2),
        "keys_full": plgpu.Barrier(num_barriers=4),
        "rope_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "values_full": plgpu.Barrier(num_barriers=4),
        "keys_empty": empty,
        "values_empty": empty,
        "weights_full": plgpu.Barrier(num_barriers=2),
        "sums_full": plgpu.Barrier(num_barriers=2),
    }

    return launch(shape, operands, scratch, (_attend_half, _copy), "mla_blocks_e4m3", multiprocessors)


def _place(first, second):
    return 2 * first + second


def _copy(shape, operands, scratch):
    """The copying warpgroup: the queries of a row tile once, then block after block of its list.

    Keys of the next block are copied before the last values of this one: in the order in which places become free.
    """
    collective = "cluster" if shape.cluster > 1 else None

    def await_free(name, place, when):
        @pl.when(when)
        def _():
            plgpu.barrier_wait(scratch[name].at[place])

    def tile_of(entry, side):
        return lax.div(entry, jnp.int32(4)) * 2 + side

    def copy_keys(entry, side, again):
        """A tile's keys, in two halves, and its rope part and bias with the second."""
        tile = tile_of(entry, side)
        rows = pl.ds(tile * TILE, TILE)

        def copy(name, target, full):
            plgpu.copy_gmem_to_smem(name, target, full, collective_axes=collective)

        for part in range(2):
            place = _place(side, part)
            await_free("keys_empty", place, again)
            source = operands["keys"].at[rows, pl.ds(part * shape.half, shape.half)]
            copy(source, scratch["keys"].at[side, part], scratch["keys_full"].at[place])
        full = scratch["rope_full"].at[side]
        copy(operands["context"].at[rows, pl.ds(shape.rank, shape.rope)], scratch["rope"].at[side], full)
        plgpu.copy_gmem_to_smem(operands["bias"].at[tile], scratch["bias"].at[side], full)

    def copy_values(entry, half, side, again):
        place = _place(half, side)
        await_free("values_empty", place, again)
        source = operands["values"].at[tile_of(entry, side), pl.ds(half * shape.half, shape.half)]
        target, full = scratch["values"][half][0].at[side], scratch["values_full"].at[place]
        plgpu.copy_gmem_to_smem(source, target, full, collective_axes=collective)

    def of_item(number, row_tile, carry):
        blocks_done, items_done = carry
        count = operands["counts"][number]

        def entry_of(index):
            return operands["entries"][number, jnp.minimum(index, count - 1)]

        @pl.when(count > 0)
        def _first():
            @pl.when(items_done > 0)
            def _():
                plgpu.barrier_wait(scratch["q_empty"])

            for rows, outer, heads in runs_of(shape, number, row_tile):
                for name in ("q", "q_rope"):
                    source, target = operands[name].at[outer, heads], scratch[name].at[0, rows]
                    plgpu.copy_gmem_to_smem(source, target, scratch["q_full"])
            entry, again = entry_of(0), blocks_done > 0
            copy_keys(entry, 0, again)
            copy_keys(entry, 1, again)
            copy_values(entry, 1, 0, again)

        def block(index, carry):
            entry, done = carry
            following = entry_of(index + 1)
            more, again = index + 1 < count, done > 0
            copy_values(entry, 0, 0, again)
            pl.when(more)(lambda: copy_keys(following, 0, True))
            copy_values(entry, 0, 1, again)
            copy_values(entry, 1, 1, again)

            @pl.when(more)
            def _():
                copy_keys(following, 1, True)
                copy_values(following, 1, 0, True)

            return following, done + 1

        blocks_done = lax.fori_loop(0, count, block, (entry_of(0), blocks_done))[1]
        return blocks_done, items_done + jnp.minimum(count, 1)

    blocks_done, items_done = row_tiles_of_block(shape, (jnp.int32(0), jnp.int32(0)), of_item)

    @pl.when(items_done > 0)
    def _queries_read():
        plgpu.barrier_wait(scratch["q_empty"])

    # Not before the other thread blocks of the cluster have read what this one copied to them.
    @pl.when(blocks_done > 0)
    def _tiles_read():
        for place in range(4):
            plgpu.barrier_wait(scratch["keys_empty"].at[place])
            plgpu.barrier_wait(scratch["values_empty"].at[place])


def any_differ(first, second, barrier):
    """1 if two arrays of a warpgroup's rows have different numbers anywhere, else 0; all four warps meet there.

    `barrier` is the number of a named one.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW, ROW), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    )
    def vote(_, first, second):
        i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
        found = mgpu.c(0, i1)
        for pair in zip(first.registers.flat, second.registers.flat, strict=True):
            numbers = [vector.extract(register, dynamic_position=[], static_position=[0]) for register in pair]
            found = arith.ori(found, arith.cmpf(arith.CmpFPredicate.UNE, *numbers))
        found = llvm.inline_asm(
            i32,
            [arith.extui(i32, found)],
            f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; bar.red.or.pred p, {barrier}, 128, p; selp.u32 $0, 1, 0, p; }}",
            "=r,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, shape=(), is_signed=True)

    return vote(first, second)  # pyright: ignore[reportCallIssue]


def _attend_half(shape, operands, out, lse, scratch, half):
    """A math warpgroup: half of the columns of the output, and the scores of every second tile."""
    own, other = half, 1 - half
    columns = pl.ds(half * shape.half, shape.half)
    values, staged = scratch["values"][half]

    def across(rows, width):
        return lax.broadcast_in_dim(rows, (TILE, width), [0])

    def wait(name, index):
        plgpu.barrier_wait(scratch[name].at[index])

    def release(*places):
        """What lay in these places has been read by all four warps."""
        plgpu.commit_smem()
        for name, place in places:
            plgpu.barrier_arrive(scratch[name].at[place])

    def start_values(accumulator, side, weights, zero):
        wait("values_full", _place(half, side))
        plgpu.wgmma(accumulator, weights, values.at[side + zero].transpose((1, 0)))

    def start_other(accumulator, zero):
        start_values(accumulator, other, scratch["weights"].at[other + zero], zero)

    def rescale(accumulator, total, before, after, raised):
        """Makes sums relative to another reference; nothing may be multiplied meanwhile."""
        factor = jnp.exp2(before - after)

        @pl.when(raised != 0)
        def _():
            found = plgpu.wgmma_accumulator_load(accumulator, wait_n=None)
            accumulator[...] = found * across(factor, shape.half)

        return total * factor

    def take_other(accumulator, total, reference):
        """Awaits the other's weights, and takes over their reference."""
        wait("weights_full", other)
        theirs = plgpu.load(scratch["references"].at[other], layout=ROW)
        return rescale(accumulator, total, reference, theirs, scratch["raised"][other]), theirs

    def scores_of(entry, held, start_before):
        """Scores of the own tile; `held` is the first half of the queries, `start_before` the product before."""
        zero = hidden_zero(entry)

        def products(scores):
            if start_before is not None:
                start_before(zero)
            for part in range(2):
                wait("keys_full", _place(own, part))
                queries = held if part == 0 else scratch["q"].at[zero, :, shape.half :]
                plgpu.wgmma(scores, queries, scratch["keys"].at[own, part + zero].transpose((1, 0)))
            wait("rope_full", own)
            # Last: of a larger sum, e4m3 products keep fewer bits.
            plgpu.wgmma(scores, scratch["q_rope"].at[zero], scratch["rope"].at[own + zero].transpose((1, 0)))
            plgpu.wgmma_wait(2)
            freed = [("keys_empty", _place(own, 0))]
            if start_before is not None:
                freed.append(("values_empty", _place(half, own)))
            release(*freed)
            return scores[...]

        scores = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))

        def masked(scores):
            bias = plgpu.load(scratch["bias"].at[own], layout=WGMMA.reduce(0))
            return scores + lax.broadcast_in_dim(bias, scores.shape, [1])

        scores = lax.cond(lax.bitwise_and(entry, jnp.int32(1 + own)) != 0, masked, lambda scores: scores, scores)
        release(("keys_empty", _place(own, 1)))
        return scores

    def attend(accumulator, number, count, factor):
        plgpu.barrier_wait(scratch["q_full"])
        held = plgpu.load(scratch["q"].at[0, :, : shape.half], layout=plgpu.Layout.WGMMA_8BIT)

        def entry_of(index):
            return operands["entries"][number, jnp.minimum(index, count - 1)]

        def step(index, state, first=False):
            """Multiplies the values of the tile before of the own ones, and weighs the next."""
            entry, weights, reference, total = state
            following, zero = entry_of(index + 1), hidden_zero(entry)
            start_before = None if first else functools.partial(start_values, accumulator, own, weights)
            scores = scores_of(entry, held, start_before)

            @pl.when(index == count - 1)
            def _():
                plgpu.barrier_arrive(scratch["q_empty"])

            other_first = not (first and half == 0)
            if other_first:
                total, reference = take_other(accumulator, total, reference)
                start_other(accumulator, zero)
            top = jnp.max(scores, axis=1) * factor
            after = jnp.where(top > reference + _LARGEST, top - _MARGIN, reference)
            weights = jnp.exp2(scores * across(factor, TILE) - across(after, TILE))
            sums = jnp.sum(weights, axis=1)
            if other_first:
                plgpu.wgmma_wait(0)
            raised = any_differ(reference, after, FIRST_NAMED_BARRIER + half)
            if other_first:
                arrive = functools.partial(plgpu.barrier_arrive, scratch["values_empty"].at[_place(half, other)])
                # The last tile's place holds the output first.
                arrive() if half == 0 else pl.when(index < count - 1)(arrive)
            total = rescale(accumulator, total, reference, after, raised) + sums
            weights = lax.optimization_barrier(as_e4m3(weights))
            scratch["weights"].at[own][...] = weights
            scratch["references"].at[own][...] = after
            scratch["raised"][own] = raised
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["weights_full"].at[own])
            return following, weights, after, total

        def rows_of(number):
            return plgpu.layout_cast(jnp.full((TILE,), number, jnp.float32), ROW)

        state = step(jnp.int32(0), (entry_of(0), None, rows_of(_UNSEEN), rows_of(0.0)), first=True)
        entry, weights, reference, total = lax.fori_loop(1, count, step, state)
        zero = hidden_zero(entry)
        start_values(accumulator, own, weights, zero)
        if half == 0:
            plgpu.wgmma_wait(0)
            total, reference = take_other(accumulator, total, reference)
            start_other(accumulator, zero)
        return accumulator[...], reference, total

    def of_item(number, row_tile, carry):
        count = operands["counts"][number]
        runs = list(runs_of(shape, number, row_tile))
        rows = pl.ds(row_tile * TILE, TILE)

        @pl.when(count == 0)
        def _nothing():
            for _, outer, heads in runs:
                out.at[outer, heads, columns][...] = jnp.zeros((shape.run, shape.half), jnp.bfloat16)
            if half == 0:
                nothing = jnp.full((TILE,), -jnp.inf, jnp.float32)
                lse.at[number, rows][...] = plgpu.layout_cast(nothing, ROW)

        @pl.when(count > 0)
        def _something():
            factor = plgpu.load(operands["factor"].at[number, rows], layout=ROW, optimized=False)
            result, reference, total = pl.run_scoped(
                lambda accumulator: attend(accumulator, number, count, factor),
                plgpu.WGMMAAccumulatorRef((TILE, shape.half), jnp.float32),
            )
            scratch["sums"].at[half][...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["sums_full"].at[half])
            wait("sums_full", other)
            total = total + plgpu.load(scratch["sums"].at[other], layout=ROW)
            center = plgpu.load(operands["center"].at[columns], layout=WGMMA.reduce(0), optimized=False)
            result = result * across(operands["unit"][0] / total, shape.half)
            staged[...] = (result + lax.broadcast_in_dim(center, result.shape, [1])).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for run, outer, heads in runs:
                plgpu.copy_smem_to_gmem(staged.at[run], out.at[outer, heads, columns])
            if half == 0:
                lse.at[number, rows][...] = (reference + jnp.log2(total)) * math.log(2)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            release(("values_empty", _place(half, 0)), ("values_empty", _place(half, 1)))

        return carry

    row_tiles_of_block(shape, jnp.int32(0), of_item)
    plgpu.wait_smem_to_gmem(0)
