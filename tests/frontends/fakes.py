"""A deterministic stand-in for the model, so that the front ends can be tested without a device."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Sequence
from jaxinfer.engine.step import Capacity, PrefillSegment, PromptRows, Sampled, SegmentResult, Step, StepResult
from jaxinfer.sharding.layout import Layout
from jaxinfer.tokenizer import Tokenizer, byte_tokenizer

VOCAB = 512
MODEL = "fake"


def next_token(token_ids: list[int], seed: int) -> int:
    """A lower-case letter that depends on the last tokens, the length and the seed."""
    digest = hashlib.blake2b(repr((token_ids[-4:], len(token_ids), seed)).encode(), digest_size=2).digest()
    return ord("a") + int.from_bytes(digest, "big") % 26


@dataclass
class FakeRunner:
    """Samples `next_token`, without the seed if the temperature is 0. Can be slow, be held up (`go`), and `fail`."""

    capacity: Capacity
    step_seconds: float = 0.0
    fail: Callable[[Step], None] = lambda step: None

    def __post_init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def run(self, step: Step) -> StepResult:
        self.go.wait(30)
        time.sleep(self.step_seconds)
        self.fail(step)
        return StepResult(
            prefill=[[self._segment(segment) for segment in segments] for segments in step.prefill],
            decode=[[self._sample(sequence) for sequence in sequences] for sequences in step.decode],
        )

    def cache_alive(self) -> bool:
        return True

    def reset_cache(self) -> None:
        return None

    def _sample(self, sequence: Sequence) -> Sampled:
        params = sequence.request.params
        token = next_token(sequence.token_ids, sequence.seed if params.temperature else 0)
        if params.logprobs is None:
            return Sampled(token_id=token)
        top = [(token + i, -0.25 - i) for i in range(params.logprobs)]
        return Sampled(token_id=token, logprob=-0.25, rank=1, top=top)

    def _segment(self, segment: PrefillSegment) -> SegmentResult:
        request = segment.sequence.request
        if request.logit_rows is not None:
            rows = np.asarray(segment.logit_rows, np.float32).reshape(-1, 1)
            return SegmentResult(logits=rows + np.arange(VOCAB, dtype=np.float32) / VOCAB)
        wanted = request.params.prompt_logprobs
        count = segment.count - segment.ends_prompt
        scores = None
        if wanted is not None:
            scores = PromptRows(
                first_row=segment.start,
                logprobs=np.full((count,), -0.5, np.float32),
                ranks=np.full((count,), 2, np.int32),
                top_ids=np.tile(np.arange(97, 97 + wanted, dtype=np.int32), (count, 1)),
                top_logprobs=np.full((count, wanted), -0.25, np.float32),
            )
        sampled = self._sample(segment.sequence) if segment.ends_prompt else None
        return SegmentResult(sampled=sampled, prompt_logprobs=scores)


def fake_capacity(**changes: int) -> Capacity:
    sizes = {"pages_per_rank": 512, "chunk_size": 256, "max_segments": 8, "max_num_seqs": 8, "max_context": 8192}
    return Capacity(replicas=1, layout=Layout(cp=1, stripe=16, page_size=16), vocab_size=VOCAB, **sizes | changes)


_BYTES = byte_tokenizer()


def fake_engine(step_seconds: float = 0.0, tokenizer: Tokenizer | None = _BYTES, **capacity: int) -> Engine:
    """An engine over a `FakeRunner`, which is its `runner`."""
    runner = FakeRunner(fake_capacity(**capacity), step_seconds)
    return Engine(runner, tokenizer, model_name=MODEL)


def expected_ids(prompt_ids: list[int], count: int, seed: int = 0) -> list[int]:
    """What the fake model says after a prompt."""
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(next_token(ids, seed))
    return ids[len(prompt_ids) :]
