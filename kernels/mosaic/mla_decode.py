"""`mla_decode` for Hopper through Pallas Mosaic GPU.

A persistent grid; each thread block attends 64 rows (heads, or heads of several tokens) to a part of the line of all
sequences' key tiles (see `decode_parts`).

Three warpgroups.  One holds the queries in registers, computes scores and softmax, and hands the weights through
shared memory to the other two, which hold the output, half of its columns each.  A tile of keys lies in shared memory
once: read along its rows it is K, along its columns V; its rope part, which is K only, makes room for the weights.  The
two value warpgroups copy the next tiles themselves, since they are the last to read one: no warpgroup is spent on
copying, and its registers hold the queries.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic import decode_parts as parts
from jaxinfer.kernels.mosaic.decode_parts import TILE

_STAGES = 3
_ROPE_STAGES = 2
_SCORE_REGISTERS = 184
_VALUE_REGISTERS = 160
_SCORES = 2


def reason_against(q: jax.Array, cache: jax.Array, kv_rank: int) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    if q.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16:
        return f"queries are {q.dtype} and the cache {cache.dtype}, not bfloat16"
    if cache.shape[2] % TILE:
        return f"pages of {cache.shape[2]} tokens are no multiple of {TILE}"
    if kv_rank % (2 * TILE) or kv_rank > 512:
        return f"kv_rank = {kv_rank} is no multiple of {2 * TILE} up to 512"
    if (q.shape[3] - kv_rank) != TILE:
        return f"the rope part has {q.shape[3] - kv_rank} dimensions, not {TILE}"
    return None


def mla_decode(q, cache, layer, page_table, lengths, *, kv_rank, scale, multiprocessors, schedule=None):
    """See `jaxinfer.kernels.mla_decode`; `multiprocessors` is the number of thread blocks that run at a time."""
    batch, tokens, heads, dim = q.shape
    layers, pages, page_size, _ = cache.shape
    shape = parts.Shape(
        batch=batch,
        tokens=tokens,
        heads=heads,
        rank=kv_rank,
        rope=dim - kv_rank,
        parts=parts.count(tokens * heads, multiprocessors),
        scale=scale * math.log2(math.e),
        dtype=cache.dtype,
    )
    tiles_per_page = page_size // TILE
    q = q.reshape(batch, tokens * heads, dim)
    operands = {
        "q": jnp.pad(q, ((0, 0), (0, shape.rows - tokens * heads), (0, 0))),
        "cache": cache.reshape(layers * pages * tiles_per_page, TILE, dim),
        **parts.operands_of(shape, tiles_per_page, pages, layer, page_table, lengths, schedule),
    }
    return parts.finish(shape, operands, *_attend(shape, tiles_per_page, operands))


def _attend(shape, tiles_per_page, operands):
    """Rows of the results: sequences, where they are whole, then two partial ones for every part."""
    scratch = {
        "values": parts.tiles((2, _STAGES, TILE, shape.half), shape.dtype),
        "rope": parts.tiles((_ROPE_STAGES, TILE, shape.rope), shape.dtype),
        "q": parts.tiles((TILE, TILE + shape.rope), shape.dtype),
        "factor": plgpu.SMEM((_ROPE_STAGES, TILE), jnp.float32),
        "inverse": plgpu.SMEM((TILE,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "values_full": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "rope_full": plgpu.Barrier(num_barriers=_ROPE_STAGES),
        "rope_empty": plgpu.Barrier(num_barriers=_ROPE_STAGES),
        "weights_full": plgpu.Barrier(num_barriers=_ROPE_STAGES),
        "inverse_full": plgpu.Barrier(),
        "inverse_empty": plgpu.Barrier(num_arrivals=2),
    }

    def body(operands, out, lse):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, tiles_per_page, operands, out, lse, scratch),
            scratch,
            collective_axes="wg",
        )

    results = shape.batch + 2 * shape.parts
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((results, shape.rows, shape.rank), jnp.float32),
            jax.ShapeDtypeStruct((results, shape.rows), jnp.float32),
        ),
        grid=(shape.rows // TILE, shape.parts),
        grid_names=("block", "part"),
        num_threads=3,
        thread_name="wg",
        kernel_name="mla_decode",
        # Where a warp could overtake another, `commit_smem` has a barrier of the warpgroup.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(operands)


def _thread_block(shape, tiles_per_page, operands, out, lse, scratch):
    warpgroup = lax.axis_index("wg")

    def scores():
        plgpu.set_max_registers(_SCORE_REGISTERS, action="increase")
        _scores(shape, operands, lse, scratch)

    def values():
        plgpu.set_max_registers(_VALUE_REGISTERS, action="decrease")
        _values(shape, tiles_per_page, operands, out, scratch, warpgroup)

    # Two branches of one: the assembler keeps to the limits only where no path leads from one role into the other.
    lax.cond(warpgroup == _SCORES, scores, values)


def _scores(shape, operands, lse, scratch):
    """The score warpgroup: weights of the softmax, tile after tile, and the log-sum-exp of each piece."""
    first_row = lax.axis_index("block") * TILE
    rows = pl.ds(first_row, TILE)
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def per_row(value):
        return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), by_row)

    def queries(sequence):
        """The queries of the latent but the last of its tiles of columns in registers, the rest in shared memory."""
        rest = pl.ds(shape.rank - TILE, TILE + shape.rope)
        plgpu.copy_gmem_to_smem(operands["q"].at[sequence, rows, rest], scratch["q"], scratch["q_full"])

        def load(start, size):
            source = operands["q"].at[sequence, rows, pl.ds(start, size)]
            return plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)

        left, right = load(0, shape.half), load(shape.half, shape.half - TILE) if shape.half > TILE else None
        plgpu.barrier_wait(scratch["q_full"])
        return left, right

    def piece_scores(piece, state):
        done, finished = state
        left, right = queries(piece.sequence)

        def products(accumulator, slot, rope_slot):
            def multiply(queries, keys):
                plgpu.wgmma(accumulator, queries, keys.transpose((1, 0)))

            plgpu.barrier_wait(scratch["values_full"].at[slot])
            multiply(left, scratch["values"].at[0, slot])
            if right is not None:
                multiply(right, scratch["values"].at[1, slot, :, pl.ds(0, shape.half - TILE)])
            multiply(
                scratch["q"].at[:, pl.ds(0, TILE)], scratch["values"].at[1, slot, :, pl.ds(shape.half - TILE, TILE)]
            )
            plgpu.barrier_wait(scratch["rope_full"].at[rope_slot])
            multiply(scratch["q"].at[:, pl.ds(TILE, shape.rope)], scratch["rope"].at[rope_slot])
            return accumulator[...]

        def tile(index, state, masked):
            done, top, total = state
            slot, rope_slot = _slots(done)
            scores = pl.run_scoped(
                lambda accumulator: products(accumulator, slot, rope_slot),
                plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32),
            )
            if masked:
                scores = jnp.where(parts.seen(shape, piece, index, first_row), scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1) * shape.scale)
            # A row that has seen no key yet would subtract infinity from infinity.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            weights = jnp.exp2(scores * shape.scale - lax.broadcast_in_dim(shift, scores.shape, [0]))
            factor = jnp.exp2(top - shift)
            # No warp overwrites what another still reads.
            plgpu.commit_smem()
            scratch["rope"].at[rope_slot][...] = weights.astype(shape.dtype)
            scratch["factor"].at[rope_slot][...] = factor
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["weights_full"].at[rope_slot])
            return done + 1, new_top, total * factor + jnp.sum(weights, axis=1)

        state = done, per_row(-jnp.inf), per_row(0.0)
        state = lax.fori_loop(0, piece.clear, lambda i, s: tile(i, s, False), state)
        done, top, total = lax.fori_loop(piece.clear, piece.tiles, lambda i, s: tile(i, s, True), state)
        empty = total == 0.0
        divisor = jnp.where(empty, 1.0, total)
        lse.at[piece.result, rows][...] = jnp.where(empty, -jnp.inf, top * math.log(2) + jnp.log(divisor))

        inverse_read(finished)
        scratch["inverse"][...] = 1.0 / divisor
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["inverse_full"])
        return done, finished + 1

    def inverse_read(finished):
        """Waits until the piece before has been scaled."""

        @pl.when(finished > 0)
        def _():
            plgpu.barrier_wait(scratch["inverse_empty"])

    _, finished = parts.pieces(shape, operands, (jnp.int32(0), jnp.int32(0)), piece_scores)
    inverse_read(finished)


def _slots(done):
    return lax.rem(done, jnp.int32(_STAGES)), lax.rem(done, jnp.int32(_ROPE_STAGES))


def _values(shape, tiles_per_page, operands, out, scratch, warpgroup):
    """A value warpgroup: copies the tiles of its half of the columns, and adds up weights times values."""
    part = lax.axis_index("part")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]
    columns = pl.ds(pl.multiple_of(warpgroup * shape.half, TILE), shape.half)
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)

    def locate(number, sequence):
        return parts.locate(operands["cache"].shape[0], tiles_per_page, operands, number, sequence)

    def copy_values(number, tile):
        """Copies this warpgroup's columns of the thread block's tile of that number, if it has so many."""
        slot = _slots(number)[0]

        @pl.when(begin + number < end)
        def _():
            target = scratch["values"].at[warpgroup, slot]
            plgpu.copy_gmem_to_smem(operands["cache"].at[tile, :, columns], target, scratch["values_full"].at[slot])

    def copy_rope(number, tile):
        slot = _slots(number)[1]

        @pl.when(begin + number < end)
        def _():
            rope = operands["cache"].at[tile, :, pl.ds(shape.rank, shape.rope)]
            plgpu.copy_gmem_to_smem(rope, scratch["rope"].at[slot], scratch["rope_full"].at[slot])

    second = warpgroup == 1
    sequence, ahead = operands["first"][part], ()
    for number in map(jnp.int32, range(_STAGES)):
        tile, sequence = locate(number, sequence)
        copy_values(number, tile)
        if len(ahead) < _ROPE_STAGES:
            pl.when(second)(functools.partial(copy_rope, number, tile))
        ahead = *ahead, tile

    def piece_values(piece, state):
        def attended(accumulator):
            def scaled(factor):
                factor = plgpu.load(factor, layout=plgpu.Layout.WGMMA.reduce(1))
                return accumulator[...] * lax.broadcast_in_dim(factor, (TILE, shape.half), [0])

            def refill_rope(done, slot, tile):
                plgpu.barrier_wait(scratch["rope_empty"].at[slot])
                copy_rope(done + _ROPE_STAGES, tile)

            def leave_rope(done, slot, tile):
                plgpu.barrier_arrive(scratch["rope_empty"].at[slot])

            def tile(index, state, masked):
                done, sequence, ahead = state
                slot, rope_slot = _slots(done)
                # The page table is read while there is nothing to multiply yet.
                next_tile, sequence = locate(done + _STAGES, sequence)
                plgpu.barrier_wait(scratch["values_full"].at[slot])
                plgpu.barrier_wait(scratch["weights_full"].at[rope_slot])
                values = scratch["values"].at[warpgroup, slot]
                if masked:
                    _silence(piece, index, values)
                accumulator[...] = scaled(scratch["factor"].at[rope_slot])
                plgpu.wgmma(accumulator, scratch["rope"].at[rope_slot], values)
                plgpu.wgmma_wait(0)
                # Orders the reads of all four warps before the next copies into the stages.
                plgpu.commit_smem()
                copy_values(done + _STAGES, next_tile)
                lax.cond(second, refill_rope, leave_rope, done, rope_slot, ahead[0])
                return done + 1, sequence, (*ahead[1:], next_tile)

            result = lax.fori_loop(0, piece.clear, lambda i, s: tile(i, s, False), state)
            result = lax.fori_loop(piece.clear, piece.tiles, lambda i, s: tile(i, s, True), result)
            plgpu.barrier_wait(scratch["inverse_full"])
            out.at[piece.result, rows, columns][...] = scaled(scratch["inverse"])
            plgpu.barrier_arrive(scratch["inverse_empty"])
            return result

        return pl.run_scoped(attended, plgpu.WGMMAAccumulatorRef((TILE, shape.half), jnp.float32))

    parts.pieces(shape, operands, (jnp.int32(0), sequence, ahead[_ROPE_STAGES:]), piece_values)


def _silence(piece, index, values):
    """Zeroes the values of keys beyond the sequence's length: memory never written may hold NaN, which a weight of
    zero does not silence."""
    limit = piece.length - (piece.start + index) * TILE

    @pl.when(limit < TILE)
    def _():
        for start in range(0, values.shape[1], TILE):
            block = values.at[:, pl.ds(start, TILE)]
            key = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=plgpu.Layout.WGMMA)
            block[...] = jnp.where(key < limit, plgpu.load(block, layout=plgpu.Layout.WGMMA), 0)
        plgpu.commit_smem()
