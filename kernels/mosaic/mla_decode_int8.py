"""`mla_decode` on an INT8 cache for Hopper through Pallas Mosaic GPU: the kernel of `mla_decode` with other products.

Scores are exact: int8 queries times int8 keys in int32, multiplied by the scales of both, plus the product of the
rotated parts in bfloat16.  8-bit tensor cores want the numbers that are summed side by side, so a tile that is K cannot
be V: the value warpgroups make bfloat16 of it, exactly, and the weights of the softmax carry the scales of the keys.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.latents import QuantizedLatents, quantize_latents
from jaxinfer.kernels.mosaic import decode_parts as parts
from jaxinfer.kernels.mosaic.decode_parts import TILE

_STAGES = 4
_ROPE_STAGES = 2
_SCORE_REGISTERS = 184
_VALUE_REGISTERS = 160
_SCORES = 2
_COLUMNS = 64
"""Columns of 8 bits that lie side by side in shared memory, and are made bfloat16 at a time; 128 spill registers."""


def reason_against(q: jax.Array, cache: QuantizedLatents, kv_rank: int) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    if q.dtype != jnp.bfloat16 or cache.values.dtype != jnp.int8 or cache.scale.shape[-1] != 1:
        return f"queries are {q.dtype}, the cache {cache.values.dtype} with {cache.scale.shape[-1]} scales for a token"
    if cache.values.shape[2] % TILE:
        return f"pages of {cache.values.shape[2]} tokens are no multiple of {TILE}"
    if kv_rank % (4 * _COLUMNS) or kv_rank > 512:
        return f"kv_rank = {kv_rank} is no multiple of {4 * _COLUMNS} up to 512"
    if cache.rope.shape[-1] != TILE:
        return f"the rope part has {cache.rope.shape[-1]} dimensions, not {TILE}"
    return None


def mla_decode(q, cache, layer, page_table, lengths, *, kv_rank, scale, multiprocessors):
    """See `jaxinfer.kernels.mla_decode`; `multiprocessors` is the number of thread blocks that run at a time."""
    batch, tokens, heads, dim = q.shape
    layers, pages, page_size, rope = cache.rope.shape
    shape = parts.Shape(
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
    begins, cuts, first = parts.schedule(lengths, shape.parts)
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
    out, lse = parts.merge(shape, operands, out, lse)
    out, lse = out[:batch, : tokens * heads], lse[:batch, : tokens * heads]
    return out.reshape(batch, tokens, heads, kv_rank), lse.reshape(batch, tokens, heads)


def _attend(shape, tiles_per_page, operands):
    """Rows of the results: sequences, where they are whole, then two partial ones for every part."""
    scratch = {
        "values": parts.tiles((2, _STAGES, TILE, shape.half), jnp.dtype(jnp.int8), _COLUMNS),
        "wide": parts.tiles((2, TILE, shape.half), shape.dtype),
        "rope": parts.tiles((_ROPE_STAGES, TILE, shape.rope), shape.dtype),
        "q_rope": parts.tiles((TILE, shape.rope), shape.dtype),
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

    lax.cond(warpgroup == _SCORES, scores, values)


def _slots(done):
    return lax.rem(done, jnp.int32(_STAGES)), lax.rem(done, jnp.int32(_ROPE_STAGES))


def _scores(shape, operands, lse, scratch):
    """The score warpgroup: weights of the softmax, tile after tile, and the log-sum-exp of each piece."""
    first_row = lax.axis_index("block") * TILE
    rows = pl.ds(first_row, TILE)
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
                seen = parts.seen(shape, piece, index, first_row)
                scores, k_scale = jnp.where(seen, scores, -jnp.inf), jnp.where(seen, k_scale, 0.0)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            # A row that has seen no key yet would subtract infinity from infinity.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            weights = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, [0]))
            factor = jnp.exp2(top - shift)
            # No warp overwrites what another still reads.
            plgpu.commit_smem()
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

    _, finished = parts.pieces(shape, operands, (jnp.int32(0), jnp.int32(0)), piece_scores)
    inverse_read(finished)


def _values(shape, tiles_per_page, operands, out, scratch, warpgroup):
    """A value warpgroup: copies the tiles of its half of the columns, and adds up weights times values."""
    part = lax.axis_index("part")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]
    columns = pl.ds(pl.multiple_of(warpgroup * shape.half, _COLUMNS), shape.half)
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)

    def locate(number, sequence):
        return parts.locate(operands["values"].shape[0], tiles_per_page, operands, number, sequence)

    def copy_values(number, tile):
        """Copies this warpgroup's columns of the thread block's tile of that number, if it has so many."""
        slot = _slots(number)[0]

        @pl.when(begin + number < end)
        def _():
            target = scratch["values"].at[warpgroup, slot]
            plgpu.copy_gmem_to_smem(operands["values"].at[tile, :, columns], target, scratch["values_full"].at[slot])

    def copy_rope(number, tile):
        slot = _slots(number)[1]

        @pl.when(begin + number < end)
        def _():
            for name in ("rope", "scale"):
                plgpu.copy_gmem_to_smem(operands[name].at[tile], scratch[name].at[slot], scratch["rope_full"].at[slot])

    second = warpgroup == 1
    sequence, ahead = operands["first"][part], ()
    for number in map(jnp.int32, range(_STAGES)):
        tile, sequence = locate(number, sequence)
        copy_values(number, tile)
        if len(ahead) < _ROPE_STAGES:
            pl.when(second)(functools.partial(copy_rope, number, tile))
        ahead = *ahead, tile

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

            def refill_rope(done, slot, tile):
                plgpu.barrier_wait(scratch["rope_empty"].at[slot])
                copy_rope(done + _ROPE_STAGES, tile)

            def leave_rope(done, slot, tile):
                plgpu.barrier_arrive(scratch["rope_empty"].at[slot])

            def tile(_, state):
                done, sequence, ahead = state
                slot, rope_slot = _slots(done)
                plgpu.barrier_wait(scratch["values_full"].at[slot])
                widen(slot)
                # The page table is read while there is nothing to multiply yet.
                next_tile, sequence = locate(done + _STAGES, sequence)
                plgpu.barrier_wait(scratch["weights_full"].at[rope_slot])
                # The scores are done with this tile.
                copy_values(done + _STAGES, next_tile)
                accumulator[...] = scaled(scratch["factor"].at[rope_slot])
                plgpu.wgmma(accumulator, scratch["rope"].at[rope_slot], scratch["wide"].at[warpgroup])
                plgpu.wgmma_wait(0)
                # Orders the reads of all four warps before the next copies into the stages.
                plgpu.commit_smem()
                lax.cond(second, refill_rope, leave_rope, done, rope_slot, ahead[0])
                return done + 1, sequence, (*ahead[1:], next_tile)

            result = lax.fori_loop(0, piece.tiles, tile, state)
            plgpu.barrier_wait(scratch["inverse_full"])
            out.at[piece.result, rows, columns][...] = scaled(scratch["inverse"])
            plgpu.barrier_arrive(scratch["inverse_empty"])
            return result

        return pl.run_scoped(attended, plgpu.WGMMAAccumulatorRef((TILE, shape.half), jnp.float32))

    parts.pieces(shape, operands, (jnp.int32(0), sequence, ahead[_ROPE_STAGES:]), piece_values)
