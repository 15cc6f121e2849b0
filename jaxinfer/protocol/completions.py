"""`/v1/completions`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.engine.request import Completion, Logprob, RequestOutput, TokenLogprobs, Update
from jaxinfer.protocol.call import Answer, Call, Prompt, Stream, make_prompt, usage
from jaxinfer.protocol.errors import bad_request
from jaxinfer.protocol.fields import (
    Fields,
    check_text,
    describe,
    is_integer,
    take_ignored,
    take_sampling,
    take_stream_options,
)
from jaxinfer.protocol.logprobs import CompletionLogprobs, prompt_logprobs
from jaxinfer.tokenizer import Tokenizer

MAX_PROMPTS = 2048
"""Most prompts in one body: OpenAI's limit."""


@dataclass(frozen=True, kw_only=True)
class CompletionCall(Call):
    """A checked body of `/v1/completions`."""

    prompts: tuple[str | tuple[int, ...], ...]
    add_special_tokens: bool
    echo: bool
    no_output: bool
    """`max_tokens: 0`: only the echoed prompt (and its logprobs) is wanted. The engine still samples one token."""
    prompt_logprobs: bool
    """vLLM's `prompt_logprobs` are wanted (`echo` with `logprobs` makes the engine compute them as well)."""

    @classmethod
    def parse(cls, body: object) -> "CompletionCall":
        """Checks a decoded JSON body. Raises ApiError (400)."""
        fields = Fields(body)
        model = fields.text("model")
        prompts = _prompts(fields.take("prompt"))
        stream = fields.boolean("stream")
        include_usage = take_stream_options(fields, stream)
        echo = fields.boolean("echo")
        logprobs = fields.integer("logprobs", 0)
        asked_prompt_logprobs = fields.integer("prompt_logprobs", 0)
        limit = fields.integer("max_tokens", 0)
        max_tokens = 16 if limit is None else limit
        if max_tokens == 0 and not echo:
            raise bad_request("max_tokens: 0 is only allowed with echo=true", param="max_tokens")
        computed_prompt_logprobs = asked_prompt_logprobs
        if echo and logprobs is not None:
            computed_prompt_logprobs = max(logprobs, asked_prompt_logprobs or 0)
        best_of = fields.integer("best_of", 1)
        params = take_sampling(
            fields, max_tokens=max(max_tokens, 1), logprobs=logprobs, prompt_logprobs=computed_prompt_logprobs
        )
        if best_of not in (None, params.n):
            raise bad_request(f"best_of: expected the value of n ({params.n}), got {best_of}", param="best_of")
        fields.fixed("suffix", "", why="insertion before a suffix is not supported")
        take_ignored(fields)
        return_token_ids = fields.boolean("return_token_ids")
        add_special_tokens = fields.boolean("add_special_tokens", default=True)
        fields.end()
        return cls(
            model=model,
            params=params,
            stream=stream,
            include_usage=include_usage,
            return_token_ids=return_token_ids,
            prompts=prompts,
            add_special_tokens=add_special_tokens,
            echo=echo,
            no_output=max_tokens == 0,
            prompt_logprobs=asked_prompt_logprobs is not None,
        )

    def encode(self, tokenizer: Tokenizer | None) -> list[Prompt]:
        """Encodes the text prompts. Raises ApiError (400) for text when there is no tokenizer."""
        return [self._encode(prompt, tokenizer) for prompt in self.prompts]

    def _encode(self, prompt: str | tuple[int, ...], tokenizer: Tokenizer | None) -> Prompt:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise bad_request("prompt: this model has no tokenizer: expected token ids, got text", param="prompt")
            return make_prompt(tokenizer.encode(prompt, add_special_tokens=self.add_special_tokens), prompt, tokenizer)
        text = tokenizer.decode(prompt, skip_special_tokens=False) if self.echo and tokenizer is not None else None
        return make_prompt(prompt, text, tokenizer)

    def response(
        self, answer: Answer, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]
    ) -> dict[str, object]:
        """The body of the complete answer."""
        n = self.params.n
        choices = [
            self._choice(prompts[i], i * n + completion.index, output, completion)
            for i, output in enumerate(outputs)
            for completion in output.outputs
        ]
        generated = 0 if self.no_output else sum(len(c.token_ids) for output in outputs for c in output.outputs)
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return _head(answer) | {"choices": choices, "usage": usage(prompt_tokens, generated)}

    def _choice(self, prompt: Prompt, index: int, output: RequestOutput, completion: Completion) -> dict[str, object]:
        text = "" if self.no_output else completion.text
        tokens: list[TokenLogprobs | Logprob] = [] if self.no_output else list(completion.logprobs or [])
        if self.echo:
            text = (prompt.text or "") + text
            tokens = _echoed(prompt, output.prompt_logprobs) + tokens
        choice: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.params.logprobs is not None:
            choice["logprobs"] = CompletionLogprobs().take(tokens, text)
        if self.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choice["token_ids"] = [] if self.no_output else list(completion.token_ids)
        return choice

    def open_stream(self, answer: Answer, prompts: Sequence[Prompt]) -> Stream:
        """The maker of the chunks of a streamed answer."""
        return _CompletionStream(self, answer, prompts)


class _CompletionStream(Stream):
    def __init__(self, call: CompletionCall, answer: Answer, prompts: Sequence[Prompt]) -> None:
        super().__init__(wants_scores=call.params.prompt_logprobs is not None)
        self._call = call
        self._answer = answer
        self._prompts = prompts
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)
        self._begun: set[int] = set()
        self._generated = 0

    def _chunks(self, prompt: int, update: Update) -> list[dict[str, object]]:
        call = self._call
        index = prompt * call.params.n + update.index
        text, ids = (update.text, list(update.token_ids)) if not call.no_output else ("", [])
        tokens: list[TokenLogprobs | Logprob] = list(update.logprobs or []) if not call.no_output else []
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None}
        if index not in self._begun:
            self._begun.add(index)
            if call.echo:
                text = (self._prompts[prompt].text or "") + text
                tokens = _echoed(self._prompts[prompt], self._scores.get(prompt)) + tokens
            if call.prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(self._scores.get(prompt) or [])
            if call.return_token_ids:
                choice["prompt_token_ids"] = list(self._prompts[prompt].ids)
        if call.params.logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs[index].take(tokens, text)
        if call.return_token_ids:
            choice["token_ids"] = ids
        self._generated += len(ids)
        choice |= {"text": text, "finish_reason": update.finish_reason, "stop_reason": update.stop_reason}
        if not (text or tokens or update.finish_reason or call.return_token_ids):
            return []  # the text is held back: it may become a stop string, or lacks the rest of a character
        chunk = _head(self._answer) | {"choices": [choice]}
        return [chunk | {"usage": None} if call.include_usage else chunk]

    def usage(self) -> dict[str, object]:
        prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        return _head(self._answer) | {"choices": [], "usage": usage(prompt_tokens, self._generated)}


def _head(answer: Answer) -> dict[str, object]:
    return {"id": f"cmpl-{answer.name}", "object": "text_completion", "created": answer.created, "model": answer.model}


def _echoed(prompt: Prompt, tokens: Sequence[TokenLogprobs | None] | None) -> list[TokenLogprobs | Logprob]:
    """The tokens of an echoed prompt, if their logprobs were asked for."""
    return [prompt.first if token is None else token for token in tokens or []]


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """`prompt` in its four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return (check_text("prompt", value),)
    if not isinstance(value, list) or not value:
        raise _wrong_prompt(value)
    if all(is_integer(item) for item in value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"prompt: expected at most {MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(check_text(f"prompt[{i}]", item) for i, item in enumerate(value))
    if all(isinstance(item, list) and all(is_integer(i) for i in item) for item in value):
        return tuple(tuple(item) for item in value)
    raise _wrong_prompt(value)


def _wrong_prompt(value: object) -> Exception:
    forms = "a string, an array of strings, an array of token ids or an array of such arrays"
    got = "nothing" if value is None else "an array of mixed or other values" if value else "an empty array"
    got = describe(value) if not isinstance(value, list | None) else got
    return bad_request(f"prompt: expected {forms}, got {got}", param="prompt")
