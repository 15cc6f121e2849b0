"""What hybrid attention needs to know of a step, as arrays.  Numpy only."""

import math

import numpy as np

from jaxinfer.configs.attention import Dense, Hybrid
from jaxinfer.engine.anchors import Anchors
from jaxinfer.engine.request import Sequence
from jaxinfer.engine.step import Capacity, PrefillSegment
from jaxinfer.model.batch import SparseDecode, SparsePrefill

_NOWHERE = np.iinfo(np.int32).max


class SparseBatcher:
    """Builds the sparse part of batches for one engine.

    Args:
        capacity: the engine's.
        policy: which positions its queries read.
        anchors: finds the anchors of its sequences.
        tile_pages: pages of context that are gathered at a time on each rank.
    """

    def __init__(self, capacity: Capacity, policy: Hybrid, anchors: Anchors, tile_pages: int):
        layout = capacity.layout
        self._capacity, self._policy, self._anchors, self._tile_pages = capacity, policy, anchors, tile_pages
        self.has_dense_layers = any(isinstance(of_layer, Dense) for _, _, of_layer in policy.layers)
        # Whole epochs in whole tiles.
        round_pages = layout.page_size * layout.cp
        unit = math.lcm(tile_pages, policy.hot_epoch // math.gcd(policy.hot_epoch, round_pages))
        self.table_pages = -(-layout.pages_needed(capacity.max_context, 0, 0) // unit) * unit
        """Pages of the longest sequence on a rank."""
        self._shared = policy.sinks + policy.most_anchors(capacity.max_context)

    def dense_tokens(self, segment: PrefillSegment) -> int:
        """How many of the first positions are read by the segment's queries that read all before them."""
        below = self._block_end(self._policy.dense_below - 1)
        return min(segment.end, below) if segment.start < below else 0

    def _block_end(self, position: int) -> int:
        return (position // self._policy.query_block + 1) * self._policy.query_block

    def prefill(
        self, segments: list[list[PrefillSegment]], positions: np.ndarray, of_token: np.ndarray
    ) -> SparsePrefill:
        """Of a prefill step with `positions` and `of_token` (whose segment), int `[R, cp, T]`; -1: no token."""
        capacity, policy, layout = self._capacity, self._policy, self._capacity.layout
        replicas, cp, tokens = positions.shape
        most = capacity.max_segments
        query_blocks = np.full((replicas, cp, tokens // policy.query_block + most), -1, np.int32)
        number = np.full((replicas, most), -1, np.int32)
        pages = np.zeros((replicas, cp, most, self.table_pages), np.int32)
        shared = np.full((replicas, most, self._shared), _NOWHERE, np.int32)
        tiles, count = np.zeros(most, np.int32), 0
        for r, group in enumerate(segments):
            for rank in range(cp):
                block = np.where(positions[r, rank] < 0, -1, positions[r, rank] // policy.query_block)
                key = np.stack((of_token[r, rank], block))
                begins = (block >= 0) & np.append(True, np.any(key[:, 1:] != key[:, :-1], axis=0))
                (first,) = np.nonzero(begins)
                query_blocks[r, rank, : len(first)] = first
            sparse = [s for s, item in enumerate(group) if self.dense_tokens(item) < item.end]
            for c, s in enumerate(sparse):
                item = group[s]
                number[r, c] = s
                for rank, own in enumerate(item.sequence.pages):
                    pages[r, rank, c, : len(own)] = own
                self._fill_shared(shared[r, c], item.sequence)
                needed = layout.pages_needed(item.end, item.sequence.home, item.sequence.home)
                tiles[c] = max(tiles[c], -(-needed // self._tile_pages))
            count = max(count, len(sparse))
        return SparsePrefill(
            query_blocks=query_blocks,
            segments=number,
            pages=pages,
            shared=shared,
            tiles=tiles,
            count=np.int32(count),
        )

    def decode(self, sequences: list[list[Sequence]], rows: int) -> SparseDecode:
        """Of a decode step with `rows` places for sequences."""
        shared = np.full((len(sequences), rows, self._shared), _NOWHERE, np.int32)
        for r, group in enumerate(sequences):
            for b, sequence in enumerate(group):
                if len(sequence.token_ids) > self._policy.dense_below:
                    self._fill_shared(shared[r, b], sequence)
        return SparseDecode(shared=shared)

    def _fill_shared(self, row: np.ndarray, sequence: Sequence) -> None:
        """Writes the positions of the sequence's sinks and anchors, ascending."""
        sinks = self._policy.sinks
        self._anchors.extend(sequence.anchors, sequence.token_ids)
        behind = [position for position in sequence.anchors if position >= sinks]
        row[:sinks] = np.arange(sinks)
        row[sinks : sinks + len(behind)] = behind
