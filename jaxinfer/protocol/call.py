"""What the two endpoints have in common: a checked call, its requests to the engine, and its answer."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.engine.request import Logprob, Request, RequestOutput, SamplingParams, TokenLogprobs, Update
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """An encoded prompt; `text` is None where the client gave token ids and does not want them echoed.

    `first` is its first token, for lists of logprobs: nothing comes before it that could have scored it.
    """

    ids: Sequence[int]
    text: str | None
    first: Logprob


def make_prompt(ids: Sequence[int], text: str | None, tokenizer: Tokenizer | None) -> Prompt:
    """A prompt of these ids."""
    data = tokenizer.token_bytes(ids[0]) if tokenizer is not None and ids else b""
    first = Logprob(token_id=ids[0] if ids else 0, logprob=0.0, text=data.decode("utf-8", "replace"), token_bytes=data)
    return Prompt(ids=ids, text=text, first=first)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What identifies an answer: the request's name, the model's name, and when it began (Unix time, seconds)."""

    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


class Stream(ABC):
    """Turns the engine's updates into the chunks of a streamed answer."""

    def __init__(self, wants_scores: bool) -> None:
        """`wants_scores`: the request asks for logprobs of its prompts."""
        self._wants_scores = wants_scores
        self._scores: dict[int, list[TokenLogprobs | None]] = {}
        self._held: defaultdict[int, list[Update]] = defaultdict(list)

    def feed(self, prompt: int, update: Update) -> list[dict[str, object]]:
        """The chunks that an update of the request made from prompt number `prompt` gives (often one, or none)."""
        if not (update.token_ids or update.text or update.finish_reason):
            return []
        if update.prompt_logprobs is not None:
            self._scores[prompt] = update.prompt_logprobs
        self._held[prompt].append(update)
        # The first sample brings the prompt's logprobs, which the first chunk of every sample carries.
        if self._wants_scores and prompt not in self._scores and update.finish_reason != "abort":
            return []
        return [chunk for ready in self._held.pop(prompt) for chunk in self._chunks(prompt, ready)]

    @abstractmethod
    def _chunks(self, prompt: int, update: Update) -> list[dict[str, object]]:
        """The chunks of one update that has something to show; the prompt's logprobs are in `_scores` by then."""

    @abstractmethod
    def usage(self) -> dict[str, object]:
        """The last chunk, with the usage and no choices (`stream_options.include_usage`)."""


@dataclass(frozen=True, kw_only=True)
class Call(ABC):
    """A checked request body."""

    model: str | None
    params: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @classmethod
    @abstractmethod
    def parse(cls, body: object) -> "Call":
        """Checks a decoded JSON body. Raises ApiError (400)."""

    @abstractmethod
    def encode(self, tokenizer: Tokenizer | None) -> list[Prompt]:
        """Encodes the prompts; slow for long texts. Raises ApiError (400) for text if the model has no tokenizer."""

    @abstractmethod
    def response(
        self, answer: Answer, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]
    ) -> dict[str, object]:
        """The body of the complete answer; `outputs` in the order of the `prompts`."""

    @abstractmethod
    def open_stream(self, answer: Answer, prompts: Sequence[Prompt]) -> Stream:
        """The maker of the chunks of a streamed answer."""

    def requests(self, name: str, prompts: Sequence[Prompt]) -> list[Request]:
        """One engine request per prompt. With one prompt the request's id is `name`, else `name/0`, `name/1` ..."""
        now = time.monotonic()
        ids = [name] if len(prompts) == 1 else [f"{name}/{i}" for i in range(len(prompts))]
        return [
            Request(id=request_id, prompt_ids=list(prompt.ids), params=self.params, prompt=prompt.text, arrival=now)
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object. A prompt counts once, however many samples are drawn from it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
