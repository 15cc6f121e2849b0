"""From sampled tokens to what is handed out: text, stop strings, log-probabilities, whole answers."""

import numpy as np

from jaxinfer.engine.request import (
    Completion,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    Update,
)
from jaxinfer.engine.step import PrefillSegment, PromptRows, Sampled
from jaxinfer.tokenizer import Tokenizer


class TextStream:
    """The text of one growing output, watched for stop strings.

    Text that may be the beginning of a stop string is held back until that is decided, so what has been handed out
    never has to be taken back.  The stop string that is complete first ends the text, wherever the token borders lie.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...]):
        self._decoder = None if tokenizer is None else tokenizer.incremental_decoder()
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._first_characters = {stop[0] for stop in stops}
        self._held = ""

    def push(self, token: int, may_stop: bool) -> tuple[str, str | None]:
        """The text that can be shown after `token`, and the stop string that ends it, if one does.

        With `may_stop` False the token's text is not looked at.
        """
        if self._decoder is None:
            return "", None
        text = self._held + self._decoder.push(token)
        self._held = ""
        if not self._stops or not may_stop:
            return text, None
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            return text[:at], stop
        shown = self._undecided(text)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The text held back, at an end that no stop string made.  An incomplete character is dropped."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Where the longest ending of `text` begins that is the beginning of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first_characters and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)


def logprob(tokenizer: Tokenizer | None, token: int, value: float, rank: int | None) -> Logprob:
    """A token's log-probability with its text; without a tokenizer the text is empty."""
    data = b"" if tokenizer is None else tokenizer.token_bytes(token)
    return Logprob(
        token_id=token, logprob=value, rank=rank, text=data.decode("utf-8", errors="replace"), token_bytes=data
    )


def sampled_logprobs(tokenizer: Tokenizer | None, sampled: Sampled, count: int) -> TokenLogprobs:
    """What `SamplingParams.logprobs = count` reports of a sampled token.  Raises ValueError if the runner gave none."""
    if sampled.logprob is None:
        raise ValueError("expected a runner that gives the logprob of a token whose request asks for it, got None")
    return TokenLogprobs(
        chosen=logprob(tokenizer, sampled.token_id, sampled.logprob, sampled.rank),
        top=[logprob(tokenizer, token, value, i + 1) for i, (token, value) in enumerate(sampled.top[:count])],
    )


class PromptScores:
    """Gathers the log-probabilities of a prompt's tokens, segment by segment.

    `entries[i]` belongs to prompt token i; the first token has none.  A prompt that is computed again begins anew.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: list[int] | tuple[int, ...], count: int):
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._count = count
        self.entries: list[TokenLogprobs | None] = [None]

    def add(self, rows: PromptRows) -> None:
        """Adds the rows of a segment; rows that score tokens behind the prompt are left out."""
        del self.entries[rows.first_row + 1 :]
        count = min(len(rows.logprobs), len(self._prompt_ids) - 1 - rows.first_row)
        values, ranks = rows.logprobs[:count].tolist(), rows.ranks[:count].tolist()
        ids, tops = rows.top_ids[:count, : self._count].tolist(), rows.top_logprobs[:count, : self._count].tolist()
        for i in range(count):
            chosen = logprob(self._tokenizer, self._prompt_ids[rows.first_row + 1 + i], values[i], ranks[i])
            top = [
                logprob(self._tokenizer, token, value, k + 1)
                for k, (token, value) in enumerate(zip(ids[i], tops[i], strict=True))
            ]
            self.entries.append(TokenLogprobs(chosen=chosen, top=top))


class LogitRows:
    """Gathers the teacher-forced logits that a request wants: `values` `[len(logit_rows), vocab]` float32."""

    def __init__(self, rows: tuple[int, ...], vocab_size: int):
        self._rows = np.asarray(rows)
        self.values = np.empty((len(rows), vocab_size), np.float32)

    def add(self, segment: PrefillSegment, logits: np.ndarray) -> None:
        """Puts the logits of a segment's rows, given in the order of `logit_rows`, in their places."""
        self.values[(self._rows >= segment.start) & (self._rows < segment.end)] = logits


class Accumulator:
    """Turns the updates of one request into its `RequestOutput`."""

    def __init__(self, request: Request):
        self.request = request
        wants_logprobs = request.params.logprobs is not None
        outputs = [Completion(index=i, logprobs=[] if wants_logprobs else None) for i in range(request.params.n)]
        self.output = RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            outputs=outputs,
            metrics=RequestMetrics(arrival=request.arrival, prompt_tokens=len(request.prompt_ids)),
        )

    @property
    def finished(self) -> bool:
        return self.output.finished

    def add(self, update: Update) -> RequestOutput:
        """Adds an update of this request; returns the answer so far."""
        output, completion = self.output, self.output.outputs[update.index]
        completion.token_ids.extend(update.token_ids)
        completion.text += update.text
        if completion.logprobs is not None:
            completion.logprobs.extend(update.logprobs or [])
        if update.prompt_logprobs is not None:
            output.prompt_logprobs = update.prompt_logprobs
        if update.logits is not None:
            output.logits = update.logits
        if update.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = update.finish_reason, update.stop_reason
        if update.metrics is not None:
            output.metrics = update.metrics
        output.error = output.error or update.error
        output.finished = update.request_finished
        return output
