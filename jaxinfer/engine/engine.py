"""The engine: takes requests, makes steps, hands out updates.  Not thread-safe: `EngineLoop` gives it a thread."""

import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.output import LogitRows, PromptScores, TextStream, sampled_logprobs
from jaxinfer.engine.request import Request, RequestMetrics, SamplingParams, Sequence, Status, Update, sequence_seed
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.step import PrefillSegment, Runner, Sampled, SegmentResult, Step, StepResult
from jaxinfer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MAX_FAULTS = 1
"""How often a sequence is computed again after a step that failed with it."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Where the engine stands; counters grow from its start.

    `waiting`, `prefilling` and `running` count sequences, `free_pages` and `total_pages` the pages of all ranks and
    replicas.  `prompt_tokens` counts tokens computed by prefill, again after a preemption; `finished` the sequences
    that ended, by reason.  `prefill_progress` gives (tokens done, tokens to do), over the samples that are in prefill,
    of each request that has any.  `reads` says what hybrid attention read (see `engine.reads`).
    """

    waiting: int
    prefilling: int
    running: int
    free_pages: int
    total_pages: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    faults: int
    finished: dict[str, int]
    prefill_progress: dict[str, tuple[int, int]]
    reads: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Sample:
    """A sequence with what has been gathered of its output."""

    sequence: Sequence
    metrics: RequestMetrics
    text: TextStream
    scores: PromptScores | None
    logits: LogitRows | None


@dataclass(eq=False)
class _Live:
    """A request that has not finished; `open` holds its unfinished samples by index."""

    request: Request
    open: dict[int, _Sample] = field(default_factory=dict)


class Engine:
    """Continuous batching over a runner.

    Args:
        runner: computes steps.
        tokenizer: makes text of tokens; None: the engine deals in token ids only.
        eos_token_ids: tokens that end an output unless `ignore_eos`.
        config: the model, for those who ask; the engine does not.
        model_name: likewise.
        seed: of the generator that draws seeds for requests that bring none.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        *,
        eos_token_ids: tuple[int, ...] = (),
        config: ModelConfig | None = None,
        model_name: str = "",
        seed: int = 0,
    ):
        self.runner = runner
        self.tokenizer = tokenizer
        self.capacity = runner.capacity
        self.eos_token_ids = frozenset(eos_token_ids)
        self.config = config
        self.model_name = model_name
        self._seeds = random.Random(seed)
        self._scheduler = Scheduler(self.capacity)
        self._live: dict[str, _Live] = {}
        self._outbox: list[Update] = []
        self._steps = self._prompt_tokens = self._generated_tokens = self._faults = self._old_preemptions = 0
        self._finished: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()

    # Requests come and go.

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._live or self._outbox)

    def check(self, request: Request) -> None:
        """Raises ValueError, with what was expected and what came, if the request can never be served.

        Does not change the engine and may be called from any thread.
        """
        ids, params, capacity = request.prompt_ids, request.params, self.capacity
        if not ids:
            raise ValueError("expected a prompt of at least one token, got an empty one")
        strange = next((token for token in ids if type(token) is not int), None)
        if strange is not None:
            raise ValueError(f"expected token ids to be integers, got {strange!r}")
        for low, high, what in ((min(ids), max(ids), "the prompt's token ids"), *_token_ranges(params)):
            if low < 0 or high >= capacity.vocab_size:
                raise ValueError(f"expected {what} to be in [0, {capacity.vocab_size}), got {low if low < 0 else high}")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("expected no stop strings, as the model has no tokenizer; stop_token_ids work")
        if request.logit_rows is not None:
            rows = request.logit_rows
            if params.n != 1:
                raise ValueError(f"expected n=1 for a request of logits, got n={params.n}")
            if not rows or min(rows) < 0 or max(rows) >= len(ids):
                raise ValueError(f"expected logit_rows in [0, {len(ids)}), at least one, got {rows}")
        self._check_length(request)

    def _check_length(self, request: Request) -> None:
        prompt, limit, pool = len(request.prompt_ids), self.capacity.max_context, self.capacity.pool_tokens
        new = self._max_new_tokens(request)
        asked = "1 output token" if request.params.max_tokens is None else f"max_tokens of {new}"
        wanted = f"{prompt} prompt tokens" if request.logit_rows is not None else f"{prompt} prompt tokens and {asked}"
        if prompt + max(new, request.logit_rows is None) > limit:
            raise ValueError(f"expected at most {limit} tokens of context (max_context), got {wanted}")
        # The last token sampled is never fed back and needs no page.
        if prompt + max(new - 1, 0) > pool:
            raise ValueError(f"expected at most {pool} tokens, which fill the KV cache of one replica, got {wanted}")
        if request.logit_rows is None and request.params.min_tokens > new:
            raise ValueError(
                f"expected min_tokens of at most {new}, which the context leaves after {prompt} prompt "
                f"tokens, got {request.params.min_tokens}"
            )

    def _max_new_tokens(self, request: Request) -> int:
        """Most tokens to sample; without `max_tokens`, what the context and the page pool leave."""
        if request.logit_rows is not None:
            return 0
        if request.params.max_tokens is not None:
            return request.params.max_tokens
        longest = min(self.capacity.max_context, self.capacity.pool_tokens + 1)
        return max(0, longest - len(request.prompt_ids))

    def add(self, request: Request) -> None:
        """Takes a request.  Raises ValueError as `check` does, or if a request with its id is under way."""
        self.check(request)
        self.admit(request)

    def admit(self, request: Request) -> None:
        """Takes a request that has passed `check`.  Raises ValueError if a request with its id is under way."""
        if request.id in self._live:
            raise ValueError(f"expected a new request id, got {request.id!r}, which is under way")
        params = request.params
        live = self._live[request.id] = _Live(request)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            sequence = Sequence(
                request=request,
                index=index,
                token_ids=list(request.prompt_ids),
                num_prompt=len(request.prompt_ids),
                max_new_tokens=self._max_new_tokens(request),
                seed=sequence_seed(seed, index),
            )
            scores = logits = None
            if params.prompt_logprobs is not None and index == 0:
                scores = PromptScores(self.tokenizer, request.prompt_ids, params.prompt_logprobs)
            if request.logit_rows is not None:
                logits = LogitRows(request.logit_rows, self.capacity.vocab_size)
            metrics = RequestMetrics(arrival=request.arrival, prompt_tokens=len(request.prompt_ids))
            text = TextStream(self.tokenizer, params.stop_strings)
            live.open[index] = _Sample(sequence, metrics, text, scores, logits)
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request, whatever it is doing; its pages are free at once, and `step` hands out its last updates.
        False if there is no such request."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._end_all(live, "abort", None)
        return True

    def end_all(self, reason: str, message: str | None = None) -> list[Update]:
        """Ends every request with `reason` ("abort" or "error") and begins anew with empty queues, whatever state they
        are in: the way out of a fault of the engine itself.  Returns the updates not handed out yet."""
        self._old_preemptions += self._scheduler.preemptions
        self._scheduler = Scheduler(self.capacity)
        for live in list(self._live.values()):
            for sample in list(live.open.values()):
                self._emit_end(live, sample, Update(request_id=live.request.id), reason, error=message)
        return self._take_outbox()

    # Steps.

    def step(self) -> list[Update]:
        """Makes one step, if there is work, and returns what is new; what is waiting to be handed out comes first.

        A step that fails does not raise: its requests are computed again, each on its own, and end with an error if
        they fail again.
        """
        if self._outbox:
            return self._take_outbox()
        step = self._scheduler.schedule()
        if step.empty:
            if self._live:
                raise RuntimeError(f"the scheduler can do nothing for {len(self._live)} unfinished requests")
            return []
        now = time.monotonic()
        for sequence in step.sequences():
            metrics = self._live[sequence.request.id].open[sequence.index].metrics
            metrics.first_scheduled = metrics.first_scheduled or now
        try:
            result = self.runner.run(step)
        except Exception as error:
            log.exception("a step failed; its requests are computed again")
            self._recover(step, f"{type(error).__name__}: {error}")
        else:
            self._book(step, result)
        self._steps += 1
        return self._take_outbox()

    def _take_outbox(self) -> list[Update]:
        updates, self._outbox = self._outbox, []
        return updates

    def _recover(self, step: Step, message: str) -> None:
        """After a step that raised: computes its sequences again, and all others too if the cache was lost."""
        self._faults += 1
        for sequence in step.sequences():
            if sequence.status is not Status.FINISHED:
                self._retry(sequence, message)
        if not self.runner.cache_alive():
            for sequence in list(self._scheduler):
                if sequence.status is not Status.WAITING:
                    self._scheduler.requeue(sequence)
            self.runner.reset_cache()

    def _retry(self, sequence: Sequence, message: str) -> None:
        """Computes a sequence again from its first token, or ends its request with an error if that was tried."""
        sequence.faults += 1
        if sequence.faults > _MAX_FAULTS:
            self._end_all(self._live[sequence.request.id], "error", message)
        else:
            sequence.suspect = True
            self._scheduler.requeue(sequence)

    def _book(self, step: Step, result: StepResult) -> None:
        self._scheduler.commit(step)
        self._reads.update(result.reads)
        for segments, answers in zip(step.prefill, result.prefill, strict=True):
            for segment, answer in zip(segments, answers, strict=True):
                if segment.sequence.status is not Status.FINISHED:
                    self._book_segment(segment, answer)
        for sequences, samples in zip(step.decode, result.decode, strict=True):
            for sequence, sampled in zip(sequences, samples, strict=True):
                if sequence.status is not Status.FINISHED:
                    self._book_token(sequence, sampled)

    def _book_segment(self, segment: PrefillSegment, answer: SegmentResult) -> None:
        sequence = segment.sequence
        live = self._live[sequence.request.id]
        sample = live.open[sequence.index]
        self._prompt_tokens += segment.count
        if sample.scores is not None and answer.prompt_logprobs is not None:
            sample.scores.add(answer.prompt_logprobs)
        if sample.logits is not None and answer.logits is not None:
            sample.logits.add(segment, answer.logits)
        # `commit` has made the sequence RUNNING iff the segment ended what was known of it.
        if sequence.status is not Status.RUNNING:
            if sequence.num_output == 0:
                progress = (sequence.num_computed, sequence.num_prompt)
                self._outbox.append(Update(request_id=live.request.id, index=sequence.index, prefill=progress))
        elif sample.logits is not None:
            update = Update(request_id=live.request.id, logits=sample.logits.values)
            self._scheduler.remove(sequence)
            self._add_scores(update, sample)
            self._emit_end(live, sample, update, "length")
        elif answer.sampled is None:
            raise ValueError("expected a runner that samples at the end of a prompt, got no token")
        else:
            self._book_token(sequence, answer.sampled)

    def _book_token(self, sequence: Sequence, sampled: Sampled) -> None:
        if not sampled.finite:
            self._faults += 1
            self._retry(sequence, "the model's logits were not finite (NaN or infinity)")
            return
        live = self._live[sequence.request.id]
        sample = live.open[sequence.index]
        token, params = sampled.token_id, live.request.params
        sequence.token_ids.append(token)
        self._generated_tokens += 1
        sample.metrics.output_tokens += 1
        sample.metrics.first_token = sample.metrics.first_token or time.monotonic()
        update = Update(request_id=live.request.id, index=sequence.index, token_ids=[token])
        if params.logprobs is not None:
            update.logprobs = [sampled_logprobs(self.tokenizer, sampled, params.logprobs)]
        self._add_scores(update, sample)
        reason = self._read(update, sample, token)
        if reason is None:
            self._outbox.append(update)
        else:
            self._scheduler.remove(sequence)
            self._emit_end(live, sample, update, reason)

    def _add_scores(self, update: Update, sample: _Sample) -> None:
        """Puts the prompt's logprobs on the first update after the prefill; they are not gathered again."""
        if sample.scores is not None:
            update.prompt_logprobs, sample.scores = sample.scores.entries, None

    def _read(self, update: Update, sample: _Sample, token: int) -> str | None:
        """Puts the token's text on the update; the reason if the output ends with this token."""
        sequence, params = sample.sequence, sample.sequence.request.params
        may_stop = sequence.num_output > params.min_tokens
        stopped = False
        if may_stop and token in params.stop_token_ids:
            stopped, update.stop_reason = True, token
        elif may_stop and token in self.eos_token_ids and not params.ignore_eos:
            stopped = True
        else:
            update.text, update.stop_reason = sample.text.push(token, may_stop)
            if update.stop_reason is not None:
                return "stop"
        if not stopped and sequence.num_output < sequence.max_new_tokens:
            return None
        update.text += sample.text.flush()
        return "stop" if stopped else "length"

    def _end_all(self, live: _Live, reason: str, error: str | None) -> None:
        for sample in list(live.open.values()):
            self._scheduler.remove(sample.sequence)
            self._emit_end(live, sample, Update(request_id=live.request.id), reason, error=error)

    def _emit_end(self, live: _Live, sample: _Sample, update: Update, reason: str, error: str | None = None) -> None:
        """Hands out the last update of a sample, and closes the request with its last sample."""
        del live.open[sample.sequence.index]
        self._finished[reason] += 1
        sample.metrics.preemptions = sample.sequence.preemptions
        sample.metrics.finished = time.monotonic()
        update.index = sample.sequence.index
        update.finish_reason, update.error = reason, error
        update.metrics = sample.metrics
        update.request_finished = not live.open
        if update.request_finished:
            del self._live[live.request.id]
        self._outbox.append(update)

    def stats(self) -> EngineStats:
        """A snapshot; may be taken from any thread."""
        counts = self._scheduler.counts()
        progress: dict[str, tuple[int, int]] = {}
        for live in list(self._live.values()):
            sequences = [sample.sequence for sample in list(live.open.values())]
            begun = [sequence for sequence in sequences if sequence.status is Status.PREFILL]
            if begun:
                done, length = sum(one.num_computed for one in begun), sum(len(one.token_ids) for one in begun)
                progress[live.request.id] = (done, length)
        return EngineStats(
            waiting=counts[Status.WAITING],
            prefilling=counts[Status.PREFILL],
            running=counts[Status.RUNNING],
            free_pages=self._scheduler.pages.total_free,
            total_pages=self._scheduler.pages.total,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._old_preemptions + self._scheduler.preemptions,
            faults=self._faults,
            finished=dict(self._finished),
            prefill_progress=progress,
            reads=dict(self._reads),
        )


def _token_ranges(params: SamplingParams) -> list[tuple[int, int, str]]:
    """The least and the largest token id in the parameters, with a name for it."""
    named = [(params.stop_token_ids, "stop_token_ids"), (params.logit_bias or (), "the token ids of logit_bias")]
    return [(min(ids), max(ids), name) for ids, name in named if ids]
