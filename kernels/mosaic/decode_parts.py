"""What the decode kernels share: how their work is cut into parts, and how partial results become one.

The key tiles of all sequences are laid end to end, and the line is cut on the device (the schedule of FlashMLA and
FlashInfer).  A part has pieces of one or several sequences.  A sequence that is cut leaves partial results, which a
small kernel merges by log-sum-exp.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE = 64
"""Keys of a tile; also rows of a thread block, as a warpgroup's matrix product has them."""
_LOADS = 8
"""Partial results that a thread block of the merge reads at a time."""


@dataclasses.dataclass(frozen=True)
class Shape:
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


def schedule(lengths: jax.Array, parts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the line of all sequences' tiles into parts of about equal length.

    Between sequences, if that makes no part longer by more than a sixteenth; else evenly, but never just beside a
    sequence's end.

    Args:
        lengths: int32 `[B]`, keys of each sequence.  One without keys gets a tile that is masked throughout.

    Returns: int32 `[B + 1]`, the tile of the line where each sequence begins; int32 `[parts + 1]`, where each part
    begins; int32 `[parts]`, the sequence that part begins in (of an empty part at the end of the line, the last).
    """
    batch = lengths.shape[0]
    tiles = jnp.maximum(1, (lengths + TILE - 1) // TILE)
    # Sums over all pairs: small arrays, where every kernel less counts.
    begins = jnp.sum(jnp.where(jnp.arange(batch) < jnp.arange(batch + 1)[:, None], tiles, 0), axis=1, dtype=jnp.int32)
    total = begins[-1]
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    even = part * (total // parts) + jnp.minimum(part, total % parts)
    before = jnp.max(jnp.where(begins <= even[:, None], begins, 0), axis=1)
    after = jnp.min(jnp.where(begins >= even[:, None], begins, total), axis=1)
    nearest = jnp.where(even - before <= after - even, before, after)
    between = jnp.max(jnp.diff(nearest)) * 16 <= -(-total // parts) * 17
    beside = jnp.abs(even - nearest) * 16 <= total // parts
    cuts = jnp.where(between | beside, nearest, even)
    first = jnp.sum(begins[1:] <= cuts[:-1, None], axis=1, dtype=jnp.int32)
    return begins, cuts, jnp.minimum(first, batch - 1)


@dataclasses.dataclass(frozen=True)
class Piece:
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


def pieces(shape, operands, init, function):
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
        piece = Piece(
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


def seen(shape, piece, index, first_row):
    """Which keys of the tile each row may see, from that row of the sequence on: those up to its own token's."""
    layout = plgpu.Layout.WGMMA
    key = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=layout)
    limit = piece.length - (piece.start + index) * TILE
    if shape.tokens == 1:
        return key < limit
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=layout) + first_row
    token = jnp.minimum(lax.div(row, jnp.int32(shape.heads)), shape.tokens - 1)
    return key < limit - (shape.tokens - 1) + token


def locate(tiles, tiles_per_page, operands, number, sequence):
    """Where in the cache of so many tiles the part's tile of that number lies, of a number too high the last one.

    Returns also its sequence, which is the given one, that of the tile before, or the next.
    """
    part = lax.axis_index("part")
    begin, end = operands["cuts"][part], operands["cuts"][part + 1]
    position = jnp.minimum(begin + number, end - 1)
    sequence = jnp.where(position >= operands["begins"][sequence + 1], sequence + 1, sequence)
    index = position - operands["begins"][sequence]
    page = operands["page_table"][sequence, lax.div(index, jnp.int32(tiles_per_page))]
    tile = operands["layer_tile"][0] + page * tiles_per_page + lax.rem(index, jnp.int32(tiles_per_page))
    return jnp.clip(tile, 0, tiles - 1), sequence


def tiles(shape, dtype, row_bytes=128):
    """Shared memory for operands of products, so many bytes of a row side by side."""
    tiling = plgpu.TilingTransform((8, row_bytes // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def merge(shape, operands, out, lse):
    """Merges the partial results of each sequence that was cut, in place."""
    # Few parts have few pieces to merge, of many rows.
    rows_at_a_time = 1 if shape.rows == TILE else 4
    pieces_at_a_time = _LOADS // rows_at_a_time

    def body(operands, out, lse):
        cut = lax.axis_index("cut") + 1
        rows = [lax.axis_index("rows") * rows_at_a_time + row for row in range(rows_at_a_time)]
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
                    for offset in range(pieces_at_a_time):
                        state = function(number * pieces_at_a_time + offset, state)
                    return state

                return lax.fori_loop(0, lax.div(pieces + pieces_at_a_time - 1, pieces_at_a_time), step, init)

            def largest(index, tops):
                piece = result(index)
                return tuple(jnp.maximum(top, lse[piece, row]) for top, row in zip(tops, rows, strict=True))

            tops = chunk(largest, (jnp.float32(-jnp.inf),) * rows_at_a_time)
            shifts = tuple(jnp.where(top == -jnp.inf, 0.0, top) for top in tops)

            def add(index, state):
                piece = result(index)

                def of_row(row, shift, total, merged):
                    weight = jnp.where(index < pieces, jnp.exp(lse[piece, row] - shift), 0.0)
                    return total + weight, merged + weight * out[piece, row]

                return tuple(of_row(row, shift, *one) for row, shift, one in zip(rows, shifts, state, strict=True))

            init = ((jnp.float32(0), jnp.zeros((shape.rank,), jnp.float32)),) * rows_at_a_time
            for row, shift, (total, merged) in zip(rows, shifts, chunk(add, init), strict=True):
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
        grid=(-(-shape.tokens * shape.heads // rows_at_a_time), shape.parts - 1),
        grid_names=("rows", "cut"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
    )(operands, out, lse)
    return jax.freeze(out), jax.freeze(lse)
