"""Flash attention on Hopper in e4m3, heads expanded, each query limited to some of the first keys.

The order of work is that of `attention`: clusters of two thread blocks that share keys and values, one warpgroup that
copies and two that attend 64 queries each, the product with the values of a tile under the softmax of the next.

**Sums.** The tensor cores keep about 14 bits while they add up e4m3 products, which biases sums of positive weights:
every tile of 128 keys gets a fresh accumulator, added to float32 sums in registers (arXiv 2412.19437, section 3.3.2).
Scores of 192 products are off both ways, by up to about 2^-10 of a query's largest score.

**Weights.** A factor of each tile and query on that addition makes it free which number is subtracted from the scores
of a tile.  Here it is such that the sum of the tile's weights would be 12, were it like the tile before: no largest
score is looked for, weights fit into e4m3 (448) as long as their sum does, which the sum shows, and only where it does
not is the tile weighed again by its own scores.  A mean weight of 12 / 128 = 1.5 x 2^-4 lies in the middle of a
binade: where all weights are about equal, roundings up and down are, too.  What is rounded to 0 is, of each tile, at
most 1 % of the tile before (2^-10 of 12 / 128).  Relative to the largest score of all keys, as FlashAttention-3 has
it (arXiv 2407.08608; times 2^8), equal weights are rounded one way, by 1 % over 64K keys whose scores differ by 0.01,
and 64K keys beside one that has half of the weight lose 2 % of theirs.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxinfer.kernels.mosaic.attention import ROWS, schedule
from jaxinfer.kernels.reference.expansion import E4M3, Operands

KEYS = 128
"""Keys of a tile, a row of swizzled shared memory; lengths of keys are multiples of it."""
ALIGNMENT = 8
"""Queries come in multiples of so many: the height of a tile of the swizzled layout."""
_WARPGROUPS, _CLUSTER = 2, 2
_TOGETHER = _WARPGROUPS * _CLUSTER
_MATH_REGISTERS, _COPY_REGISTERS = 240, 24
_SUM, _LARGEST = 12.0, 448.0
"""What the weights of a tile and query are to add up to, and the largest e4m3, which their sum must not pass."""
_RANGE = 64.0
"""References of tiles stay within 2^64 of that of the sums."""
FIRST_NAMED_BARRIER = 8  # those before are Mosaic's
_LOG2_E = math.log2(math.e)
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the work is cut.

    Attributes:
        stages: tiles of keys, and of values, held in shared memory at a time.
        l2_bytes: keys and values that are worked on at a time.
    """

    stages: int = 4
    l2_bytes: int = 16 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    heads: int
    keys: int
    nope: int
    rope: int
    v: int


def attend(
    operands: Operands, key_limit: jax.Array, *, scale: float, blocks: Blocks, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        operands: T is a multiple of 8, S of 128; all finite, the keys of the values in the order of `value_order`.
        key_limit: `[T]` int32, see `jaxinfer.kernels.mla_prefill`.
        scale: positive.
        multiprocessors: at least 2.

    Returns: output `[T, H, v]` and log-sum-exp `[H, T]`, float32, T rounded up to a multiple of 256.
    """
    tokens, heads, nope = operands.q.shape
    keys, rope = operands.k_rope.shape
    shape = _Shape(heads=heads, keys=keys, nope=nope, rope=rope, v=operands.v.shape[1])
    scratch = _scratch(shape, blocks)
    padding = -tokens % (_TOGETHER * ROWS)
    limits = jnp.pad(key_limit, (0, padding))
    order, rows = schedule(limits, KEYS)
    # Not 0 for queries that are not there: a hidden score of -inf times 0 is NaN, and NaN has every tile weighed again.
    factors = jnp.pad(operands.q_scale * (scale * _LOG2_E), ((0, 0), (0, padding)), constant_values=1.0)
    inputs = vars(operands) | {"q_scale": factors, "limits": limits, "schedule": order, "rows": rows}

    def body(operands, out, lse):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, blocks, operands, out, lse, scratch),
            scratch,
            collective_axes="wg",
        )

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((len(limits), heads, shape.v), jnp.float32),
            jax.ShapeDtypeStruct((heads, len(limits)), jnp.float32),
        ),
        grid=(multiprocessors // _CLUSTER,),
        grid_names=("block",),
        cluster=(_CLUSTER,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="mla_prefill_e4m3",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(inputs)


def value_order() -> np.ndarray:
    """For 16 successive places of the values' keys, the keys that stand there.

    A thread holds the weights of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16 after the product with the keys, and has
    to hold those of places 4 t to 4 t + 3 for the product with the values: the values are moved instead.
    """
    place = np.arange(16)
    thread, number = place // 4, place % 4
    return 2 * thread + number % 2 + number // 2 * 8


def shared_memory_bytes(nope: int, rope: int, v: int, blocks: Blocks) -> int:
    """Shared memory of the buffers of a thread block."""
    return _WARPGROUPS * ROWS * (nope + rope) + blocks.stages * KEYS * (nope + rope + v)


def _scratch(shape, blocks):
    def swizzled(*dimensions):
        columns = math.gcd(dimensions[-1], 128)
        tiling = plgpu.TilingTransform((ALIGNMENT, columns))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(columns)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(dimensions, E4M3, transforms=(tiling, swizzle))

    stages = blocks.stages
    empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=_WARPGROUPS, num_barriers=stages)
    return {
        "q": swizzled(_WARPGROUPS, ROWS, shape.nope),
        "q_rope": swizzled(_WARPGROUPS, ROWS, shape.rope),
        "k": swizzled(stages, KEYS, shape.nope),
        "k_rope": swizzled(stages, KEYS, shape.rope),
        "v": swizzled(stages, shape.v, KEYS),
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=_WARPGROUPS),
        "q_empty": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "k_empty": empty,
        "v_full": plgpu.Barrier(num_barriers=stages),
        "v_empty": empty,
    }


def _items(shape, blocks, operands):
    """The number of pairs of a head and a block of queries, and the function that finds the pair of an index."""
    count = operands["schedule"].shape[1]
    bytes_per_head = shape.keys * (shape.nope + shape.v)
    together = min(max(blocks.l2_bytes // bytes_per_head, 1), shape.heads)

    def item(index):
        group, index = index // (together * count), lax.rem(index, jnp.int32(together * count))
        heads = jnp.minimum(together, shape.heads - group * together)
        rank = index // heads
        return group * together + lax.rem(index, heads), operands["schedule"][0, rank], operands["schedule"][1, rank]

    return shape.heads * count, item


def _rows(block, warpgroup):
    """Which 64 queries a warpgroup attends: of a causal block, each thread block gets as much of the longer half."""
    place = lax.axis_index("cluster")
    place = jnp.where(warpgroup == 0, place, _CLUSTER - 1 - place)
    return block * _TOGETHER + warpgroup * _CLUSTER + place


def _thread_block(shape, blocks, operands, out, lse, scratch):
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        _copy(shape, blocks, operands, scratch)

    @pl.when(warpgroup < _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_MATH_REGISTERS, action="increase")
        _attend(shape, blocks, operands, out, lse, scratch, warpgroup)


def _copy(shape, blocks, operands, scratch):
    """The copying warpgroup: queries of a block once, then tile after tile of keys and values."""
    count, item = _items(shape, blocks, operands)

    def await_free(name, slot, when):
        @pl.when(when)
        def _():
            plgpu.barrier_wait(scratch[name].at[slot])

    def copy_item(info, carry):
        head, block, tiles = item(info.index[0])
        for warpgroup in range(_WARPGROUPS):
            await_free("q_empty", warpgroup, info.local_index > 0)
            rows = pl.ds(_rows(block, jnp.int32(warpgroup)) * ROWS, ROWS)
            full = scratch["q_full"].at[warpgroup]
            for name in ("q", "q_rope"):
                plgpu.copy_gmem_to_smem(operands[name].at[rows, head], scratch[name].at[warpgroup], full)

        def tile(index, done):
            slot = lax.rem(done, jnp.int32(blocks.stages))
            rows = pl.ds(index * KEYS, KEYS)

            def copy(name, source, full):
                full = scratch[full].at[slot]
                plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], full, collective_axes="cluster")

            await_free("k_empty", slot, done >= blocks.stages)
            copy("k", operands["k"].at[rows, head], "k_full")
            copy("k_rope", operands["k_rope"].at[rows], "k_full")
            await_free("v_empty", slot, done >= blocks.stages)
            copy("v", operands["v"].at[head, :, rows], "v_full")
            return done + 1

        return lax.fori_loop(0, tiles, tile, carry)

    done = plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))(copy_item)
    for warpgroup in range(_WARPGROUPS):
        await_free("q_empty", warpgroup, done > 0)
    for slot in range(blocks.stages):
        await_free("k_empty", slot, done > slot)
        await_free("v_empty", slot, done > slot)


@plgpu.inline_mgpu(
    arg_types=(_ROW, plgpu.Layout.WG_SPLAT),
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
)
def _any_large(_, sums, barrier):
    """1 if one of the warpgroup's sums passes `_LARGEST`, or is NaN, else 0; `barrier` is a named one of its own."""
    i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
    bound = mgpu.c(_LARGEST, sums.mlir_dtype)
    large = mgpu.c(0, i1)
    for register in sums.registers.flat:
        value = vector.extract(register, dynamic_position=[], static_position=[0])
        large = arith.ori(large, arith.cmpf(arith.CmpFPredicate.UGT, value, bound))
    found = llvm.inline_asm(
        i32,
        [arith.extui(i32, large), barrier.registers[()]],
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; bar.red.or.pred p, $2, 128, p; selp.u32 $0, 1, 0, p; }",
        "=r,r,r",
        has_side_effects=True,
    )
    return mgpu.FragmentedArray.splat(found, shape=(), is_signed=True)


def as_e4m3(weights):
    """Rounds to e4m3, each thread its own numbers: the columns of the result are in the order of `value_order`."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(weights.shape, E4M3, plgpu.Layout.WGMMA_8BIT)
    )
    def convert(_, weights):
        i32 = ir.IntegerType.get_signless(32)
        layout = mgpu.WGMMA_LAYOUT_8BIT
        registers = np.empty(layout.registers_shape(weights.shape), dtype=object)
        four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())

        def both(register):
            return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)]

        # Registers are those of [row tile, 8 or 16 keys, ..., row half, ...]: two of 8 keys become one of 16.
        for index in np.ndindex(registers.shape):
            rest = index[2 : weights.registers.ndim]
            first, second = (weights.registers[index[0], 2 * index[1] + half, *rest] for half in range(2))
            word = llvm.inline_asm(
                i32,
                [*both(first), *both(second)],
                "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
                "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
                "=r,f,f,f,f",
            )
            registers[index] = mgpu.utils.bitcast(word, four)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(weights)  # pyright: ignore[reportCallIssue]


def _attend(shape, blocks, operands, out, lse, scratch, warpgroup):
    """A math warpgroup: 64 queries of each item."""
    count, item = _items(shape, blocks, operands)
    q, q_rope = scratch["q"].at[warpgroup], scratch["q_rope"].at[warpgroup]
    score_accumulator = plgpu.WGMMAAccumulatorRef((ROWS, KEYS), jnp.float32)
    value_accumulator = plgpu.WGMMAAccumulatorRef((ROWS, shape.v), jnp.float32)

    def slot_of(tile):
        return lax.rem(tile, jnp.int32(blocks.stages))

    def wait(name, slot):
        plgpu.barrier_wait(scratch[name].at[slot])

    def release(name, slot):
        plgpu.barrier_arrive(scratch[name].at[slot])

    def across(rows, columns):
        return lax.broadcast_in_dim(rows, (ROWS, columns), [0])

    def start_scores(scores, slot):
        plgpu.wgmma(scores, q, scratch["k"].at[slot].transpose((1, 0)))
        plgpu.wgmma(scores, q_rope, scratch["k_rope"].at[slot].transpose((1, 0)))

    def start_values(values, weights, slot):
        plgpu.wgmma(values, weights, scratch["v"].at[slot].transpose((1, 0)))

    def visible(scores, first, limit):
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
        return jnp.where(key < across(limit - first, KEYS), scores, -jnp.inf)

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))
    def _item(info, carry):
        done = carry
        head, block, tiles = item(info.index[0])
        rows = _rows(block, warpgroup)
        mine, whole = operands["rows"][0, rows], operands["rows"][1, rows]
        rows = pl.ds(rows * ROWS, ROWS)
        limit = plgpu.load(operands["limits"].at[rows], layout=_ROW, optimized=False)
        factor = plgpu.load(operands["q_scale"].at[head, rows], layout=_ROW, optimized=False)
        wait("q_full", warpgroup)

        def weigh(scores, reference):
            """Weights of a tile relative to `reference` (a score of base 2), and their sum."""
            weights = jnp.exp2(scores * across(factor, KEYS) - across(reference, KEYS))
            return weights, jnp.sum(weights, axis=1)

        def weigh_by_largest(scores, otherwise):
            """Weights that add up to `_SUM` and their reference; 0 and `otherwise` where a query sees nothing."""
            top = jnp.max(scores, axis=1) * factor
            top = jnp.where(top == -jnp.inf, otherwise, top)
            weights, total = weigh(scores, top)
            total = jnp.where(total == 0.0, _SUM, total)
            return weights * across(_SUM / total, KEYS), top + jnp.log2(total / _SUM)

        def await_keys(index):
            @pl.when(index < mine)
            def _():
                wait("k_full", slot_of(done + index))

        def release_keys(index):
            release("k_empty", slot_of(done + index))

            @pl.when(index == mine - 1)
            def _():
                release("q_empty", warpgroup)

        def first_tile(scores):
            start_scores(scores, slot_of(done))
            found = visible(scores[...], 0, limit)
            release_keys(0)
            weights, reference = weigh_by_largest(found, 0.0)
            total = jnp.where(limit > 0, _SUM, 0.0)
            return lax.optimization_barrier(as_e4m3(weights)), reference, total

        await_keys(0)
        weights, top, total = pl.run_scoped(first_tile, score_accumulator)
        await_keys(1)
        gain = plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), _ROW)
        result = plgpu.layout_cast(jnp.zeros((ROWS, shape.v), jnp.float32), _WGMMA)

        def step(index, carry, masked):
            """Weighs tile `index` and adds the values of the one before.

            `result` and `total` are relative to `top`, `weights` of the tile before are worth `gain` of that, and
            `reference` is that of this tile.
            """
            weights, gain, reference, top, total, result = carry
            slot, last = slot_of(done + index), slot_of(done + index - 1)

            def seen(scores):
                return visible(scores, index * KEYS, limit) if masked else scores

            def tile(scores):
                start_scores(scores, slot)
                wait("v_full", last)
                return pl.run_scoped(functools.partial(with_values, scores), value_accumulator)

            def with_values(scores, values):
                start_values(values, weights, last)
                new_weights, part = weigh(seen(plgpu.wgmma_accumulator_load(scores, wait_n=1)), reference)
                large = _any_large(part, FIRST_NAMED_BARRIER + warpgroup)  # pyright: ignore[reportCallIssue]

                @pl.when(large == 0)
                def _():
                    release_keys(index)

                # ptxas runs products one after the other if what they read is written while they run: the weights are
                # rounded after the wait.  A branch before it keeps it from moving the wait above the exponentials.
                new_weights = lax.optimization_barrier(new_weights)
                await_keys(index + 1)
                found = values[...]
                release("v_empty", last)
                return new_weights, part, large, found

            new_weights, part, large, found = pl.run_scoped(tile, score_accumulator)
            result = result + found * across(gain, shape.v)

            def small_enough():
                return as_e4m3(new_weights), reference, part, top, total, result

            def weighed_again():
                def scores_again(scores):
                    start_scores(scores, slot)
                    return scores[...]

                scores = seen(pl.run_scoped(scores_again, score_accumulator))
                release_keys(index)
                weights, reference = weigh_by_largest(scores, top)
                part = jnp.where(limit > index * KEYS, _SUM, 0.0) if masked else jnp.full_like(reference, _SUM)
                reference = jnp.maximum(reference, top - _RANGE)
                new_top = jnp.maximum(top, reference)
                decay = jnp.exp2(top - new_top)
                return as_e4m3(weights), reference, part, new_top, total * decay, result * across(decay, shape.v)

            weights, reference, part, top, total, result = lax.cond(large != 0, weighed_again, small_enough)
            gain = jnp.exp2(reference - top)
            total = total + part * gain
            following = reference + jnp.log2(part * (1 / _SUM))
            following = jnp.minimum(jnp.maximum(following, top - _RANGE), top + _RANGE)
            return lax.optimization_barrier(weights), gain, following, top, total, result

        middle = jnp.maximum(whole, 1)
        carry = weights, gain, top, top, total, result
        carry = lax.fori_loop(1, middle, lambda i, c: step(i, c, masked=False), carry)
        weights, gain, _, top, total, result = lax.fori_loop(middle, mine, lambda i, c: step(i, c, masked=True), carry)
        last = slot_of(done + mine - 1)

        def last_values(values):
            wait("v_full", last)
            start_values(values, weights, last)
            return values[...]

        result = result + pl.run_scoped(last_values, value_accumulator) * across(gain, shape.v)
        release("v_empty", last)

        @pl.loop(mine, tiles)
        def _pass_on(index):
            for full, empty in (("k_full", "k_empty"), ("v_full", "v_empty")):
                wait(full, slot_of(done + index))
                # One warp arrives at a cluster's barrier for all four.  Without a barrier of the warpgroup the slot
                # could be filled twice before another warp has looked, which would then wait for ever.
                plgpu.commit_smem()
                release(empty, slot_of(done + index))

        inverse = jnp.where(total == 0.0, 0.0, operands["v_scale"][head] / total)
        out[rows, head] = result * across(inverse, shape.v)
        lse[head, rows] = (top + jnp.log2(total)) / _LOG2_E
        return done + tiles
