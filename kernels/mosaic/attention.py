"""Flash attention on Hopper, heads expanded, each query limited to some of the first keys.

A persistent grid of one thread block per multiprocessor.  One warpgroup copies queries, keys and values into shared
memory; each of the others attends 64 queries of one head.  The structure follows FlashAttention-3 (arXiv 2407.08608):
the math warpgroups take turns on the tensor cores, so that the softmax of one runs under the products of the others,
and within a warpgroup the product with the values of a tile runs under the softmax of the next.  Heads whose keys and
values fit into L2 together are worked on together, longest blocks of queries first.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

ROWS = 64
"""Queries of a math warpgroup."""
ALIGNMENT = 8
"""Queries and keys come in multiples of so many: the height of a tile of the swizzled layout."""
_REGISTERS = {2: (232, 40), 3: (160, 32)}
_LOG2_E = math.log2(math.e)
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the work is cut.

    Attributes:
        warpgroups: math warpgroups of a thread block, 2 or 3, each with 64 queries.
        keys: keys of a tile, a multiple of 64.
        stages: tiles of keys, and of values, held in shared memory at a time.
        l2_bytes: keys and values that are worked on at a time.
    """

    warpgroups: int = 2
    keys: int = 128
    stages: int = 2
    l2_bytes: int = 32 * 2**20
    values_first: bool = False
    handover: str = "late"
    auto_barriers: bool = True
    named: bool = False
    cluster: int = 1
    ahead: bool = False

    def __post_init__(self):
        if self.warpgroups not in _REGISTERS or self.keys % 64 or self.stages < 1:
            raise ValueError(f"expected 2 or 3 warpgroups, keys % 64 = 0 and stages >= 1, got {self}")

    @property
    def queries(self) -> int:
        return self.warpgroups * ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    tokens: int
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
        scale: positive.

    Returns: output `[T, H, v]` and log-sum-exp `[H, T]`, float32, T rounded up to whole blocks.
    """
    tokens, heads, _ = q.shape
    shape = _Shape(tokens=tokens, heads=heads, keys=k.shape[0], nope=k.shape[2], rope=k_rope.shape[1], v=v.shape[2])
    scratch = _scratch(shape, blocks)
    limits = jnp.pad(key_limit, (0, -tokens % (blocks.queries * blocks.cluster)))
    operands = {"q": q, "k": k, "k_rope": k_rope, "v": v, "limits": limits, "schedule": schedule(limits, blocks)}

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
        grid=(multiprocessors // blocks.cluster,),
        grid_names=("block",),
        cluster=(blocks.cluster,),
        cluster_names=("cluster",),
        num_threads=blocks.warpgroups + 1,
        thread_name="wg",
        kernel_name="mla_prefill",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=not blocks.auto_barriers
        ),
    )(operands)


def _bar(operation, index):
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def bar(_, index):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [index.registers[()]],
            f"bar.{operation} $0, 256;",
            "r",
            has_side_effects=True,
        )

    bar(index + 8)


def schedule(limits: jax.Array, blocks: Blocks) -> jax.Array:
    """Blocks of queries, longest first: index, tiles of keys (at least 1), tiles without mask; int32 `[3, blocks]`."""
    limits = limits.reshape(-1, blocks.queries * blocks.cluster)
    longest, shortest = jnp.max(limits, axis=1), jnp.min(limits, axis=1)
    order = jnp.argsort(-longest)
    tiles = jnp.maximum(-(-longest // blocks.keys), 1)
    return jnp.stack((order, tiles[order], (shortest // blocks.keys)[order])).astype(jnp.int32)


def _scratch(shape, blocks):
    tiling = plgpu.TilingTransform((ALIGNMENT, 64))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

    def swizzled(*dimensions):
        return plgpu.SMEM(dimensions, jnp.bfloat16, transforms=(tiling, swizzle))

    groups, stages, keys = blocks.warpgroups, blocks.stages, blocks.keys
    empty = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    if blocks.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=groups, num_barriers=stages)
    return {
        "q": swizzled(groups, ROWS, shape.nope + shape.rope),
        "k": swizzled(stages, keys, shape.nope),
        "k_rope": swizzled(stages, keys, shape.rope),
        "v": swizzled(stages, keys, shape.v),
        "q_full": plgpu.Barrier(num_barriers=groups),
        "q_empty": plgpu.Barrier(num_barriers=groups),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "k_empty": empty,
        "v_full": plgpu.Barrier(num_barriers=stages),
        "v_empty": empty,
        "turn": plgpu.Barrier(num_barriers=groups),
    }


def shared_memory_bytes(nope: int, rope: int, v: int, blocks: Blocks) -> int:
    """Shared memory of the buffers of a thread block."""
    return 2 * (blocks.queries * (nope + rope) + blocks.stages * blocks.keys * (nope + rope + v))


def _items(shape, blocks, operands):
    """The number of pairs of a head and a block of queries, and the function that finds the pair of an index."""
    count = operands["schedule"].shape[1]
    bytes_per_head = shape.keys * 2 * (shape.nope + shape.v)
    together = min(max(blocks.l2_bytes // bytes_per_head, 1), shape.heads)

    def item(index):
        group, index = index // (together * count), lax.rem(index, jnp.int32(together * count))
        heads = jnp.minimum(together, shape.heads - group * together)
        rank = index // heads
        head = group * together + lax.rem(index, heads)
        block, tiles, unmasked = (operands["schedule"][i, rank] for i in range(3))
        return head, block * blocks.cluster + lax.axis_index("cluster"), tiles, unmasked

    return shape.heads * count, item


def _thread_block(shape, blocks, scale, operands, out, lse, scratch):
    warpgroup = lax.axis_index("wg")
    math_registers, copy_registers = _REGISTERS[blocks.warpgroups]

    @pl.when(warpgroup == blocks.warpgroups)
    def _():
        plgpu.set_max_registers(copy_registers, action="decrease")
        _copy(shape, blocks, operands, scratch)

    @pl.when(warpgroup < blocks.warpgroups)
    def _():
        plgpu.set_max_registers(math_registers, action="increase")
        _attend(shape, blocks, scale, operands, out, lse, scratch, warpgroup)


def _copy(shape, blocks, operands, scratch):
    """The copying warpgroup: queries of a block once, then tile after tile of keys and values."""
    count, item = _items(shape, blocks, operands)

    def await_free(name, slot, when):
        @pl.when(when)
        def _():
            plgpu.barrier_wait(scratch[name].at[slot])

    def copy_item(info, carry):
        head, block, tiles, _ = item(info.index[0])
        for warpgroup in range(blocks.warpgroups):
            await_free("q_empty", warpgroup, info.local_index > 0)
            rows = pl.ds(block * blocks.queries + warpgroup * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                operands["q"].at[rows, head], scratch["q"].at[warpgroup], scratch["q_full"].at[warpgroup]
            )

        def tile(index, done):
            slot = lax.rem(done, jnp.int32(blocks.stages))
            rows = pl.ds(index * blocks.keys, blocks.keys)
            await_free("k_empty", slot, done >= blocks.stages)

            def copy(name, source, full):
                shared = "cluster" if blocks.cluster > 1 else None
                full = scratch[full].at[slot]
                plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], full, collective_axes=shared)

            copy("k", operands["k"].at[rows, head], "k_full")
            copy("k_rope", operands["k_rope"].at[rows], "k_full")
            await_free("v_empty", slot, done >= blocks.stages)
            copy("v", operands["v"].at[rows, head], "v_full")
            return done + 1

        return lax.fori_loop(0, tiles, tile, carry)

    done = plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))(copy_item)
    for warpgroup in range(blocks.warpgroups):
        await_free("q_empty", warpgroup, done > 0)
    for slot in range(blocks.stages):
        await_free("k_empty", slot, done > slot)
        await_free("v_empty", slot, done > slot)


def _attend(shape, blocks, scale, operands, out, lse, scratch, warpgroup):
    """A math warpgroup: 64 queries of each item."""
    count, item = _items(shape, blocks, operands)
    factor = scale * _LOG2_E
    q = scratch["q"].at[warpgroup]
    q_nope, q_rope = q.at[:, : shape.nope], q.at[:, shape.nope :]
    next_warpgroup = lax.rem(warpgroup + 1, jnp.int32(blocks.warpgroups))

    def slot_of(tile):
        return lax.rem(tile, jnp.int32(blocks.stages))

    def start_scores(scores, slot):
        plgpu.wgmma(scores, q_nope, scratch["k"].at[slot].transpose((1, 0)))
        plgpu.wgmma(scores, q_rope, scratch["k_rope"].at[slot].transpose((1, 0)))

    def _take():
        if blocks.handover == "none":
            return
        if blocks.named:
            _bar("sync", warpgroup)
        else:
            plgpu.barrier_wait(scratch["turn"].at[warpgroup])

    def _give():
        if blocks.handover == "none":
            return
        if blocks.named:
            _bar("arrive", next_warpgroup)
        else:
            plgpu.barrier_arrive(scratch["turn"].at[next_warpgroup])

    def softmax(scores, top, total, mask):
        """Weights of a tile, largest score (of base 2) and sum so far, and the factor on what was summed before."""
        if mask is not None:
            first, limit = mask
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
            scores = jnp.where(key < lax.broadcast_in_dim(limit - first, scores.shape, [0]), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
        finite = new_top if mask is None else jnp.where(new_top == -jnp.inf, 0.0, new_top)
        decay = jnp.exp2(top - finite)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(finite, scores.shape, [0]))
        total = total * decay + jnp.sum(weights, axis=1)
        return weights, new_top, total, decay

    @pl.when((warpgroup == blocks.warpgroups - 1) & (blocks.handover != "none"))
    def _():
        if not blocks.named:
            plgpu.barrier_arrive(scratch["turn"].at[0])
        else:
            _bar("arrive", jnp.int32(0))

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))
    def _item(info, carry):
        done = carry
        head, block, tiles, unmasked = item(info.index[0])
        row = block * blocks.queries + warpgroup * ROWS
        limit = plgpu.load(operands["limits"].at[pl.ds(row, ROWS)], layout=_ROW, optimized=False)
        plgpu.barrier_wait(scratch["q_full"].at[warpgroup])

        def first_scores(scores):
            slot = slot_of(done)
            plgpu.barrier_wait(scratch["k_full"].at[slot])
            _take()
            start_scores(scores, slot)
            _give()
            result = scores[...]
            plgpu.barrier_arrive(scratch["k_empty"].at[slot])
            return result

        def whole(acc):
            scores = pl.run_scoped(first_scores, plgpu.WGMMAAccumulatorRef((ROWS, blocks.keys), jnp.float32))
            top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
            weights, top, total, _ = softmax(scores, top, total, (0, limit))
            weights = weights.astype(jnp.bfloat16)

            def await_keys(index):
                @pl.when(index < tiles)
                def _():
                    plgpu.barrier_wait(scratch["k_full"].at[slot_of(done + index)])

            if blocks.ahead:
                await_keys(1)

            def step(index, carry, masked):
                weights, top, total = carry
                slot, last = slot_of(done + index), slot_of(done + index - 1)

                def give(when):
                    if blocks.handover == when:
                        _give()

                def values_then_scores(scores):
                    plgpu.barrier_wait(scratch["v_full"].at[last])
                    plgpu.barrier_wait(scratch["k_full"].at[slot])
                    _take()
                    plgpu.wgmma(acc, weights, scratch["v"].at[last])
                    plgpu.wgmma(scores, q_nope, scratch["k"].at[slot].transpose((1, 0)))
                    give("early")
                    plgpu.wgmma(scores, q_rope, scratch["k_rope"].at[slot].transpose((1, 0)))
                    give("late")
                    return scores[...]

                def scores_then_values(scores):
                    if not blocks.ahead:
                        plgpu.barrier_wait(scratch["k_full"].at[slot])
                    _take()
                    start_scores(scores, slot)
                    plgpu.barrier_wait(scratch["v_full"].at[last])
                    half = blocks.keys // 2 if blocks.handover == "early" else blocks.keys
                    plgpu.wgmma(acc, weights[:, :half], scratch["v"].at[last, pl.ds(0, half)])
                    if half < blocks.keys:
                        give("early")
                        plgpu.wgmma(acc, weights[:, half:], scratch["v"].at[last, pl.ds(half, half)])
                    give("late")
                    return plgpu.wgmma_accumulator_load(scores, wait_n=1 if half == blocks.keys else 2)

                products = values_then_scores if blocks.values_first else scores_then_values
                scores = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, blocks.keys), jnp.float32))
                plgpu.barrier_arrive(scratch["k_empty"].at[slot])
                if blocks.values_first:
                    plgpu.barrier_arrive(scratch["v_empty"].at[last])
                mask = (index * blocks.keys, limit) if masked else None
                new_weights, top, total, decay = softmax(scores, top, total, mask)
                if not blocks.values_first:
                    new_weights = lax.optimization_barrier(new_weights)
                if blocks.ahead:
                    await_keys(index + 1)
                out = acc[...]
                if not blocks.values_first:
                    plgpu.barrier_arrive(scratch["v_empty"].at[last])
                acc[...] = out * lax.broadcast_in_dim(decay, out.shape, [0])
                return lax.optimization_barrier(new_weights.astype(jnp.bfloat16)), top, total

            carry = weights, top, total
            middle = jnp.maximum(unmasked, 1)
            carry = lax.fori_loop(1, middle, lambda i, c: step(i, c, masked=False), carry)
            carry = lax.fori_loop(middle, tiles, lambda i, c: step(i, c, masked=True), carry)
            weights, top, total = carry
            plgpu.barrier_arrive(scratch["q_empty"].at[warpgroup])
            last = slot_of(done + tiles - 1)
            plgpu.barrier_wait(scratch["v_full"].at[last])
            plgpu.wgmma(acc, weights, scratch["v"].at[last])
            result = acc[...]
            plgpu.barrier_arrive(scratch["v_empty"].at[last])
            return result, top, total

        result, top, total = pl.run_scoped(whole, plgpu.WGMMAAccumulatorRef((ROWS, shape.v), jnp.float32))
        rows = pl.ds(row, ROWS)
        inverse = jnp.where(total == 0.0, 0.0, 1 / total)
        result = result * lax.broadcast_in_dim(inverse, result.shape, [0])
        out[rows, head] = result
        lse[head, rows] = (top + jnp.log2(total)) / _LOG2_E
        return done + tiles

    if blocks.handover != "none":

        @pl.when(warpgroup == 0)
        def _():
            if blocks.named:
                _bar("sync", warpgroup)
            else:
                plgpu.barrier_wait(scratch["turn"].at[0])
