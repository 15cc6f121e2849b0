"""From a scheduled step to the arrays its programs take.  Numpy only."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxinfer.configs.attention import DENSE, Dense, Hybrid
from jaxinfer.engine.anchors import Anchors
from jaxinfer.engine.request import Sequence
from jaxinfer.engine.sampling import LogitRules, SamplingRows
from jaxinfer.engine.sparse_batching import SparseBatcher
from jaxinfer.engine.step import Capacity, PrefillSegment
from jaxinfer.model.batch import DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class Rows:
    """Where rows of a prefill's output lie, int32 `[R, W]` each; index -1: no row."""

    rank: np.ndarray
    index: np.ndarray


@dataclass(frozen=True)
class Packed:
    """A prefill step as arrays, and where each token of each segment went."""

    batch: PrefillBatch
    places: list[list[tuple[np.ndarray, np.ndarray]]]
    """By replica and segment: (rank, index) of the segment's tokens, in order."""


def bucket(size: int, buckets: Items[int]) -> int:
    """The smallest bucket that holds `size`.  Raises ValueError if none does."""
    fitting = [candidate for candidate in buckets if candidate >= size]
    if not fitting:
        raise ValueError(f"expected at most {max(buckets)} rows, got {size}")
    return min(fitting)


def geometric(largest: int, smallest: int, ratio: int) -> tuple[int, ...]:
    """Bucket sizes from `largest` down by `ratio` to about `smallest`, ascending."""
    sizes = [largest]
    while sizes[-1] // ratio >= smallest:
        sizes.append(sizes[-1] // ratio)
    return tuple(reversed(sizes))


class Batcher:
    """Builds batches for one engine: its capacity, its buckets and the tiles its attention reads context in."""

    def __init__(
        self, capacity: Capacity, tile_tokens: int, policy: Dense | Hybrid = DENSE, anchors: Anchors | None = None
    ):
        """`anchors` finds those of a hybrid policy."""
        layout = capacity.layout
        self.capacity = capacity
        self.prefill_buckets = geometric(capacity.chunk_size, min(32, capacity.chunk_size), 8)
        self.decode_buckets = tuple(sorted({1, *geometric(capacity.max_num_seqs, 4, 4)}))
        self.tile_pages = max(1, min(tile_tokens // layout.page_size, capacity.pages_per_rank))
        self.max_tiles = (capacity.pages_per_rank + capacity.max_segments) // self.tile_pages + capacity.max_segments
        self.table_pages = layout.pages_needed(capacity.max_context, 0, 0)
        self._sparse = None
        if isinstance(policy, Hybrid):
            assert anchors is not None
            self._sparse = SparseBatcher(capacity, policy, anchors, self.tile_pages)
            self.table_pages = self._sparse.table_pages

    def prefill(self, segments: list[list[PrefillSegment]], tokens: int | None = None) -> Packed:
        """The batch of a prefill step; `tokens` per rank name its bucket, else the smallest that fits."""
        layout, cp, replicas = self.capacity.layout, self.capacity.layout.cp, self.capacity.replicas
        places = [self._places(group) for group in segments]
        most = max((int(index.max(initial=-1)) + 1 for group in places for _, index in group), default=1)
        shape = (replicas, cp, tokens or bucket(most, self.prefill_buckets))
        ids, offset = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        position, segment = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        page = np.full(shape, self.capacity.pages_per_rank, np.int32)
        homes = np.zeros((replicas, self.capacity.max_segments), np.int32)
        for r, group in enumerate(segments):
            for s, item in enumerate(group):
                rank, index = places[r][s]
                where = r, rank, index
                positions = np.arange(item.start, item.start + item.count)
                table = self._table(item.sequence, item.start + item.count)
                local = layout.local_index(positions)
                ids[where] = item.sequence.token_ids[item.start : item.start + item.count]
                position[where], segment[where] = positions, s
                page[where], offset[where] = table[rank, local // layout.page_size], local % layout.page_size
                homes[r, s] = item.sequence.home
        batch = PrefillBatch(
            tokens=ids,
            positions=position,
            segments=segment,
            write_page=page,
            write_offset=offset,
            homes=homes,
            sparse=None if self._sparse is None else self._sparse.prefill(segments, position, segment),
            **self._tiles(segments),
        )
        return Packed(batch, places)

    def _tiles(self, segments: list[list[PrefillSegment]]) -> dict[str, Any]:
        """The fields of a prefill batch that name the context that is read whole.

        First of what is read whole in every layer; then, if some layers are dense among sparse ones, of the rest.
        """
        capacity, sparse = self.capacity, self._sparse
        pages = np.zeros((capacity.replicas, capacity.layout.cp, self.max_tiles, self.tile_pages), np.int32)
        # A replica whose tiles are used up takes part in the others': nobody's tiles, which no token reads.
        segment = np.full((capacity.replicas, self.max_tiles), -1, np.int32)
        start = np.zeros((capacity.replicas, self.max_tiles), np.int32)
        dense, every = 0, 0
        for r, group in enumerate(segments):
            first, rest = [], []
            for s, item in enumerate(group):
                tiles = self._table(item.sequence, item.end).reshape(capacity.layout.cp, -1, self.tile_pages)
                read = item.end if sparse is None else sparse.dense_tokens(item)
                count = self._table(item.sequence, read).shape[1] // self.tile_pages
                places = [(s, number, tiles[:, number]) for number in range(tiles.shape[1])]
                first += places[:count]
                rest += places[count:] if sparse is not None and sparse.has_dense_layers else []
            for n, (s, number, own) in enumerate(first + rest):
                pages[r, :, n], segment[r, n] = own, s
                start[r, n] = number * self.tile_pages * capacity.layout.page_size
            dense, every = max(dense, len(first)), max(every, len(first) + len(rest))
        return {
            "tile_pages": pages,
            "tile_segment": segment,
            "tile_start": start,
            "num_tiles": np.int32(every),
            "num_dense_tiles": np.int32(dense),
        }

    def decode(self, sequences: list[list[Sequence]], rows: int | None = None) -> DecodeBatch:
        """The batch of a decode step: the last token of each sequence; `rows` names its bucket."""
        layout, cp, replicas = self.capacity.layout, self.capacity.layout.cp, self.capacity.replicas
        size = rows or bucket(max(map(len, sequences)), self.decode_buckets)
        ids, home = np.zeros((replicas, size), np.int32), np.zeros((replicas, size), np.int32)
        position = np.full((replicas, size), -1, np.int32)
        table = np.zeros((replicas, cp, size, self.table_pages), np.int32)
        page = np.full((replicas, cp, size), self.capacity.pages_per_rank, np.int32)
        offset = np.zeros((replicas, cp, size), np.int32)
        for r, group in enumerate(sequences):
            for b, sequence in enumerate(group):
                last = len(sequence.token_ids) - 1
                ids[r, b], position[r, b], home[r, b] = sequence.token_ids[last], last, sequence.home
                for rank, pages in enumerate(sequence.pages):
                    table[r, rank, b, : len(pages)] = pages
                rank, local = layout.rank(last, sequence.home), layout.local_index(last)
                page[r, rank, b] = sequence.pages[rank][local // layout.page_size]
                offset[r, rank, b] = local % layout.page_size
        return DecodeBatch(
            tokens=ids,
            positions=position,
            homes=home,
            page_table=table,
            write_page=page,
            write_offset=offset,
            sparse=None if self._sparse is None else self._sparse.decode(sequences, size),
        )

    def rows(self, places: list[list[tuple[int, int]]]) -> Rows:
        """The rows of a prefill's output whose logits are wanted, by replica: (rank, index)."""
        shape = self.capacity.replicas, self.capacity.max_segments
        rank, index = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for r, group in enumerate(places):
            for w, (at_rank, at_index) in enumerate(group):
                rank[r, w], index[r, w] = at_rank, at_index
        return Rows(rank, index)

    def _places(self, group: list[PrefillSegment]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(rank, index) of each token: its rank by the layout, and the next free place of the rank's chunk."""
        layout, taken, places = self.capacity.layout, np.zeros(self.capacity.layout.cp, np.int64), []
        for item in group:
            rank = layout.rank(np.arange(item.start, item.start + item.count), item.sequence.home)
            index = np.zeros(item.count, np.int64)
            for at_rank in range(layout.cp):
                here = rank == at_rank
                index[here] = taken[at_rank] + np.arange(here.sum())
                taken[at_rank] += here.sum()
            places.append((rank, index))
        return places

    def _table(self, sequence: Sequence, length: int) -> np.ndarray:
        """The sequence's pages for its first `length` tokens, `[cp, n]`, n padded to whole tiles."""
        layout = self.capacity.layout
        needed = [layout.pages_needed(length, rank, sequence.home) for rank in range(layout.cp)]
        table = np.zeros((layout.cp, -(-max(needed) // self.tile_pages) * self.tile_pages), np.int32)
        for rank, count in enumerate(needed):
            table[rank, :count] = sequence.pages[rank][:count]
        return table


def sampling_rows(sequences: list[list[Sequence | None]], width: int) -> SamplingRows:
    """Sampling parameters `[R, width]`; rows without a sequence are greedy."""
    shape = len(sequences), width
    arrays = {f.name: np.full(shape, f.metadata["default"], f.metadata["dtype"]) for f in fields(SamplingRows)}
    for r, group in enumerate(sequences):
        for n, sequence in enumerate(group):
            if sequence is None:
                continue
            params = sequence.request.params
            for name in ("temperature", "top_p", "min_p"):
                arrays[name][r, n] = getattr(params, name)
            arrays["top_k"][r, n] = max(params.top_k, 0)
            arrays["seed"][r, n] = sequence.seed
            arrays["index"][r, n] = sequence.num_output
    return SamplingRows(**arrays)


def needs_rules(sequence: Sequence) -> bool:
    """Whether a sequence's next token takes the program with logit rules and log-probabilities."""
    params = sequence.request.params
    return bool(
        params.logprobs is not None
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or sequence.num_output < params.min_tokens
    )


def logit_rules(sequences: list[list[Sequence | None]], width: int, vocab: int, eos_ids: Items[int]) -> LogitRules:
    """Logit rules `[R, width]`, of no effect for rows without a sequence."""
    shape = len(sequences), width
    presence, frequency = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    repetition, bias = np.ones(shape, np.float32), np.zeros((*shape, vocab), np.float32)
    history = np.zeros((*shape, vocab), np.int32)
    for r, group in enumerate(sequences):
        for n, sequence in enumerate(group):
            if sequence is None:
                continue
            params = sequence.request.params
            presence[r, n], frequency[r, n] = params.presence_penalty, params.frequency_penalty
            repetition[r, n] = params.repetition_penalty
            if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
                history[r, n] = 2 * np.bincount(sequence.output_ids, minlength=vocab)
                history[r, n, np.asarray(sequence.request.prompt_ids)] += 1
            for token, value in (params.logit_bias or {}).items():
                bias[r, n, token] += value
            if sequence.num_output < params.min_tokens:
                bias[r, n, [*eos_ids, *params.stop_token_ids]] = -np.inf
    return LogitRules(presence=presence, frequency=frequency, repetition=repetition, bias=bias, history=history)
