"""What the scheduler asks of the runner in one step, and what the runner answers.

Outer lists run over the replicas; all replicas take the step together.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from jaxinfer.engine.request import Sequence
from jaxinfer.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a runner can hold and do.

    `pages_per_rank` pages on each cp rank of each replica; `chunk_size` prefill tokens per rank and step;
    `max_segments` prefill segments and `max_num_seqs` decode rows per replica and step; `max_context` tokens per
    sequence, prompt and output together.
    """

    replicas: int
    layout: Layout
    pages_per_rank: int
    chunk_size: int
    max_segments: int
    max_num_seqs: int
    max_context: int
    vocab_size: int

    def __post_init__(self):
        sizes = {name: value for name, value in vars(self).items() if name != "layout"}
        if min(sizes.values()) < 1:
            raise ValueError(f"expected positive sizes, got {sizes}")
        if self.chunk_size % self.layout.stripe:
            raise ValueError(
                f"expected a chunk of whole stripes, got {self.chunk_size} tokens and stripes of {self.layout.stripe}"
            )

    @property
    def pool_tokens(self) -> int:
        """Tokens of one sequence that fill a replica's pages."""
        return self.pages_per_rank * self.layout.page_size * self.layout.cp


@dataclass(kw_only=True)
class PrefillSegment:
    """Compute `sequence.token_ids[start : start + count]`.

    `start` is a multiple of `layout.round_tokens` and equals `sequence.num_computed`; so is the end, unless it is the
    end of `token_ids`.  The pages for all of it are allocated.
    """

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def ends_prompt(self) -> bool:
        """Whether the last row of the segment predicts a token that is not known yet."""
        return self.end == len(self.sequence.token_ids)

    @property
    def logit_rows(self) -> list[int]:
        """The positions of this segment whose logits the request wants, in the order of `Request.logit_rows`."""
        return [row for row in self.sequence.request.logit_rows or () if self.start <= row < self.end]


@dataclass(kw_only=True)
class Step:
    """One step: `prefill[replica]` segments and `decode[replica]` sequences.

    A decoding sequence feeds `token_ids[-1]` at position `len(token_ids) - 1`, whose page is allocated, and samples
    the token after it.
    """

    prefill: list[list[PrefillSegment]]
    decode: list[list[Sequence]]

    @property
    def empty(self) -> bool:
        return not any(self.prefill) and not any(self.decode)

    def sequences(self) -> list[Sequence]:
        """Every sequence that takes part."""
        segments = [segment.sequence for segments in self.prefill for segment in segments]
        return segments + [sequence for rows in self.decode for sequence in rows]


@dataclass(kw_only=True)
class Sampled:
    """A sampled token.

    `logprob`, `rank` (1 is the most likely) and `top` (pairs of id and log-probability, best first) are given if the
    request asks for logprobs.  `finite` is False if the row's logits held NaN or infinity: the token means nothing.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    finite: bool = True


@dataclass(kw_only=True)
class PromptRows:
    """Log-probabilities of known tokens: entry i belongs to row `first_row + i` and scores token `first_row + i + 1`.

    `logprobs` [rows] float32, `ranks` [rows] int32 (1 is the most likely), `top_ids` [rows, k] int32 and
    `top_logprobs` [rows, k] float32, best first, k at least the request's `prompt_logprobs`.  `rows` is the segment's
    count, less one if the segment ends the known tokens.
    """

    first_row: int
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(kw_only=True)
class SegmentResult:
    """`sampled` is set iff the segment ends the prompt and the request wants no logits; `prompt_logprobs` if the
    request asks for them; `logits` [len(segment.logit_rows), vocab] float32 if the request wants any."""

    sampled: Sampled | None = None
    prompt_logprobs: PromptRows | None = None
    logits: np.ndarray | None = None


@dataclass(kw_only=True)
class StepResult:
    """The answers, nested as in `Step`."""

    prefill: list[list[SegmentResult]]
    decode: list[list[Sampled]]
    reads: dict[str, float] = field(default_factory=dict)
    """What the queries of hybrid attention read (see `engine.reads`)."""


@runtime_checkable
class Runner(Protocol):
    """The host/device border.  `run` samples each sequence with its `seed` and `num_output` only, so that a result does
    not depend on what else is in the step."""

    capacity: Capacity

    def run(self, step: Step) -> StepResult:
        """Compute one step.  May raise anything (out of memory, a failed device)."""
        ...

    def cache_alive(self) -> bool:
        """False if a failed step lost the donated cache buffers."""
        ...

    def reset_cache(self) -> None:
        """Make the cache anew, its contents undefined."""
        ...
