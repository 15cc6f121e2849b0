"""`mla_decode` for Hopper through Pallas Mosaic GPU.

A persistent grid; each thread block attends 64 rows (heads, or heads of several tokens) to a stretch of the line of
all sequences' key tiles, laid end to end and cut into equal parts on the device (the schedule of FlashMLA and
FlashInfer).  A sequence that is cut leaves partial results, which a second small kernel merges by log-sum-exp.

Three warpgroups.  One holds the queries in registers, computes scores and softmax, and hands the weights through
shared memory to the other two, which hold the output, half of its columns each.  A tile of keys lies in shared memory
once: read along its rows it is K, along its columns V; its rope part, which is K only, makes room for the weights.  The
two value warpgroups copy the next tiles themselves, since they are the last to read one: no warpgroup is spent on
copying, and its registers hold the queries.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE = 64
"""Keys of a tile; also rows of a thread block, as a warpgroup's matrix product has them."""
_STAGES = 3
_ROPE_STAGES = 2
_SCORE_REGISTERS = 184
_VALUE_REGISTERS = 160
_SCORES = 2
_UNROLL = 8


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the kernels are compiled for."""

    batch: int
    tokens: int
    heads: int
    rank: int
    rope: int
    parts: int
    scale: float
    dtype: jnp.dtype

    @property
    def rows(self) -> int:
        """Rows of a sequence, padded to whole blocks."""
        return -(-self.tokens * self.heads // TILE) * TILE

    @property
    def half(self) -> int:
        return self.rank // 2


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


def schedule(lengths: jax.Array, parts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the line of all sequences' tiles into parts of equal length, but never just beside a sequence's end.

    Args:
        lengths: int32 `[B]`, keys of each sequence.  One without keys gets a tile that is masked throughout.

    Returns: int32 `[B + 1]`, the tile of the line where each sequence begins; int32 `[parts + 1]`, where each part
    begins; int32 `[parts]`, the sequence that part begins in (of an empty part at the end of the line, the last).
    """
    tiles = jnp.maximum(1, (lengths + TILE - 1) // TILE)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    begins = jnp.concatenate((jnp.zeros(1, jnp.int32), ends))
    total = ends[-1]
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    even = part * (total // parts) + jnp.minimum(part, total % parts)
    distance = jnp.abs(even[:, None] - begins[None])
    nearest = jnp.argmin(distance, axis=1)
    cuts = jnp.where(jnp.min(distance, axis=1) * 16 <= total // parts, begins[nearest], even)
    first = jnp.sum(ends[None] <= cuts[:-1, None], axis=1, dtype=jnp.int32)
    return begins, cuts, jnp.minimum(first, lengths.shape[0] - 1)


def mla_decode(q, cache, layer, page_table, lengths, *, kv_rank, scale, multiprocessors):
    """See `jaxinfer.kernels.mla_decode`; `multiprocessors` is the number of thread blocks that run at a time."""
    batch, tokens, heads, dim = q.shape
    layers, pages, page_size, _ = cache.shape
    shape = _Shape(
        batch=batch,
        tokens=tokens,
        heads=heads,
        rank=kv_rank,
        rope=dim - kv_rank,
        parts=1,
        scale=scale * math.log2(math.e),
        dtype=cache.dtype,
    )
    blocks = shape.rows // TILE
    shape = dataclasses.replace(shape, parts=max(1, multiprocessors // blocks))
    begins, cuts, first = schedule(lengths, shape.parts)
    q = q.reshape(batch, tokens * heads, dim)
    operands = {
        "q": jnp.pad(q, ((0, 0), (0, shape.rows - tokens * heads), (0, 0))),
        "cache": cache.reshape(layers * pages * (page_size // TILE), TILE, dim),
        "layer_tile": (layer * (pages * (page_size // TILE)))[None],
        "page_table": page_table,
        "lengths": lengths,
        "begins": begins,
        "cuts": cuts,
        "first": first,
    }
    out, lse = _attend(shape, page_size // TILE, operands)
    out, lse = _merge(shape, operands, out, lse)
    out, lse = out[:batch, : tokens * heads], lse[:batch, : tokens * heads]
    return out.reshape(batch, tokens, heads, kv_rank), lse.reshape(batch, tokens, heads)


def _attend(shape, tiles_per_page, operands):
    """Rows of the results: sequences, where they are whole, then two partial ones for every part."""
    scratch = {
        "values": _tiles((2, _STAGES, TILE, shape.half), shape.dtype),
        "rope": _tiles((_ROPE_STAGES, TILE, shape.rope), shape.dtype),
        "q": _tiles((TILE, TILE + shape.rope), shape.dtype),
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
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(operands)


def _tiles(shape, dtype):
    columns = 128 // dtype.itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


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


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The part of a sequence that a thread block attends to."""

    sequence: jax.Array
    start: jax.Array
    """First tile of the piece, counted in the sequence."""
    tiles: jax.Array
    clear: jax.Array
    """How many of the tiles, from the first, are seen whole by all rows."""
    result: jax.Array
    """The row of the results where this piece belongs."""
    length: jax.Array


def _pieces(shape, operands, init, function):
    """Calls `function(piece, state)` for the pieces of this thread block in order."""
    part = lax.axis_index("part")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]

    def condition(state):
        return (begin < end) & (operands["begins"][state[0]] < end)

    def step(sequence, state):
        first, last = operands["begins"][sequence], operands["begins"][sequence + 1]
        start, stop = jnp.maximum(begin, first), jnp.minimum(end, last)
        whole = (start == first) & (stop == last)
        partial = shape.batch + 2 * part + jnp.where(start == first, 1, 0)
        length = operands["lengths"][sequence]
        clear = lax.div(jnp.maximum(length - (shape.tokens - 1), 0), TILE) - (start - first)
        piece = _Piece(
            sequence=sequence,
            start=start - first,
            tiles=stop - start,
            clear=jnp.clip(clear, 0, stop - start),
            result=jnp.where(whole, sequence, partial),
            length=length,
        )
        return function(piece, state)

    def body(state):
        return state[0] + 1, step(state[0], state[1])

    return lax.while_loop(condition, body, (operands["first"][part], init))[1]


def _scores(shape, operands, lse, scratch):
    """The score warpgroup: weights of the softmax, tile after tile, and the log-sum-exp of each piece."""
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)
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
                scores = jnp.where(_seen(shape, piece, index), scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1) * shape.scale)
            # A row that has seen no key yet would subtract infinity from infinity.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
            weights = jnp.exp2(scores * shape.scale - lax.broadcast_in_dim(shift, scores.shape, [0]))
            factor = jnp.exp2(top - shift)
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

    _, finished = _pieces(shape, operands, (jnp.int32(0), jnp.int32(0)), piece_scores)
    inverse_read(finished)


def _slots(done):
    return lax.rem(done, jnp.int32(_STAGES)), lax.rem(done, jnp.int32(_ROPE_STAGES))


def _seen(shape, piece, index):
    """Which keys of the tile each row may see: those up to its own token's."""
    layout = plgpu.Layout.WGMMA
    key = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=layout)
    limit = piece.length - (piece.start + index) * TILE
    if shape.tokens == 1:
        return key < limit
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=layout) + lax.axis_index("block") * TILE
    token = jnp.minimum(lax.div(row, jnp.int32(shape.heads)), shape.tokens - 1)
    return key < limit - (shape.tokens - 1) + token


def _values(shape, tiles_per_page, operands, out, scratch, warpgroup):
    """A value warpgroup: copies the tiles of its half of the columns, and adds up weights times values."""
    part = lax.axis_index("part")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]
    columns = pl.ds(pl.multiple_of(warpgroup * shape.half, TILE), shape.half)
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)

    def source(position, sequence):
        """Where the tile at a position of the line lies in the cache, and its sequence: the given one or the next."""
        sequence = jnp.where(position >= operands["begins"][sequence + 1], sequence + 1, sequence)
        index = position - operands["begins"][sequence]
        page = operands["page_table"][sequence, lax.div(index, jnp.int32(tiles_per_page))]
        tile = operands["layer_tile"][0] + page * tiles_per_page + lax.rem(index, jnp.int32(tiles_per_page))
        return jnp.clip(tile, 0, operands["cache"].shape[0] - 1), sequence

    def copy_values(number, sequence):
        """Copies this warpgroup's columns of the thread block's tile of that number, if it has so many."""
        tile, sequence = source(jnp.minimum(begin + number, end - 1), sequence)
        slot = _slots(number)[0]

        @pl.when(begin + number < end)
        def _():
            target = scratch["values"].at[warpgroup, slot]
            plgpu.copy_gmem_to_smem(operands["cache"].at[tile, :, columns], target, scratch["values_full"].at[slot])

        return sequence

    def copy_rope(number, sequence):
        tile, sequence = source(jnp.minimum(begin + number, end - 1), sequence)
        slot = _slots(number)[1]

        @pl.when(begin + number < end)
        def _():
            rope = operands["cache"].at[tile, :, pl.ds(shape.rank, shape.rope)]
            plgpu.copy_gmem_to_smem(rope, scratch["rope"].at[slot], scratch["rope_full"].at[slot])

        return sequence

    second = warpgroup == 1
    of_values = of_rope = operands["first"][part]
    for number in range(_STAGES):
        of_values = copy_values(jnp.int32(number), of_values)
    for number in range(_ROPE_STAGES):
        of_rope = lax.cond(second, copy_rope, lambda number, sequence: sequence, jnp.int32(number), of_rope)

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

            def tile(index, state, masked):
                done, of_values, of_rope = state
                slot, rope_slot = _slots(done)
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
                of_values = copy_values(done + _STAGES, of_values)
                of_rope = lax.cond(second, refill_rope, leave_rope, done, rope_slot, of_rope)
                return done + 1, of_values, of_rope

            result = lax.fori_loop(0, piece.clear, lambda i, s: tile(i, s, False), state)
            result = lax.fori_loop(piece.clear, piece.tiles, lambda i, s: tile(i, s, True), result)
            plgpu.barrier_wait(scratch["inverse_full"])
            out.at[piece.result, rows, columns][...] = scaled(scratch["inverse"])
            plgpu.barrier_arrive(scratch["inverse_empty"])
            return result

        return pl.run_scoped(attended, plgpu.WGMMAAccumulatorRef((TILE, shape.half), jnp.float32))

    _pieces(shape, operands, (jnp.int32(0), of_values, of_rope), piece_values)


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


def _merge(shape, operands, out, lse):
    """Merges the partial results of each sequence that was cut, in place."""

    def body(operands, out, lse):
        cut = lax.axis_index("cut") + 1
        row = lax.axis_index("row")
        position = operands["cuts"][cut]
        sequence = operands["first"][cut]
        begin, end = operands["begins"][sequence], operands["begins"][sequence + 1]

        # The first cut inside a sequence merges all of it.
        @pl.when((begin < position) & (position < end) & (operands["cuts"][cut - 1] <= begin))
        def _():
            def count(state):
                return operands["cuts"][state] < end

            last = lax.while_loop(count, lambda index: index + 1, cut)
            pieces = last - cut + 1

            def result(index):
                index = jnp.minimum(index, pieces - 1)
                return shape.batch + 2 * (cut - 1 + index) + jnp.where(index == 0, 1, 0)

            def chunk(function, init):
                def step(number, state):
                    for offset in range(_UNROLL):
                        state = function(number * _UNROLL + offset, state)
                    return state

                return lax.fori_loop(0, lax.div(pieces + _UNROLL - 1, _UNROLL), step, init)

            def largest(index, top):
                return jnp.maximum(top, lse[result(index), row])

            top = chunk(largest, jnp.float32(-jnp.inf))
            shift = jnp.where(top == -jnp.inf, 0.0, top)

            def add(index, state):
                total, merged = state
                piece = result(index)
                weight = jnp.where(index < pieces, jnp.exp(lse[piece, row] - shift), 0.0)
                return total + weight, merged + weight * out[piece, row]

            total, merged = chunk(add, (jnp.float32(0), jnp.zeros((shape.rank,), jnp.float32)))
            empty = total == 0.0
            divisor = jnp.where(empty, 1.0, total)
            out[sequence, row] = merged / divisor
            lse[sequence, row] = jnp.where(empty, -jnp.inf, shift + jnp.log(divisor))

    if shape.parts == 1:
        return out, lse
    out, lse = jax.new_ref(out), jax.new_ref(lse)
    operands = {name: operands[name] for name in ("begins", "cuts", "first")}
    plgpu.kernel(
        body,
        grid=(shape.tokens * shape.heads, shape.parts - 1),
        grid_names=("row", "cut"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
    )(operands, out, lse)
    return jax.freeze(out), jax.freeze(lse)
