"""`mla_decode` on a cache in 8 bits for Hopper through Pallas Mosaic GPU.

The work is cut as in `mla_decode`, and the score warpgroup is much the same.  The product with the values is turned
round: `out^T = V^T P^T`, so that the values are the operand that tensor cores take from registers.  The two value
warpgroups read a tile of bytes transposed (as pairs of columns, which `ldmatrix` can turn), widen it in registers to
float16, and never write it back.  The heads are the columns of that product: few heads, few columns.

INT8: scores are exact: int8 queries times int8 keys in int32, multiplied by the scales of both, plus the product of the
rotated parts in bfloat16.  Scores of few heads are turned round too, `S^T = K Q^T`: then the softmax works on no more
columns than there are heads.  The weights of the softmax carry the scales of the keys; the largest scale of a key so
far keeps them in the range of float16.

8-bit floats: Hopper's products of them keep 14 bits of a sum, too few, so keys are widened to float16 in registers as
well, and their product is always turned round.  Queries are float16 over a power of two, which keeps all of bfloat16.
Scores of each group of columns are summed by themselves and multiplied by its scales.  Values are multiplied by their
scales when they are widened.

Weights and values are float16, which has three bits more than bfloat16.
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
from jaxinfer.kernels.mosaic import transposed
from jaxinfer.kernels.mosaic.decode_parts import TILE
from jaxinfer.kernels.mosaic.stores import store_some

_STAGES = {False: 4, True: 3}
"""Tiles in shared memory at a time: of int8, and of 8-bit floats, whose queries take more of it."""
_ROPE_STAGES = 2
"""Tiles of rotated keys, and of weights, at a time."""
_REGISTERS = {True: (152, 176), False: (200, 152)}
"""Of the score warpgroup and a value warpgroup: of 64 heads, whose output takes 128 of these, and of fewer."""
_SCORES = 2
_COLUMNS = transposed.COLUMNS
"""Columns of 8 bits that lie side by side in shared memory, and of an 8-bit float's scale."""
_LARGEST_WEIGHT = 2.0**15
_SCALE_UNIT = 1 / 16
"""Values of 8-bit floats are float16 in such units: those up to 4,094 are in its range."""
_WGMMA = plgpu.Layout.WGMMA
_ROW, _COLUMN = _WGMMA.reduce(1), _WGMMA.reduce(0)
_FLOATS = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class _Shape(parts.Shape):
    values: jnp.dtype
    """Type of the latents."""

    @property
    def floats(self) -> bool:
        return self.values != jnp.int8

    @property
    def stages(self) -> int:
        return _STAGES[self.floats]

    @property
    def turned(self) -> bool:
        """Whether scores are keys by heads, not heads by keys."""
        return self.floats or self.width < TILE

    @property
    def scores(self) -> tuple[int, int]:
        return (TILE, self.width) if self.turned else (TILE, TILE)

    @property
    def held(self) -> int:
        """Columns of the queries that lie in registers, the first ones."""
        return 0 if self.turned else self.half

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.rank // _COLUMNS if self.floats else 1

    @property
    def width(self) -> int:
        """Columns of the product with the values: rows of a block, as many as a small number of rows needs."""
        rows = self.tokens * self.heads
        return next((width for width in (16, 32) if rows <= width), TILE)


def reason_against(q: jax.Array, cache: QuantizedLatents, kv_rank: int) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    groups = kv_rank // _COLUMNS if cache.values.dtype in _FLOATS else 1
    if q.dtype != jnp.bfloat16 or cache.values.dtype not in (jnp.int8, *_FLOATS) or cache.scale.shape[-1] != groups:
        return f"queries are {q.dtype}, the cache {cache.values.dtype} with {cache.scale.shape[-1]} scales for a token"
    if cache.values.shape[2] % TILE:
        return f"pages of {cache.values.shape[2]} tokens are no multiple of {TILE}"
    if kv_rank % (2 * _COLUMNS) or kv_rank > 512:
        return f"kv_rank = {kv_rank} is no multiple of {2 * _COLUMNS} up to 512"
    if cache.rope.shape[-1] != TILE:
        return f"the rope part has {cache.rope.shape[-1]} dimensions, not {TILE}"
    return None


def mla_decode(q, cache, layer, page_table, lengths, *, kv_rank, scale, multiprocessors, schedule=None):
    """See `jaxinfer.kernels.mla_decode`; `multiprocessors` is the number of thread blocks that run at a time."""
    batch, tokens, heads, dim = q.shape
    layers, pages, page_size, rope = cache.rope.shape
    shape = _Shape(
        batch=batch,
        tokens=tokens,
        heads=heads,
        rank=kv_rank,
        rope=rope,
        parts=parts.count(tokens * heads, multiprocessors),
        scale=scale * math.log2(math.e),
        dtype=cache.rope.dtype,
        values=cache.values.dtype,
    )
    q = q.reshape(batch, tokens * heads, dim)
    q = jnp.pad(q, ((0, 0), (0, shape.rows - tokens * heads), (0, 0)))
    latent = q[..., :kv_rank]
    latent, q_scale = _half_precision(latent) if shape.floats else quantize_latents(latent, 1, jnp.int8)
    tiles_per_page = page_size // TILE
    tiles = layers * pages * tiles_per_page
    operands = {
        "q": latent,
        "q_rope": q[..., kv_rank:],
        "q_scale": q_scale[..., 0] * shape.scale,
        "values": cache.values.reshape(tiles, TILE, kv_rank),
        "rope": cache.rope.reshape(tiles, TILE, rope),
        "scale": cache.scale.reshape(tiles, TILE * shape.groups),
        **parts.operands_of(shape, tiles_per_page, pages, layer, page_table, lengths, schedule),
    }
    return parts.finish(shape, operands, *_attend(shape, tiles_per_page, operands))


def _half_precision(latent):
    """Queries in float16 over a power of two for each sequence, columns in the order of `transposed.rows`."""
    latent = latent.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.maximum(jnp.max(jnp.abs(latent), axis=(1, 2), keepdims=True), 1e-30))
    scale = jnp.ldexp(jnp.float32(1), exponent - 15)
    return transposed.ordered(latent / scale).astype(jnp.float16), scale


def _attend(shape, tiles_per_page, operands):
    """Rows of the results: sequences, where they are whole, then two partial ones for every part."""
    scratch = {
        "values": parts.tiles((2, shape.stages, TILE, shape.half), shape.values),
        "rope": parts.tiles((_ROPE_STAGES, TILE, shape.rope), shape.dtype),
        "weights": parts.tiles((_ROPE_STAGES, TILE, TILE), jnp.dtype(jnp.float16)),
        "q": parts.tiles((1, shape.scores[1], shape.rank - shape.held), operands["q"].dtype),
        "q_rope": parts.tiles((shape.scores[1], shape.rope), shape.dtype),
        "scale": plgpu.SMEM((2, shape.stages, TILE * shape.groups), jnp.float32),
        "factor": plgpu.SMEM((_ROPE_STAGES, TILE), jnp.float32),
        "inverse": plgpu.SMEM((TILE,), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=2),
        "values_full": plgpu.Barrier(num_arrivals=4, num_barriers=shape.stages),
        "rope_full": plgpu.Barrier(num_barriers=_ROPE_STAGES),
        "weights_full": plgpu.Barrier(num_barriers=_ROPE_STAGES),
        "weights_empty": plgpu.Barrier(num_arrivals=2, num_barriers=_ROPE_STAGES),
        "inverse_full": plgpu.Barrier(),
        "inverse_empty": plgpu.Barrier(num_arrivals=2),
    }

    def body(operands, out, lse):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, tiles_per_page, operands, out, lse, scratch),
            scratch,
            collective_axes="wg",
        )

    results, blocks = shape.batch + 2 * shape.parts, shape.rows // TILE
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((results, blocks * shape.width, shape.rank), jnp.float32),
            jax.ShapeDtypeStruct((results, shape.rows), jnp.float32),
        ),
        grid=(blocks, shape.parts),
        grid_names=("block", "part"),
        num_threads=3,
        thread_name="wg",
        kernel_name="mla_decode_8bit",
        # Where a warp could overtake another, `commit_smem` has a barrier of the warpgroup.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Of the four warps' largest scores, each in two numbers of 32 lanes for eight heads.
            reduction_scratch_bytes=128 * shape.width if shape.turned else 0,
            unsafe_no_auto_barriers=True,
        ),
    )(operands)


def _thread_block(shape, tiles_per_page, operands, out, lse, scratch):
    warpgroup = lax.axis_index("wg")
    many = shape.width == TILE

    def scores():
        plgpu.set_max_registers(_REGISTERS[many][0], action="decrease" if many else "increase")
        _scores(shape, operands, lse, scratch)

    def values():
        plgpu.set_max_registers(_REGISTERS[many][1], action="increase" if many else "decrease")
        _values(shape, tiles_per_page, operands, out, scratch, warpgroup)

    lax.cond(warpgroup == _SCORES, scores, values)


def _slots(shape, done):
    return lax.rem(done, jnp.int32(shape.stages)), lax.rem(done, jnp.int32(_ROPE_STAGES))


def _scores(shape, operands, lse, scratch):
    """The score warpgroup: weights of the softmax, tile after tile, and the log-sum-exp of each piece."""
    first_row = lax.axis_index("block") * TILE
    heads = shape.scores[1]
    rows = pl.ds(first_row, heads)
    blocks = range(shape.rank // _COLUMNS)
    head_axis = 1 if shape.turned else 0
    by_key = shape.width < TILE
    head_layout, key_layout = (_COLUMN, _ROW) if shape.turned else (_ROW, _COLUMN)

    def per_head(value):
        return plgpu.layout_cast(jnp.full((heads,), value, jnp.float32), head_layout)

    def of_heads(array):
        return lax.broadcast_in_dim(array, shape.scores, [head_axis])

    def of_keys(array):
        return lax.broadcast_in_dim(array, shape.scores, [1 - head_axis])

    def inverse_read(finished):
        """Waits until the piece before has been scaled."""

        @pl.when(finished > 0)
        def _():
            plgpu.barrier_wait(scratch["inverse_empty"])

    def queries(sequence):
        """The blocks of columns that are held in registers, and the scales; the others are put in shared memory."""
        rest = pl.ds(shape.held, shape.rank - shape.held)
        plgpu.copy_gmem_to_smem(operands["q"].at[sequence, rows, rest], scratch["q"].at[0], scratch["q_full"])
        plgpu.copy_gmem_to_smem(operands["q_rope"].at[sequence, rows], scratch["q_rope"], scratch["q_full"])
        load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA_8BIT, optimized=False)
        held = [load(operands["q"].at[sequence, rows, pl.ds(n, _COLUMNS)]) for n in range(0, shape.held, _COLUMNS)]
        if shape.floats:
            scale = operands["q_scale"][sequence, 0]
        else:
            scale = plgpu.load(operands["q_scale"].at[sequence, rows], layout=head_layout, optimized=False)
        plgpu.barrier_wait(scratch["q_full"])
        return held, scale

    def latent_scores(held, q_scale, k_scale, slot, zero):
        """Scores without the rotated part; `k_scale(group)` gives the scales of the keys."""

        def multiply(accumulator, number):
            half, start = divmod(number * _COLUMNS, shape.half)
            keys = scratch["values"].at[half, slot, :, pl.ds(start, _COLUMNS)]
            start = number * _COLUMNS - shape.held
            if shape.floats:
                for half in range(2):
                    q = scratch["q"].at[zero, :, pl.ds(start + half * TILE, TILE)].transpose((1, 0))
                    plgpu.wgmma(accumulator, transposed.rows(keys, half), q)
            elif shape.turned:
                plgpu.wgmma(accumulator, keys, scratch["q"].at[zero, :, pl.ds(start, _COLUMNS)].transpose((1, 0)))
            else:
                q = held[number] if start < 0 else scratch["q"].at[zero, :, pl.ds(start, _COLUMNS)]
                plgpu.wgmma(accumulator, q, keys.transpose((1, 0)))

        def products(accumulators, first):
            for offset, accumulator in enumerate(accumulators):
                for number in [first + offset] if shape.floats else blocks:
                    multiply(accumulator, number)
            return [accumulator[...] for accumulator in accumulators]

        def scaled():
            at_once = min(2, shape.groups) if shape.width == 16 else 1
            for first in range(0, shape.groups, at_once):
                accumulator = plgpu.WGMMAAccumulatorRef(shape.scores, jnp.float32 if shape.floats else jnp.int32)
                found = pl.run_scoped(functools.partial(products, first=first), [accumulator] * at_once)
                for group, one in enumerate(found, first):
                    yield one.astype(jnp.float32) * of_keys(k_scale(group))

        return functools.reduce(jnp.add, scaled()) * (q_scale if shape.floats else of_heads(q_scale))

    def piece_scores(piece, state):
        done, finished = state
        held, q_scale = queries(piece.sequence)

        def tile(index, state, masked):
            done, top, total, bound = state
            slot, rope_slot = _slots(shape, done)

            def k_scale(group, layout=key_layout):
                found = _by_key(scratch["scale"].at[0, slot], group, shape.groups, layout)
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout)
                    found = jnp.where(key < piece.length - (piece.start + index) * TILE, found, 0.0)
                return found

            def products(rotated, first):
                """With the latent's scores if these are not there yet: both products at a time take more registers."""
                plgpu.barrier_wait(scratch["rope_full"].at[rope_slot])
                rope = scratch["rope"].at[rope_slot]
                left, right = (rope, scratch["q_rope"]) if shape.turned else (scratch["q_rope"], rope)
                plgpu.wgmma(rotated, left, right.transpose((1, 0)))
                scores = latent() if first is None else first
                return scores + rotated[...] * shape.scale

            def latent():
                plgpu.barrier_wait(scratch["values_full"].at[slot])
                return latent_scores(held, q_scale, k_scale, slot, jnp.minimum(done, 0))

            scores = pl.run_scoped(
                functools.partial(products, first=latent() if shape.floats else None),
                plgpu.WGMMAAccumulatorRef(shape.scores, jnp.float32),
            )
            if masked:
                scores = jnp.where(parts.seen(shape, piece, index, first_row, head_axis, heads), scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1 - head_axis))
            # A head that has seen no key yet would subtract infinity from infinity.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            weights = jnp.exp2(scores - of_heads(shift))
            factor = jnp.exp2(top - shift)
            if by_key:
                # Until the end: warps meet to add up.
                total = total * of_heads(factor) + weights
            else:
                total = total * factor + jnp.sum(weights, axis=1 - head_axis)
            if shape.floats:
                weights = weights * _LARGEST_WEIGHT
            else:
                before, bound = bound, jnp.maximum(bound, jnp.max(k_scale(0, _COLUMN)))
                factor = factor * (before / bound)
                weights = weights * of_keys(k_scale(0) * (_LARGEST_WEIGHT / bound))

            # The values are done with the tile whose weights lay there.
            @pl.when(done >= _ROPE_STAGES)
            def _():
                plgpu.barrier_wait(scratch["weights_empty"].at[rope_slot])

            target = scratch["weights"].at[rope_slot, pl.ds(0, heads)]
            if shape.turned:
                transposed.store_transposed(target, weights.astype(jnp.float16))
            else:
                target[...] = weights.astype(jnp.float16)
            scratch["factor"].at[rope_slot, pl.ds(0, heads)][...] = factor
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["weights_full"].at[rope_slot])
            return done + 1, new_top, total, bound

        total, bound = per_head(0.0), jnp.float32(_SCALE_UNIT if shape.floats else 1e-30)
        state = done, per_head(-jnp.inf), of_heads(total) if by_key else total, bound
        state = lax.fori_loop(0, piece.clear, lambda i, s: tile(i, s, False), state)
        done, top, total, bound = lax.fori_loop(piece.clear, piece.tiles, lambda i, s: tile(i, s, True), state)
        total = jnp.sum(total, axis=0) if by_key else total
        empty = total == 0.0
        divisor = jnp.where(empty, 1.0, total)
        store_some(lse.at[piece.result, rows], jnp.where(empty, -jnp.inf, top * math.log(2) + jnp.log(divisor)))

        inverse_read(finished)
        scratch["inverse"].at[pl.ds(0, heads)][...] = (bound / _LARGEST_WEIGHT) / divisor
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["inverse_full"])
        return done, finished + 1

    done, finished = parts.pieces(shape, operands, (jnp.int32(0), jnp.int32(0)), piece_scores)
    inverse_read(finished)
    for slot in range(_ROPE_STAGES):
        # What was not waited for would be missing at the next wait.
        pl.when(done > slot)(lambda slot=slot: plgpu.barrier_wait(scratch["weights_empty"].at[slot]))


def _values(shape, tiles_per_page, operands, out, scratch, warpgroup):
    """A value warpgroup: copies the tiles of its half of the columns, and adds up weights times values."""
    part, block = lax.axis_index("part"), lax.axis_index("block")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]
    first_column = pl.multiple_of(warpgroup * shape.half, _COLUMNS)
    columns = pl.ds(first_column, shape.half)

    def locate(number, sequence):
        return parts.locate(operands["values"].shape[0], tiles_per_page, operands, number, sequence)

    def copy_values(number, tile):
        """Copies this warpgroup's columns of the thread block's tile of that number, and scales, if it has so many."""
        slot = _slots(shape, number)[0]

        @pl.when(begin + number < end)
        def _():
            full = scratch["values_full"].at[slot]
            plgpu.copy_gmem_to_smem(
                operands["values"].at[tile, :, columns], scratch["values"].at[warpgroup, slot], full
            )
            plgpu.copy_gmem_to_smem(operands["scale"].at[tile], scratch["scale"].at[warpgroup, slot], full)

    def copy_rope(number, tile):
        slot = _slots(shape, number)[1]

        @pl.when(begin + number < end)
        def _():
            plgpu.copy_gmem_to_smem(operands["rope"].at[tile], scratch["rope"].at[slot], scratch["rope_full"].at[slot])

    second = warpgroup == 1
    sequence, ahead = operands["first"][part], ()
    for number in map(jnp.int32, range(shape.stages)):
        tile, sequence = locate(number, sequence)
        copy_values(number, tile)
        if len(ahead) < _ROPE_STAGES:
            pl.when(second)(functools.partial(copy_rope, number, tile))
        ahead = *ahead, tile

    width, blocks = shape.width, shape.half // TILE
    # Of few heads the output leaves registers for a whole tile, or half of it.
    early = 0 if width == TILE else blocks // 2 if width == 32 or shape.floats else blocks
    first_group = warpgroup * (shape.groups // 2)

    def piece_values(piece, state):
        def attended(accumulators):
            def values_of(slot, number, written):
                """64 columns of the tile, transposed, as a product takes them."""
                group, half = divmod(number, 2)
                found = transposed.load(
                    scratch["values"].at[warpgroup, slot, :, pl.ds(group * _COLUMNS, _COLUMNS)], half
                )
                if shape.floats:
                    scale = _by_key(scratch["scale"].at[warpgroup, slot], first_group + group, shape.groups, _COLUMN)
                    scale = (scale * (1 / _SCALE_UNIT)).astype(jnp.float16)
                    found = found * lax.broadcast_in_dim(scale, found.shape, [1])
                if written is not None:
                    found = jnp.where(lax.broadcast_in_dim(written, found.shape, [1]), found, 0)
                return found

            def rescale(number, factor):
                accumulator = accumulators[number]
                before = plgpu.wgmma_accumulator_load(accumulator, wait_n=None)
                accumulator[...] = before * lax.broadcast_in_dim(factor, (TILE, width), [1])

            def tile(index, state, masked):
                done, sequence, ahead = state
                slot, rope_slot = _slots(shape, done)
                written = None
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_COLUMN)
                    written = key < piece.length - (piece.start + index) * TILE
                plgpu.barrier_wait(scratch["values_full"].at[slot])
                widen = functools.partial(values_of, slot, written=written)
                values = [widen(number) for number in range(early)]
                # The page table is read while there is nothing to multiply yet.
                next_tile, sequence = locate(done + shape.stages, sequence)
                plgpu.barrier_wait(scratch["weights_full"].at[rope_slot])
                pl.when(second)(functools.partial(copy_rope, done + _ROPE_STAGES, ahead[0]))
                factor = plgpu.load(scratch["factor"].at[rope_slot, pl.ds(0, width)], layout=_COLUMN)
                weights = scratch["weights"].at[rope_slot, pl.ds(0, width)].transpose((1, 0))
                for number in range(blocks):
                    rescale(number, factor)
                for number in range(blocks):
                    if len(values) <= number:
                        # The same registers again.
                        plgpu.wgmma_wait(0)
                        values.append(widen(number))
                    plgpu.wgmma(accumulators[number], values[number], weights)
                plgpu.wgmma_wait(0)
                # Orders the reads of all four warps before the next copies into the stages.
                plgpu.commit_smem()
                copy_values(done + shape.stages, next_tile)
                plgpu.barrier_arrive(scratch["weights_empty"].at[rope_slot])
                return done + 1, sequence, (*ahead[1:], next_tile)

            clear = piece.clear if shape.floats else piece.tiles
            result = lax.fori_loop(0, clear, lambda i, s: tile(i, s, False), state)
            if shape.floats:
                result = lax.fori_loop(clear, piece.tiles, lambda i, s: tile(i, s, True), result)
            plgpu.barrier_wait(scratch["inverse_full"])
            inverse = plgpu.load(scratch["inverse"].at[pl.ds(0, width)], layout=_COLUMN)
            for number in range(blocks):
                rescale(number, inverse)
                start = first_column + number // 2 * _COLUMNS
                target = out.at[piece.result, pl.ds(block * width, width), pl.ds(start, _COLUMNS)]
                transposed.store(target, number % 2, accumulators[number][...])
            plgpu.barrier_arrive(scratch["inverse_empty"])
            return result

        return pl.run_scoped(attended, [plgpu.WGMMAAccumulatorRef((TILE, width), jnp.float32)] * blocks)

    parts.pieces(shape, operands, (jnp.int32(0), sequence, ahead[_ROPE_STAGES:]), piece_values)


def _by_key(scales, group, groups, layout):
    """The scales `[keys]` of a group, from `[keys x groups]` in shared memory."""
    if groups == 1 and layout == _COLUMN:
        return plgpu.load(scales, layout=layout)
    return transposed.strided(scales, jnp.int32(group), groups, layout)
