"""What the decode kernels share: how their work is cut into parts, and how partial results become one.

The key tiles of all sequences are laid end to end, and the line is cut on the device (the schedule of FlashMLA and
FlashInfer).  A part has pieces of one or several sequences.  A sequence that is cut leaves partial results, which a
small kernel merges by log-sum-exp.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE = 64
"""Keys of a tile; also rows of a thread block, as a warpgroup's matrix product has them."""
_START = 6
"""Tiles that the beginning of a sequence takes as long as: of 16 heads in bfloat16 a tile is 2.1 us, a beginning 13."""
_LOADS = 16
"""Partial results that a thread block of the merge reads at a time.  With 32, of 128 columns each for four times as
many blocks, one sequence in 100 parts took 13 us instead of 16, but 16 sequences in nine parts 7.4 instead of 4.5."""
_MERGERS = 512
"""Thread blocks of the merge, about."""


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


def count(rows: int, multiprocessors: int) -> int:
    """Into how many parts the line is cut for so many rows of a sequence: thread blocks run all at a time."""
    return max(1, multiprocessors // -(-rows // TILE))


class Schedule(NamedTuple):
    """How the line of all sequences' tiles is cut: the same for all layers of a step."""

    begins: jax.Array
    """int32 `[B + 1]`, the tile of the line where each sequence begins."""
    cuts: jax.Array
    """int32 `[parts + 1]`, where each part begins."""
    first: jax.Array
    """int32 `[parts]`, the sequence that part begins in (of an empty part at the end of the line, the last)."""
    merged: jax.Array
    """int32 `[parts + 1]`: how many sequences are cut, then of each the first part that begins inside of it."""
    pieces: jax.Array
    """int32 `[parts]`, how many pieces each of these sequences is cut into."""


def schedule(lengths: jax.Array, parts: int) -> Schedule:
    """Cuts the line of all sequences' tiles into parts that take about equally long.

    A sequence that begins inside of a part takes as long as some tiles more (`_START`).  Cuts are between sequences, if
    that makes no part longer by more than a sixteenth; else even, but never just beside a sequence's end.

    Args:
        lengths: int32 `[B]`, keys of each sequence.  One without keys gets a tile that is masked throughout.
    """
    batch = lengths.shape[0]
    tiles = jnp.maximum(1, (lengths + TILE - 1) // TILE)
    starts = jnp.where(jnp.arange(batch) > 0, _START, 0)
    # Sums over all pairs: small arrays, where every kernel less counts.
    earlier = jnp.arange(batch) < jnp.arange(batch + 1)[:, None]
    begins = jnp.sum(jnp.where(earlier, tiles, 0), axis=1, dtype=jnp.int32)
    times = jnp.sum(jnp.where(earlier, tiles + starts, 0), axis=1, dtype=jnp.int32)
    total = times[-1]
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    even = part * (total // parts) + jnp.minimum(part, total % parts)
    before = jnp.max(jnp.where(times <= even[:, None], times, 0), axis=1)
    after = jnp.min(jnp.where(times >= even[:, None], times, total), axis=1)
    nearest = jnp.where(even - before <= after - even, before, after)
    between = jnp.max(jnp.diff(nearest)) * 16 <= -(-total // parts) * 17
    beside = jnp.abs(even - nearest) * 16 <= total // parts
    cuts = jnp.where(between | beside, nearest, even)
    # From times to tiles: what is cut within the start of a sequence is cut before it.
    sequence = jnp.sum(times[1:] <= cuts[:, None], axis=1, dtype=jnp.int32)
    late = cuts - times[sequence] - jnp.where(sequence > 0, _START, 0)
    cuts = begins[sequence] + jnp.maximum(late, 0)
    first = jnp.minimum(jnp.sum(begins[1:] <= cuts[:-1, None], axis=1, dtype=jnp.int32), batch - 1)
    begin = begins[first]
    before = jnp.concatenate((jnp.zeros((1,), jnp.int32), cuts[:-2]))
    # The first cut inside a sequence merges all of it.
    merging = (begin < cuts[:-1]) & (cuts[:-1] < begins[first + 1]) & (before <= begin)
    order = jnp.sum(merging[:, None] & (part[:-1, None] <= part[:-1]), axis=0, dtype=jnp.int32)
    merged = jnp.sum(jnp.where(merging & (order == part[1:, None]), part[:-1], 0), axis=1, dtype=jnp.int32)
    inside = (part >= merged[:, None]) & (cuts < begins[first[merged] + 1][:, None])
    pieces = 1 + jnp.sum(inside, axis=1, dtype=jnp.int32)
    return Schedule(begins, cuts, first, jnp.concatenate((order[-1:], merged)), pieces)


def operands_of(shape, tiles_per_page, pages, layer, page_table, lengths, given):
    """What every kernel of decode is told of its work."""
    if given is None:
        given = schedule(lengths, shape.parts)
    if given.first.shape[0] != shape.parts:
        raise ValueError(f"expected a schedule of {shape.parts} parts, got {given.first.shape[0]}")
    return {
        "layer_tile": (layer * (pages * tiles_per_page))[None],
        "page_table": page_table,
        "lengths": lengths,
        **given._asdict(),
    }


def finish(shape, operands, out, lse):
    """The results `[B, T, H, rank]` and `[B, T, H]` of the sequences from the kernel's."""
    out, lse = merge(shape, operands, out, lse)
    rows = shape.tokens * shape.heads
    out, lse = out[: shape.batch, :rows], lse[: shape.batch, :rows]
    lead = shape.batch, shape.tokens, shape.heads
    return out.reshape(*lead, shape.rank), lse.reshape(lead)


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


def seen(shape, piece, index, first_row, row_axis=0, rows=TILE):
    """Which keys of the tile each row may see, from that row of the sequence on: those up to its own token's.

    So many rows along one axis, keys along the other.
    """
    sizes = (rows, TILE) if row_axis == 0 else (TILE, rows)
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, sizes, layout=plgpu.Layout.WGMMA)
    key = iota(1 - row_axis)
    limit = piece.length - (piece.start + index) * TILE
    if shape.tokens == 1:
        return key < limit
    token = jnp.minimum(lax.div(iota(row_axis) + first_row, jnp.int32(shape.heads)), shape.tokens - 1)
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
    if shape.parts == 1:
        return out, lse
    rows = shape.tokens * shape.heads
    turns = max(1, _MERGERS // rows)

    def body(operands, out, lse):
        row = lax.axis_index("row")

        def merge_sequence(number):
            cut, pieces = operands["merged"][number + 1], operands["pieces"][number]
            sequence = operands["first"][cut]

            def chunk(number, state):
                """So many pieces, read at once; the weights are relative to the largest log-sum-exp so far."""
                top, total, merged = state
                found = []
                for offset in range(_LOADS):
                    index = number * _LOADS + offset
                    last = jnp.minimum(index, pieces - 1)
                    piece = shape.batch + 2 * (cut - 1 + last) + jnp.where(last == 0, 1, 0)
                    found.append((jnp.where(index < pieces, lse[piece, row], -jnp.inf), out[piece, row]))
                new_top = functools.reduce(jnp.maximum, (one for one, _ in found), top)
                shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                factor = jnp.exp(top - shift)
                total, merged = total * factor, merged * factor
                for one, rows in found:
                    weight = jnp.exp(one - shift)
                    total, merged = total + weight, merged + weight * rows
                return new_top, total, merged

            init = jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros((shape.rank,), jnp.float32)
            top, total, merged = lax.fori_loop(0, lax.div(pieces + _LOADS - 1, _LOADS), chunk, init)
            empty = total == 0.0
            divisor = jnp.where(empty, 1.0, total)
            out[sequence, row] = merged / divisor
            lse[sequence, row] = jnp.where(empty, -jnp.inf, top + jnp.log(divisor))

        def turn(number):
            merge_sequence(number)
            return number + turns

        lax.while_loop(lambda number: number < operands["merged"][0], turn, lax.axis_index("turn"))

    out, lse = jax.new_ref(out), jax.new_ref(lse)
    operands = {name: operands[name] for name in ("first", "merged", "pieces")}
    plgpu.kernel(
        body,
        grid=(rows, turns),
        grid_names=("row", "turn"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
    )(operands, out, lse)
    return jax.freeze(out), jax.freeze(lse)
