"""What goes into the engine (`SamplingParams`, `Request`) and what comes out of it (`Update`, `RequestOutput`).

Times are seconds of `time.monotonic()`.  Token log-probabilities are natural logarithms.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

MAX_LOGPROBS = 20
"""Most alternatives per token that `logprobs` and `prompt_logprobs` may ask for (the limit of the OpenAI interface)."""


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """`value` as a float, or ValueError unless it is a finite number in [low, high] (in (low, high] if `open_low`)."""
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"expected {name} to be a number in {bracket}{low}, {high}], got {value!r}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int, or ValueError unless it is an integer, not below `low` and not above `high`."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"expected {name} to be an integer {bounds}, got {value!r}")
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be true or false, got {value!r}")
    return value


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise ValueError(f"expected {name} to be a list of integers, got {value!r}")
    return tuple(_integer(f"{name}[{i}]", item, 0) for i, item in enumerate(value))


def _stop_strings(value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"expected stop to be a non-empty string or a list of non-empty strings, got {value!r}")
    return tuple(items)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected logit_bias to map token ids to numbers, got {value!r}")
    return {
        _integer("a token id in logit_bias", token, 0): _number(f"logit_bias[{token}]", bias, -100, 100)
        for token, bias in value.items()
    }


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample.  Names and defaults are vLLM's.

    `temperature` 0 is greedy.  `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch the filter off.  `max_tokens` None means
    as many as the context leaves.  `stop` takes one string or several; the text ends before the stop string.
    `logprobs` and `prompt_logprobs` give the number of alternatives reported beside each token (0: the token alone).
    `n` samples are drawn independently; equal `seed`s give equal samples, whatever else is in the batch.

    Raises ValueError for a value out of its range, naming what was expected and what came.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        def put(name: str, value: Any):
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, 1))
        put("temperature", _number("temperature", self.temperature, 0, 1e6))
        put("top_p", _number("top_p", self.top_p, 0, 1, open_low=True))
        put("top_k", _integer("top_k", self.top_k, -1))
        put("min_p", _number("min_p", self.min_p, 0, 1))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))
        put("ignore_eos", _flag("ignore_eos", self.ignore_eos))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2, 2))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2, 2))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return _stop_strings(self.stop)


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt and how to continue it.

    `prompt` is the text the ids came from, kept for the answer only.  `logit_rows`, if given, asks for the
    teacher-forced float32 logits of these positions (row i holds the logits after `prompt_ids[: i + 1]`); such a
    request ends with its prefill and samples nothing.
    """

    id: str
    prompt_ids: list[int] | tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    arrival: float = field(default_factory=time.monotonic)
    logit_rows: tuple[int, ...] | None = None


class Status(Enum):
    """Where a sequence stands: WAITING holds no page, PREFILL has begun its prompt, RUNNING decodes."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One sample of a request, as scheduler and runner see it.

    `token_ids` is the prompt and the output so far; `num_computed` of them have their KV in the cache.  `pages[rank]`
    lists the pages on each cp rank of the `replica`, in the order of `Layout`.  `order` ranks sequences by age (smaller
    is older).  `seed` is in [0, 2**31).  `suspect` marks a sequence whose last step raised: it is retried alone.
    `anchors` are those known so far (see `engine.anchors`).
    """

    request: Request
    index: int
    token_ids: list[int]
    num_prompt: int
    max_new_tokens: int
    seed: int
    order: int = 0
    replica: int = 0
    home: int = 0
    pages: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    status: Status = Status.WAITING
    suspect: bool = False
    faults: int = 0
    preemptions: int = 0
    anchors: list[int] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        """Tokens sampled so far; also the index of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """The tokens sampled so far (a copy)."""
        return self.token_ids[self.num_prompt :]

    @property
    def final_length(self) -> int:
        """Most tokens that will ever be in the cache: the last token sampled is never fed back."""
        return max(self.num_prompt, self.num_prompt + self.max_new_tokens - 1)


def sequence_seed(seed: int, index: int) -> int:
    """The seed in [0, 2**31) of sample `index` of a request with this seed: a hash, so that samples are independent."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


@dataclass(kw_only=True)
class Logprob:
    """One token with its log-probability; `rank` 1 is the most likely.  `text` (of `token_bytes`) has U+FFFD for a
    part of a character."""

    token_id: int
    logprob: float
    rank: int | None = None
    text: str = ""
    token_bytes: bytes = b""


@dataclass(kw_only=True)
class TokenLogprobs:
    """The token that stands in the sequence, and the most likely ones at its place, best first."""

    chosen: Logprob
    top: list[Logprob] = field(default_factory=list)


@dataclass(kw_only=True)
class RequestMetrics:
    """When a sample of a request passed its stations, and its counts."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed a part of it."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None below two tokens."""
        if self.first_token is None or self.finished is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished is None else self.finished - self.arrival


@dataclass(kw_only=True)
class Update:
    """News of one sample of a request.

    `text` is what can be shown now: characters not yet complete and text that may become a stop string are held back.
    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` is the stop string or stop token id met (None
    for the end-of-sequence token).  `prefill` is (tokens done, tokens in the prompt) while the prompt is computed.
    `prompt_logprobs` (one entry per prompt token, the first None) and `logits` ([len(logit_rows), vocab] float32) come
    on the update which ends the prefill.  `metrics`, those of this sample, are on the update that has a
    `finish_reason`; `request_finished` is set on the last update of the last sample.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prefill: tuple[int, int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    logits: np.ndarray | None = None
    metrics: RequestMetrics | None = None
    request_finished: bool = False


@dataclass(kw_only=True)
class Completion:
    """One finished (or growing) sample."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(kw_only=True)
class RequestOutput:
    """The answer to a request.  `text`, `token_ids` and `finish_reason` are those of the first sample, `metrics` are
    those of the sample that finished last."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | tuple[int, ...]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    logits: np.ndarray | None = None
    finished: bool = False
    metrics: RequestMetrics
    error: str | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason
