"""`mla_decode` on an INT8 cache for Hopper through Pallas Mosaic GPU: the kernel of `mla_decode` with other products.

Scores are exact: int8 queries times int8 keys in int32, multiplied by the scales of both, plus the product of the
rotated parts in bfloat16.  8-bit tensor cores want the numbers that are summed side by side, so a tile that is K cannot
be V: the value warpgroups make bfloat16 of it, exactly, and the weights of the softmax carry the scales of the keys.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.latents import QuantizedLatents, quantize_latents
from jaxinfer.kernels.mosaic import mla_decode as plain
from jaxinfer.kernels.mosaic.mla_decode import TILE

_STAGES = 4
_ROPE_STAGES = 2
_SCORE_REGISTERS = 184
_VALUE_REGISTERS = 160
_SCORES = 2
_COLUMNS = 128
"""Columns of 8 bits that lie side by side in shared memory."""


def reason_against(q: jax.Array, cache: QuantizedLatents, kv_rank: int) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    if q.dtype != jnp.bfloat16 or cache.values.dtype != jnp.int8 or cache.scale.shape[-1] != 1:
        return f"queries are {q.dtype}, the cache {cache.values.dtype} with {cache.scale.shape[-1]} scales for a token"
    if cache.values.shape[2] % TILE:
        return f"pages of {cache.values.shape[2]} tokens are no multiple of {TILE}"
    if kv_rank % (2 * _COLUMNS) or kv_rank > 512:
        return f"kv_rank = {kv_rank} is no multiple of {2 * _COLUMNS} up to 512"
    if cache.rope.shape[-1] != TILE:
        return f"the rope part has {cache.rope.shape[-1]} dimensions, not {TILE}"
    return None


def mla_decode(q, cache, layer, page_table, lengths, *, kv_rank, scale, multiprocessors):
    """See `jaxinfer.kernels.mla_decode`; `multiprocessors` is the number of thread blocks that run at a time."""
    batch, tokens, heads, dim = q.shape
    layers, pages, page_size, rope = cache.rope.shape
    shape = plain._Shape(
        batch=batch,
        tokens=tokens,
        heads=heads,
        rank=kv_rank,
        rope=rope,
        parts=1,
        scale=scale * math.log2(math.e),
        dtype=cache.rope.dtype,
    )
    shape = dataclasses.replace(shape, parts=max(1, multiprocessors // (shape.rows // TILE)))
    begins, cuts, first = plain.schedule(lengths, shape.parts)
    q = q.reshape(batch, tokens * heads, dim)
    q = jnp.pad(q, ((0, 0), (0, shape.rows - tokens * heads), (0, 0)))
    latent, q_scale = quantize_latents(q[..., :kv_rank], 1, jnp.int8)
    tiles_per_page = page_size // TILE
    tiles = layers * pages * tiles_per_page
    operands = {
        "q": latent,
        "q_rope": q[..., kv_rank:],
        "q_scale": q_scale[..., 0] * shape.scale,
        "values": cache.values.reshape(tiles, TILE, kv_rank),
        "rope": cache.rope.reshape(tiles, TILE, rope),
        "scale": cache.scale.reshape(tiles, TILE),
        "layer_tile": (layer * (pages * tiles_per_page))[None],
        "page_table": page_table,
        "lengths": lengths,
        "begins": begins,
        "cuts": cuts,
        "first": first,
    }
    out, lse = _attend(shape, tiles_per_page, operands)
    out, lse = plain._merge(shape, operands, out, lse)
    out, lse = out[:batch, : tokens * heads], lse[:batch, : tokens * heads]
    return out.reshape(batch, tokens, heads, kv_rank), lse.reshape(batch, tokens, heads)


def _attend(shape, tiles_per_page, operands):
    """Rows of the results: sequences, where they are whole, then two partial ones for every part."""
    scratch = {
        "values": plain._tiles((2, _STAGES, TILE, shape.half), jnp.dtype(jnp.int8)),
        "wide": plain._tiles((2, TILE, shape.half), shape.dtype),
        "rope": plain._tiles((_ROPE_STAGES, TILE, shape.rope), shape.dtype),
        "q_rope": plain._tiles((TILE, shape.rope), shape.dtype),
        "scale": plgpu.SMEM((_ROPE_STAGES, TILE), jnp.float32),
        "factor": plgpu.SMEM((_ROPE_STAGES, TILE), jnp.float32),
        "inverse": plgpu.SMEM((TILE,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "values_full": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "rope_full": plgpu.Barrier(num_arrivals=2, num_barriers=_ROPE_STAGES),
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
        kernel_name="mla_decode_int8",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(operands)


def _thread_block(shape, tiles_per_page, operands, out, lse, scratch):
    warpgroup = lax.axis_index("wg")

    def scores():
        plgpu.set_max_registers(_SCORE_REGISTERS, action="increase")
        _scores(shape, operands, lse, scratch)

    def values():
        plgpu.set_max_registers(_VALUE_REGISTERS, action="decrease")
        _values(shape, tiles_per_page, operands, out, scratch, warpgroup)

    lax.cond(warpgroup == _SCORES, scores, values)


def _slots(done):
    return lax.rem(done, jnp.int32(_STAGES)), lax.rem(done, jnp.int32(_ROPE_STAGES))


def _scores(shape, operands, lse, scratch):
    """The score warpgroup: weights of the softmax, tile after tile, and the log-sum-exp of each piece."""
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def per_row(value):
        return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), by_row)

    def inverse_read(finished):
        """Waits until the piece before has been scaled."""

        @pl.when(finished > 0)
        def _():
            plgpu.barrier_wait(scratch["inverse_empty"])

    def piece_scores(piece, state):
        done, finished = state
        plgpu.copy_gmem_to_smem(operands["q_rope"].at[piece.sequence, rows], scratch["q_rope"], scratch["q_full"])

        def half(number):
            columns = pl.ds(number * shape.half, shape.half)
            source = operands["q"].at[piece.sequence, rows, columns]
            return plgpu.load(source, layout=plgpu.Layout.WGMMA_8BIT, optimized=False)

        queries = half(0), half(1)
        q_scale = plgpu.load(operands["q_scale"].at[piece.sequence, rows], layout=by_row, optimized=False)
        plgpu.barrier_wait(scratch["q_full"])

        def products(latent, rotated, slot, rope_slot):
            plgpu.barrier_wait(scratch["values_full"].at[slot])
            for number in range(2):
                plgpu.wgmma(latent, queries[number], scratch["values"].at[number, slot].transpose((1, 0)))
            plgpu.barrier_wait(scratch["rope_full"].at[rope_slot])
            plgpu.wgmma(rotated, scratch["q_rope"], scratch["rope"].at[rope_slot].transpose((1, 0)))
            return latent[...], rotated[...]

        def tile(index, state, masked):
            done, top, total = state
            slot, rope_slot = _slots(done)
            exact, rope = pl.run_scoped(
                lambda latent, rotated: products(latent, rotated, slot, rope_slot),
                plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.int32),
                plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32),
            )
            k_scale = plgpu.load(scratch["scale"].at[rope_slot], layout=by_column)
            k_scale = lax.broadcast_in_dim(k_scale, (TILE, TILE), [1])
            scores = exact.astype(jnp.float32) * lax.broadcast_in_dim(q_scale, (TILE, TILE), [0]) * k_scale
            scores = scores + rope * shape.scale
            if masked:
                seen = plain._seen(shape, piece, index)
                scores, k_scale = jnp.where(seen, scores, -jnp.inf), jnp.where(seen, k_scale, 0.0)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            # A row that has seen no key yet would subtract infinity from infinity.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            weights = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, [0]))
            factor = jnp.exp2(top - shift)
            scratch["rope"].at[rope_slot][...] = (weights * k_scale).astype(shape.dtype)
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

    _, finished = plain._pieces(shape, operands, (jnp.int32(0), jnp.int32(0)), piece_scores)
    inverse_read(finished)


def _values(shape, tiles_per_page, operands, out, scratch, warpgroup):
    """A value warpgroup: copies the tiles of its half of the columns, and adds up weights times values."""
    part = lax.axis_index("part")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]
    columns = pl.ds(pl.multiple_of(warpgroup * shape.half, _COLUMNS), shape.half)
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)

    def source(position, sequence):
        """Where the tile at a position of the line lies in the cache, and its sequence: the given one or the next."""
        sequence = jnp.where(position >= operands["begins"][sequence + 1], sequence + 1, sequence)
        index = position - operands["begins"][sequence]
        page = operands["page_table"][sequence, lax.div(index, jnp.int32(tiles_per_page))]
        tile = operands["layer_tile"][0] + page * tiles_per_page + lax.rem(index, jnp.int32(tiles_per_page))
        return jnp.clip(tile, 0, operands["values"].shape[0] - 1), sequence

    def copy_values(number, sequence):
        """Copies this warpgroup's columns of the thread block's tile of that number, if it has so many."""
        tile, sequence = source(jnp.minimum(begin + number, end - 1), sequence)
        slot = _slots(number)[0]

        @pl.when(begin + number < end)
        def _():
            target = scratch["values"].at[warpgroup, slot]
            plgpu.copy_gmem_to_smem(operands["values"].at[tile, :, columns], target, scratch["values_full"].at[slot])

        return sequence

    def copy_rope(number, sequence):
        tile, sequence = source(jnp.minimum(begin + number, end - 1), sequence)
        slot = _slots(number)[1]

        @pl.when(begin + number < end)
        def _():
            for name in ("rope", "scale"):
                plgpu.copy_gmem_to_smem(operands[name].at[tile], scratch[name].at[slot], scratch["rope_full"].at[slot])

        return sequence

    second = warpgroup == 1
    of_values = of_rope = operands["first"][part]
    for number in range(_STAGES):
        of_values = copy_values(jnp.int32(number), of_values)
    for number in range(_ROPE_STAGES):
        of_rope = lax.cond(second, copy_rope, lambda number, sequence: sequence, jnp.int32(number), of_rope)

    def widen(slot):
        """This warpgroup's part of the tile in bfloat16."""
        for start in range(0, shape.half, _COLUMNS):
            narrow = scratch["values"].at[warpgroup, slot, :, pl.ds(start, _COLUMNS)]
            wide = plgpu.load(narrow, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(shape.dtype)
            scratch["wide"].at[warpgroup, :, pl.ds(start, _COLUMNS)][...] = wide
        plgpu.commit_smem()

    def piece_values(piece, state):
        def attended(accumulator):
            def scaled(factor):
                factor = plgpu.load(factor, layout=plgpu.Layout.WGMMA.reduce(1))
                return accumulator[...] * lax.broadcast_in_dim(factor, (TILE, shape.half), [0])

            def refill_rope(done, slot, sequence):
                plgpu.barrier_wait(scratch["rope_empty"].at[slot])
                return copy_rope(done + _ROPE_STAGES, sequence)

            def leave_rope(done, slot, sequence):
                plgpu.barrier_arrive(scratch["rope_empty"].at[slot])
                return sequence

            def tile(_, state):
                done, of_values, of_rope = state
                slot, rope_slot = _slots(done)
                plgpu.barrier_wait(scratch["values_full"].at[slot])
                widen(slot)
                plgpu.barrier_wait(scratch["weights_full"].at[rope_slot])
                # The scores are done with this tile.
                of_values = copy_values(done + _STAGES, of_values)
                accumulator[...] = scaled(scratch["factor"].at[rope_slot])
                plgpu.wgmma(accumulator, scratch["rope"].at[rope_slot], scratch["wide"].at[warpgroup])
                plgpu.wgmma_wait(0)
                # Orders the reads of all four warps before the next copies into the stages.
                plgpu.commit_smem()
                of_rope = lax.cond(second, refill_rope, leave_rope, done, rope_slot, of_rope)
                return done + 1, of_values, of_rope

            result = lax.fori_loop(0, piece.tiles, tile, state)
            plgpu.barrier_wait(scratch["inverse_full"])
            out.at[piece.result, rows, columns][...] = scaled(scratch["inverse"])
            plgpu.barrier_arrive(scratch["inverse_empty"])
            return result

        return pl.run_scoped(attended, plgpu.WGMMAAccumulatorRef((TILE, shape.half), jnp.float32))

    plain._pieces(shape, operands, (jnp.int32(0), of_values, of_rope), piece_values)
