"""A runner without a model: it keeps token ids in paged pools, as the real one keeps latents, and derives each next
token from what it reads back.  A page that is shared, missing, stale or misplaced therefore changes the answer.
"""

import zlib
from collections.abc import Callable

import numpy as np

from jaxinfer.engine.request import Sequence
from jaxinfer.engine.step import Capacity, PrefillSegment, PromptRows, Sampled, SegmentResult, Step, StepResult
from jaxinfer.sharding.layout import Layout


def capacity(
    *, replicas=1, cp=1, stripe=4, page_size=8, pages=4096, chunk=64, segments=4, seqs=16, context=8192, vocab=262
) -> Capacity:
    return Capacity(
        replicas=replicas,
        layout=Layout(cp, stripe, page_size),
        pages_per_rank=pages,
        chunk_size=chunk,
        max_segments=segments,
        max_num_seqs=seqs,
        max_context=context,
        vocab_size=vocab,
    )


def text_token(tokens: np.ndarray, sequence: Sequence, vocab: int) -> int:
    """A pseudo-random printable byte or piece of one, from all tokens before it and, unless greedy, the seed."""
    state = zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes())
    if sequence.request.params.temperature > 0:
        state = zlib.crc32(f"{sequence.seed}/{sequence.num_output}".encode(), state)
    palette = b"ab .\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x91\x8d"
    return palette[state % len(palette)] % vocab


class FakeRunner:
    """Implements `jaxinfer.engine.step.Runner`, and checks every promise that a step makes.

    `next_token(tokens so far, sequence, vocab)` decides; `before(step)` is called first and may raise;
    `finite(sequence)` False gives NaN rows.
    """

    def __init__(
        self,
        capacity: Capacity,
        next_token: Callable[[np.ndarray, Sequence, int], int] = text_token,
        before: Callable[[Step], None] = lambda step: None,
        finite: Callable[[Sequence], bool] = lambda sequence: True,
    ):
        self.capacity = capacity
        self.next_token, self.before, self.finite = next_token, before, finite
        self.steps: list[Step] = []
        self.alive = True
        self.resets = 0
        self.pool = self._new_pool()

    def _new_pool(self) -> np.ndarray:
        layout, size = self.capacity.layout, self.capacity.pages_per_rank
        return np.full((self.capacity.replicas, layout.cp, size, layout.page_size), -1, np.int32)

    def cache_alive(self) -> bool:
        return self.alive

    def reset_cache(self) -> None:
        self.resets += 1
        self.alive = True
        self.pool = self._new_pool()

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        check_step(step, self.capacity)
        self.before(step)
        assert self.alive, "ran on a lost cache"
        for segments in step.prefill:
            for segment in segments:
                self._write(segment.sequence, segment.start, segment.end)
        for sequences in step.decode:
            for sequence in sequences:
                self._write(sequence, len(sequence.token_ids) - 1, len(sequence.token_ids))
        return StepResult(
            prefill=[[self._segment(segment) for segment in segments] for segments in step.prefill],
            decode=[[self._sample(sequence) for sequence in sequences] for sequences in step.decode],
        )

    def _slots(self, sequence: Sequence, start: int, end: int):
        """Where the pool holds these positions: an index for `self.pool`."""
        layout = self.capacity.layout
        positions = np.arange(start, end)
        ranks, local = layout.rank(positions, sequence.home), layout.local_index(positions)
        width = max(map(len, sequence.pages))
        table = np.full((layout.cp, width), self.capacity.pages_per_rank)  # out of range: raises if it is used
        for rank, pages in enumerate(sequence.pages):
            table[rank, : len(pages)] = pages
        return sequence.replica, ranks, table[ranks, local // layout.page_size], local % layout.page_size

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        self.pool[self._slots(sequence, start, end)] = sequence.token_ids[start:end]

    def _read(self, sequence: Sequence, end: int) -> np.ndarray:
        return self.pool[self._slots(sequence, 0, end)]

    def _sample(self, sequence: Sequence) -> Sampled:
        tokens = self._read(sequence, len(sequence.token_ids))
        token = self.next_token(tokens, sequence, self.capacity.vocab_size)
        sampled = Sampled(token_id=token, finite=self.finite(sequence))
        if sequence.request.params.logprobs is not None:
            sampled.logprob, sampled.rank = -0.25, 1
            sampled.top = [(token, -0.25), *((other, -2.0 - other) for other in range(1, 20))]
        return sampled

    def _segment(self, segment: PrefillSegment) -> SegmentResult:
        sequence, answer = segment.sequence, SegmentResult()
        request = sequence.request
        if request.logit_rows is not None:
            tokens = self._read(sequence, segment.end)
            answer.logits = np.zeros((len(segment.logit_rows), self.capacity.vocab_size), np.float32)
            for i, row in enumerate(segment.logit_rows):
                answer.logits[i] = tokens[: row + 1].sum()
        elif segment.ends_prompt:
            answer.sampled = self._sample(sequence)
        if request.params.prompt_logprobs is not None:
            last = min(segment.end, len(sequence.token_ids) - 1)
            rows = np.arange(segment.start, last)
            answer.prompt_logprobs = PromptRows(
                first_row=segment.start,
                logprobs=-(rows + 1).astype(np.float32),
                ranks=np.ones(len(rows), np.int32),
                top_ids=np.broadcast_to(np.arange(20, dtype=np.int32), (len(rows), 20)),
                top_logprobs=np.broadcast_to(-np.arange(20, dtype=np.float32), (len(rows), 20)),
            )
        return answer


def check_step(step: Step, capacity: Capacity) -> None:
    """Asserts what `step.py` promises a runner."""
    layout = capacity.layout
    assert not step.empty
    assert len(step.prefill) == len(step.decode) == capacity.replicas
    sequences = step.sequences()
    assert len({id(sequence) for sequence in sequences}) == len(sequences), "a sequence takes part once"
    for replica, (segments, rows) in enumerate(zip(step.prefill, step.decode, strict=True)):
        assert len(segments) <= capacity.max_segments and len(rows) <= capacity.max_num_seqs
        tokens = np.zeros(layout.cp, int)
        owned: list[set[int]] = [set() for _ in range(layout.cp)]
        for segment in segments:
            sequence = segment.sequence
            assert segment.count > 0 and segment.start == sequence.num_computed
            assert segment.start % layout.round_tokens == 0
            assert segment.ends_prompt or segment.end % layout.round_tokens == 0
            positions = np.arange(segment.start, segment.end)
            tokens += np.bincount(layout.rank(positions, sequence.home), minlength=layout.cp)
            check_pages(sequence, segment.end, capacity, owned)
        assert (tokens <= capacity.chunk_size).all(), tokens
        for sequence in rows:
            assert sequence.num_computed == len(sequence.token_ids) - 1 and sequence.num_output > 0
            check_pages(sequence, len(sequence.token_ids), capacity, owned)
        assert all(s.replica == replica for s in [*rows, *(segment.sequence for segment in segments)])


def check_pages(sequence: Sequence, length: int, capacity: Capacity, owned: list[set[int]]) -> None:
    """Asserts that the sequence has the pages of `length` tokens, in range and not yet `owned` on the rank."""
    for rank, pages in enumerate(sequence.pages):
        assert len(pages) >= capacity.layout.pages_needed(length, rank, sequence.home)
        if pages:
            assert min(pages) >= 0 and max(pages) < capacity.pages_per_rank
            assert len(set(pages)) == len(pages)
            assert owned[rank].isdisjoint(pages), f"a page of rank {rank} has two owners"
            owned[rank].update(pages)
