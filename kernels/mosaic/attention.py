"""Flash attention on Hopper, heads expanded, each query limited to some of the first keys, or to these and a window.

A persistent grid of one thread block per multiprocessor, in clusters of two that attend queries of one head and copy
its keys and values once for both.  In a thread block, one warpgroup copies queries, keys and values into shared memory;
each of the two others attends 64 queries.  As in FlashAttention-3 (arXiv 2407.08608), the product with the values of a
tile runs under the softmax of the next.  Heads whose keys and values fit into L2 together are worked on together,
longest queries first.

Softmax may subtract any number from the scores that keeps the weights in the range of float32: bfloat16 rounds small
and large weights alike.  The largest score of the first tile does, until a later tile has much larger ones, which
shows in the sum of its weights; only then is the largest score found again, and what was summed so far rescaled.
FlashAttention-4 rescales as rarely, but finds the largest score of every tile, a third of the arithmetic of softmax.

With windows, a block of queries reads the tiles that hold its first keys, and then those of its windows; a query that
sees nothing of the first tile begins with a number below every score, so that the first weight it has is too large, and
its largest score is found then.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

ROWS = 64
"""Queries of a math warpgroup."""
ALIGNMENT = 8
"""Queries and keys come in multiples of so many: the height of a tile of the swizzled layout."""
_WARPGROUPS, _CLUSTER = 2, 2
_TOGETHER = _WARPGROUPS * _CLUSTER
_MATH_REGISTERS, _COPY_REGISTERS = 240, 24
_LARGE = 2.0**24
"""Weights of a tile whose sum is larger are found again, relative to the largest."""
_FIRST_NAMED_BARRIER = 8  # those before are Mosaic's
_LOG2_E = math.log2(math.e)
_BELOW_ALL = -1e30
"""Below every score, and finite: its difference to -inf, a hidden score, is no NaN."""
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the work is cut.

    Attributes:
        keys: keys of a tile, a multiple of 64.
        stages: tiles of keys, and of values, held in shared memory at a time.
        l2_bytes: keys and values that are worked on at a time.
    """

    keys: int = 128
    stages: int = 2
    l2_bytes: int = 32 * 2**20

    def __post_init__(self):
        if self.keys % 64 or self.stages < 1:
            raise ValueError(f"expected keys % 64 = 0 and stages >= 1, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    heads: int
    keys: int
    nope: int
    rope: int
    v: int


def attend(
    q: jax.Array,
    k: jax.Array,
    k_rope: jax.Array,
    v: jax.Array,
    key_limit: jax.Array,
    window: tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: float,
    blocks: Blocks,
    multiprocessors: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        q: `[T, H, nope + rope]` bfloat16; T and S are multiples of 8.
        k, k_rope, v: `[S, H, nope]`, `[S, rope]` and `[S, H, v]` bfloat16, finite everywhere.
        key_limit: `[T]` int32, see `jaxinfer.kernels.mla_prefill`.
        window: `[T]` int32 twice, `start <= s < end`: keys that each query sees besides those below its limit; not
            `start < end`: none.  No window begins in a tile of keys that any limit reaches into.
        scale: positive.
        multiprocessors: at least 2.

    Returns: output `[T, H, v]` and log-sum-exp `[H, T]`, float32, T rounded up to a multiple of 256.
    """
    tokens, heads, _ = q.shape
    shape = _Shape(heads=heads, keys=k.shape[0], nope=k.shape[2], rope=k_rope.shape[1], v=v.shape[2])
    scratch = _scratch(shape, blocks)
    limits = jnp.pad(key_limit, (0, -tokens % (_TOGETHER * ROWS)))
    operands = {"q": q, "k": k, "k_rope": k_rope, "v": v}
    if window is None:
        order, rows = schedule(limits, blocks.keys)
    else:
        start, end = (jnp.pad(bound, (0, -tokens % (_TOGETHER * ROWS))) for bound in window)
        end = jnp.where(end > start, end, 0)
        order, rows = window_schedule(limits, start, end, blocks.keys)
        operands |= {"starts": start, "ends": end}
    operands |= {"limits": limits, "schedule": order, "rows": rows}

    def body(operands, out, lse):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, blocks, scale, operands, out, lse, scratch),
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
        kernel_name="mla_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(operands)


def schedule(limits: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """What there is to do for `limits` `[T]`, in tiles of so many keys.

    Returns:
        int32 `[2, T / 256]`: blocks of 256 queries, longest first, and the tiles that each reads.
        int32 `[2, T / 64]`: for each 64 queries, the tiles of which one of them sees a part (at least 1), and those of
        which all see the whole.
    """
    rows = limits.reshape(-1, ROWS)
    tiles = jnp.maximum(-(-jnp.max(rows, axis=1) // keys), 1)
    longest = jnp.max(tiles.reshape(-1, _TOGETHER), axis=1)
    order = jnp.argsort(-longest)
    whole = jnp.min(rows, axis=1) // keys
    return jnp.stack((order, longest[order])).astype(jnp.int32), jnp.stack((tiles, whole)).astype(jnp.int32)


def window_schedule(limits: jax.Array, starts: jax.Array, ends: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """What there is to do for the keys below `limits` and `starts <= s < ends`, `[T]` each, end 0 for no window.

    Returns:
        int32 `[4, T / 256]`: blocks of 256 queries, longest first; how many tiles of so many keys each reads (at least
        1); how many of these are before the windows; and the tile that the windows begin with.
        int32 `[4, T / 64]`, for each 64 queries: how many of their block's tiles they have to see (at least 1); how
        many of the first ones all of them see the whole; and where, in the windows, those begin and end that all of
        them see the whole.  All are counted along what the block reads.
    """
    inside = ends > 0

    def of(size, reduce, values):
        return reduce(values.reshape(-1, size), axis=1)

    def up(count):
        return -(-count // keys)

    block = _TOGETHER * ROWS
    front, last = up(of(block, jnp.max, limits)), up(of(block, jnp.max, ends))
    begin = of(block, jnp.min, jnp.where(inside, starts, jnp.iinfo(jnp.int32).max)) // keys
    begin = jnp.minimum(begin, last)
    count = jnp.maximum(front + last - begin, 1)
    order = jnp.argsort(-count)
    # Where a tile of the windows is in what the block reads.
    moved = jnp.repeat(front - begin, _TOGETHER)
    own_last = of(ROWS, jnp.max, ends)
    tiles = jnp.where(own_last > 0, moved + up(own_last), up(of(ROWS, jnp.max, limits)))
    rows = (
        jnp.maximum(tiles, 1),
        of(ROWS, jnp.min, limits) // keys,
        jnp.maximum(moved + up(of(ROWS, jnp.max, jnp.where(inside, starts, 0))), jnp.repeat(front, _TOGETHER)),
        moved + of(ROWS, jnp.min, ends) // keys,
    )
    blocks = order, count[order], front[order], begin[order]
    return jnp.stack(blocks).astype(jnp.int32), jnp.stack(rows).astype(jnp.int32)


def _scratch(shape, blocks):
    tiling = plgpu.TilingTransform((ALIGNMENT, 64))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

    def swizzled(*dimensions):
        return plgpu.SMEM(dimensions, jnp.bfloat16, transforms=(tiling, swizzle))

    stages, keys = blocks.stages, blocks.keys
    empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=_WARPGROUPS, num_barriers=stages)
    return {
        "q": swizzled(_WARPGROUPS, ROWS, shape.nope + shape.rope),
        "k": swizzled(stages, keys, shape.nope),
        "k_rope": swizzled(stages, keys, shape.rope),
        "v": swizzled(stages, keys, shape.v),
        "q_full": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "q_empty": plgpu.Barrier(num_barriers=_WARPGROUPS),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "k_empty": empty,
        "v_full": plgpu.Barrier(num_barriers=stages),
        "v_empty": empty,
    }


def shared_memory_bytes(nope: int, rope: int, v: int, blocks: Blocks) -> int:
    """Shared memory of the buffers of a thread block."""
    return 2 * (_WARPGROUPS * ROWS * (nope + rope) + blocks.stages * blocks.keys * (nope + rope + v))


def _items(shape, blocks, operands):
    """The number of pairs of a head and a block of queries, and the function that finds what is known of one."""
    count = operands["schedule"].shape[1]
    bytes_per_head = shape.keys * 2 * (shape.nope + shape.v)
    together = min(max(blocks.l2_bytes // bytes_per_head, 1), shape.heads)

    def item(index):
        group, index = index // (together * count), lax.rem(index, jnp.int32(together * count))
        heads = jnp.minimum(together, shape.heads - group * together)
        rank = index // heads
        of_block = [operands["schedule"][i, rank] for i in range(operands["schedule"].shape[0])]
        return group * together + lax.rem(index, heads), *of_block

    return shape.heads * count, item


def _first_key(index, blocks, front=None, begin=None):
    """The first key of a tile of those that a block reads: the first `front` tiles, and those from `begin` on."""
    if front is not None:
        index = jnp.where(index < front, index, index - front + begin)
    return index * blocks.keys


def _rows(block, warpgroup):
    """Which 64 queries a warpgroup attends: of a causal block, each thread block gets as much of the longer half."""
    place = lax.axis_index("cluster")
    place = jnp.where(warpgroup == 0, place, _CLUSTER - 1 - place)
    return block * _TOGETHER + warpgroup * _CLUSTER + place


def _thread_block(shape, blocks, scale, operands, out, lse, scratch):
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        _copy(shape, blocks, operands, scratch)

    @pl.when(warpgroup < _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_MATH_REGISTERS, action="increase")
        _attend(shape, blocks, scale, operands, out, lse, scratch, warpgroup)


def _copy(shape, blocks, operands, scratch):
    """The copying warpgroup: queries of a block once, then tile after tile of keys and values."""
    count, item = _items(shape, blocks, operands)

    def await_free(name, slot, when):
        @pl.when(when)
        def _():
            plgpu.barrier_wait(scratch[name].at[slot])

    def copy_item(info, carry):
        head, block, tiles, *windows = item(info.index[0])
        for warpgroup in range(_WARPGROUPS):
            await_free("q_empty", warpgroup, info.local_index > 0)
            rows = pl.ds(_rows(block, jnp.int32(warpgroup)) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                operands["q"].at[rows, head], scratch["q"].at[warpgroup], scratch["q_full"].at[warpgroup]
            )

        def tile(index, done):
            slot = lax.rem(done, jnp.int32(blocks.stages))
            rows = pl.ds(_first_key(index, blocks, *windows), blocks.keys)

            def copy(name, source, full):
                full = scratch[full].at[slot]
                plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], full, collective_axes="cluster")

            await_free("k_empty", slot, done >= blocks.stages)
            copy("k", operands["k"].at[rows, head], "k_full")
            copy("k_rope", operands["k_rope"].at[rows], "k_full")
            await_free("v_empty", slot, done >= blocks.stages)
            copy("v", operands["v"].at[rows, head], "v_full")
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
    """1 if one of the warpgroup's sums is larger than `_LARGE`, or NaN, else 0; `barrier` is a named one of its own."""
    i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
    bound = mgpu.c(_LARGE, sums.mlir_dtype)
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


def _attend(shape, blocks, scale, operands, out, lse, scratch, warpgroup):
    """A math warpgroup: 64 queries of each item."""
    count, item = _items(shape, blocks, operands)
    windowed, factor = "starts" in operands, scale * _LOG2_E
    q = scratch["q"].at[warpgroup]
    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, blocks.keys), jnp.float32)

    def slot_of(tile):
        return lax.rem(tile, jnp.int32(blocks.stages))

    def wait(name, slot):
        plgpu.barrier_wait(scratch[name].at[slot])

    def release(name, slot):
        plgpu.barrier_arrive(scratch[name].at[slot])

    def across(rows, columns):
        return lax.broadcast_in_dim(rows, (ROWS, columns), [0])

    def start_scores(scores, slot):
        plgpu.wgmma(scores, q.at[:, : shape.nope], scratch["k"].at[slot].transpose((1, 0)))
        plgpu.wgmma(scores, q.at[:, shape.nope :], scratch["k_rope"].at[slot].transpose((1, 0)))

    def visible(scores, first_key, limit, start=None, end=None):
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
        seen = key < across(limit - first_key, blocks.keys)
        if start is not None:
            seen |= (key >= across(start - first_key, blocks.keys)) & (key < across(end - first_key, blocks.keys))
        return jnp.where(seen, scores, -jnp.inf)

    def largest(scores):
        return jnp.max(scores, axis=1) * factor

    def weigh(scores, top):
        """Weights of a tile relative to `top` (a score of base 2), and their sum."""
        weights = jnp.exp2(scores * factor - across(top, blocks.keys))
        return weights, jnp.sum(weights, axis=1)

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))
    def _item(info, carry):
        done = carry
        head, block, tiles, *windows = item(info.index[0])
        rows = _rows(block, warpgroup)
        mine, whole = operands["rows"][0, rows], operands["rows"][1, rows]
        of_windows = [operands["rows"][i, rows] for i in (2, 3)] if windowed else []
        rows = pl.ds(rows * ROWS, ROWS)
        bounds = [
            plgpu.load(operands[name].at[rows], layout=_ROW, optimized=False)
            for name in ("limits", *(("starts", "ends") if windowed else ()))
        ]
        wait("q_full", warpgroup)

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
            found = visible(scores[...], _first_key(0, blocks, *windows), *bounds)
            release_keys(0)
            top = largest(found)
            top = jnp.where(top == -jnp.inf, _BELOW_ALL if windowed else 0.0, top)
            weights, total = weigh(found, top)
            return lax.optimization_barrier(weights.astype(jnp.bfloat16)), top, total

        def attend(acc):
            await_keys(0)
            carry = pl.run_scoped(first_tile, accumulator)
            await_keys(1)

            def step(index, carry, first_key=None, *bounds):
                weights, top, total = carry
                slot, last = slot_of(done + index), slot_of(done + index - 1)

                def seen(scores):
                    return visible(scores, first_key, *bounds) if bounds else scores

                def products(scores):
                    start_scores(scores, slot)
                    wait("v_full", last)
                    plgpu.wgmma(acc, weights, scratch["v"].at[last])
                    return plgpu.wgmma_accumulator_load(scores, wait_n=1)

                new_weights, part = weigh(seen(pl.run_scoped(products, accumulator)), top)
                large = _any_large(part, _FIRST_NAMED_BARRIER + warpgroup)  # pyright: ignore[reportCallIssue]

                @pl.when(large == 0)
                def _():
                    release_keys(index)

                # ptxas runs products one after the other if what they read is written while they run: the weights are
                # rounded after the wait.  A branch before it keeps it from moving the wait above the exponentials.
                new_weights = lax.optimization_barrier(new_weights)
                await_keys(index + 1)
                result = acc[...]
                release("v_empty", last)

                def small_enough():
                    return new_weights.astype(jnp.bfloat16), top, total + part, result

                def weighed_again():
                    def scores_again(scores):
                        start_scores(scores, slot)
                        return scores[...]

                    scores = seen(pl.run_scoped(scores_again, accumulator))
                    release_keys(index)
                    new_top = jnp.maximum(top, largest(scores))
                    decay = jnp.exp2(top - new_top)
                    weights, part = weigh(scores, new_top)
                    return weights.astype(jnp.bfloat16), new_top, total * decay + part, result * across(decay, shape.v)

                weights, top, total, result = lax.cond(large != 0, weighed_again, small_enough)
                acc[...] = result
                return lax.optimization_barrier(weights), top, total

            def masked(index, carry):
                return step(index, carry, _first_key(index, blocks, *windows), *bounds)

            if windowed:
                middle = jnp.clip(whole, 1, mine)
                carry = lax.fori_loop(1, middle, step, carry)
                inner = jnp.clip(of_windows[0], middle, mine)
                carry = lax.fori_loop(middle, inner, masked, carry)
                outer = jnp.clip(of_windows[1], inner, mine)
                carry = lax.fori_loop(inner, outer, step, carry)

                def at_end(index, carry):
                    """Who sees a key here sees the tile's first."""
                    return step(index, carry, _first_key(index, blocks, *windows), bounds[2])

                weights, top, total = lax.fori_loop(outer, mine, at_end, carry)
            else:
                middle = jnp.maximum(whole, 1)
                carry = lax.fori_loop(1, middle, step, carry)
                weights, top, total = lax.fori_loop(middle, mine, masked, carry)
            last = slot_of(done + mine - 1)
            wait("v_full", last)
            plgpu.wgmma(acc, weights, scratch["v"].at[last])
            result = acc[...]
            release("v_empty", last)
            return result, top, total

        result, top, total = pl.run_scoped(attend, plgpu.WGMMAAccumulatorRef((ROWS, shape.v), jnp.float32))

        @pl.loop(mine, tiles)
        def _pass_on(index):
            for full, empty in (("k_full", "k_empty"), ("v_full", "v_empty")):
                wait(full, slot_of(done + index))
                # One warp arrives at a cluster's barrier for all four.  Without a barrier of the warpgroup the slot
                # could be filled twice before another warp has looked, which would then wait for ever.
                plgpu.commit_smem()
                release(empty, slot_of(done + index))

        inverse = jnp.where(total == 0.0, 0.0, 1 / total)
        out[rows, head] = result * across(inverse, shape.v)
        lse[head, rows] = (top + jnp.log2(total)) / _LOG2_E
        return done + tiles
