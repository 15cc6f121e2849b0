"""`/v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.engine.request import Completion, RequestOutput, Update
from jaxinfer.protocol.call import Answer, Call, Prompt, Stream, make_prompt, usage
from jaxinfer.protocol.errors import bad_request
from jaxinfer.protocol.fields import Fields, check_text, describe, take_ignored, take_sampling, take_stream_options
from jaxinfer.protocol.logprobs import chat_logprobs, prompt_logprobs
from jaxinfer.tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class ChatCall(Call):
    """A checked body of `/v1/chat/completions`."""

    messages: list[dict[str, str]]
    template_arguments: Mapping[str, object]
    add_generation_prompt: bool

    @classmethod
    def parse(cls, body: object) -> "ChatCall":
        """Checks a decoded JSON body. Raises ApiError (400)."""
        fields = Fields(body)
        model = fields.text("model")
        messages = check_messages(fields.take("messages"))
        stream = fields.boolean("stream")
        include_usage = take_stream_options(fields, stream)
        params = take_sampling(
            fields,
            max_tokens=_take_max_tokens(fields),
            logprobs=_take_logprobs(fields),
            prompt_logprobs=fields.integer("prompt_logprobs", 0),
        )
        template_arguments = fields.take("chat_template_kwargs")
        if not isinstance(template_arguments, dict | None):
            raise bad_request(
                f"chat_template_kwargs: expected an object, got {describe(template_arguments)}",
                param="chat_template_kwargs",
            )
        add_generation_prompt = fields.boolean("add_generation_prompt", default=True)
        return_token_ids = fields.boolean("return_token_ids")
        _refuse_unsupported(fields)
        take_ignored(fields)
        fields.end()
        return cls(
            model=model,
            params=params,
            stream=stream,
            include_usage=include_usage,
            return_token_ids=return_token_ids,
            messages=messages,
            template_arguments=template_arguments or {},
            add_generation_prompt=add_generation_prompt,
        )

    def encode(self, tokenizer: Tokenizer | None) -> list[Prompt]:
        """Renders and encodes the conversation. Raises ApiError (400) without tokenizer or if the template refuses."""
        if tokenizer is None:
            raise bad_request(
                "messages: this model has no tokenizer: use /v1/completions with token ids", param="messages"
            )
        try:
            text = tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=self.add_generation_prompt, **self.template_arguments
            )
        except (ValueError, TypeError) as error:  # TypeError: an argument of a name that is taken
            raise bad_request(f"messages: {error}", param="messages") from None
        return [make_prompt(tokenizer.encode(text, add_special_tokens=False), text, tokenizer)]

    def response(
        self, answer: Answer, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]
    ) -> dict[str, object]:
        """The body of the complete answer."""
        (output,) = outputs
        body = _head(answer, "chat.completion") | {
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": usage(len(output.prompt_token_ids), sum(len(c.token_ids) for c in output.outputs)),
        }
        if self.params.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self.return_token_ids:
            body["prompt_token_ids"] = list(output.prompt_token_ids)
        return body

    def _choice(self, completion: Completion) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.params.logprobs is not None:
            choice["logprobs"] = chat_logprobs(completion.logprobs or [])
        if self.return_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def open_stream(self, answer: Answer, prompts: Sequence[Prompt]) -> Stream:
        """The maker of the chunks of a streamed answer."""
        return _ChatStream(self, answer, prompts)


class _ChatStream(Stream):
    def __init__(self, call: ChatCall, answer: Answer, prompts: Sequence[Prompt]) -> None:
        super().__init__(wants_scores=call.params.prompt_logprobs is not None)
        self._call = call
        self._answer = answer
        self._prompts = prompts
        self._begun: set[int] = set()
        self._generated = 0

    def _chunks(self, prompt: int, update: Update) -> list[dict[str, object]]:
        call, index = self._call, update.index
        chunks: list[dict[str, object]] = []
        if index not in self._begun:
            # Not sent before the first token is there: clients take the first chunk for the time to first token.
            self._begun.add(index)
            role = self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            if call.params.prompt_logprobs is not None:
                role["prompt_logprobs"] = prompt_logprobs(self._scores.get(prompt) or [])
            if call.return_token_ids:
                role["prompt_token_ids"] = list(self._prompts[prompt].ids)
            chunks.append(role)
        self._generated += len(update.token_ids)
        delta = {"content": update.text} if update.text else {}
        choice: dict[str, object] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        if call.params.logprobs is not None and update.logprobs:
            choice["logprobs"] = chat_logprobs(update.logprobs)
        if call.return_token_ids:
            choice["token_ids"] = list(update.token_ids)
        # Without any of these the text is held back: it may become a stop string, or lacks the rest of a character.
        if delta or choice["logprobs"] or update.finish_reason or call.return_token_ids:
            chunks.append(self._chunk(choice))
        return chunks

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        chunk = _head(self._answer, "chat.completion.chunk") | {"choices": [choice]}
        return chunk | {"usage": None} if self._call.include_usage else chunk

    def usage(self) -> dict[str, object]:
        tokens = usage(sum(len(prompt.ids) for prompt in self._prompts), self._generated)
        return _head(self._answer, "chat.completion.chunk") | {"choices": [], "usage": tokens}


def _head(answer: Answer, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": answer.created, "model": answer.model}


def check_messages(value: object) -> list[dict[str, str]]:
    """Checks a conversation and returns it with plain texts as contents (text parts joined) and the role `developer`
    as `system`, its older name, which is the one that chat templates know. Raises ApiError (400)."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"messages: expected a non-empty array of messages, got {describe(value)}", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: object, where: str) -> dict[str, str]:
    fields = Fields(value, where)
    role = fields.text("role")
    if role in ("tool", "function"):
        raise bad_request(f"{where}.role: tools are not supported", param=f"{where}.role", code="unsupported_value")
    if role not in _ROLES:
        raise bad_request(
            f"{where}.role: expected one of {', '.join(_ROLES)}, got {describe(role)}", param=f"{where}.role"
        )
    message = {
        "role": "system" if role == "developer" else role,
        "content": _content(fields.take("content"), f"{where}.content"),
    }
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    # An answer of this server that a client sends back as it came carries these, empty.
    fields.fixed("refusal", why="refusals are not supported")
    fields.fixed("audio", why="audio is not supported")
    fields.fixed("annotations", [], why="annotations are not supported")
    fields.fixed("tool_calls", [], why="tools are not supported")
    fields.fixed("function_call", why="tools are not supported")
    fields.end()
    return message


def _content(value: object, where: str) -> str:
    if not isinstance(value, list):
        return check_text(where, value)
    texts: list[str] = []
    for i, item in enumerate(value):
        part = Fields(item, f"{where}[{i}]")
        kind = part.text("type")
        if kind != "text":
            raise bad_request(
                f'{where}[{i}].type: only parts of type "text" are supported, got {describe(kind)}',
                param=f"{where}[{i}].type",
                code="unsupported_value",
            )
        texts.append(check_text(part.path("text"), part.take("text")))
        part.end()
    return "".join(texts)


def _take_max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens`, or its older name `max_tokens`; None means what the context leaves."""
    new, old = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    if new is not None and old is not None and new != old:
        raise bad_request(
            f"max_completion_tokens ({new}) and max_tokens ({old}) are one thing: send only one",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _take_logprobs(fields: Fields) -> int | None:
    """`logprobs` (a boolean here) and `top_logprobs`: the number of alternatives, or None for no logprobs."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0)
    if top and not wanted:
        raise bad_request("top_logprobs: only allowed with logprobs=true", param="top_logprobs")
    return (top or 0) if wanted else None


def _refuse_unsupported(fields: Fields) -> None:
    """Takes the fields of OpenAI's API that this server cannot honour; only values that ask for nothing pass."""
    fields.fixed("tools", [], why="tools are not supported")
    fields.fixed("tool_choice", "none", "auto", why="tools are not supported")
    fields.fixed("parallel_tool_calls", True, False, why="tools are not supported")
    fields.fixed("functions", [], why="tools are not supported")
    fields.fixed("function_call", "none", "auto", why="tools are not supported")
    fields.fixed("response_format", {"type": "text"}, why='only the format {"type": "text"} is supported')
    fields.fixed("modalities", ["text"], why='only the modality "text" is supported')
    fields.fixed("audio", why="audio is not supported")
    fields.fixed("prediction", why="predicted outputs are not supported")
    fields.fixed(
        "reasoning_effort", why="reasoning effort cannot be set; a template may take it in chat_template_kwargs"
    )
    fields.fixed("verbosity", why="verbosity cannot be set")
    fields.fixed("web_search_options", why="web search is not supported")
    fields.fixed("service_tier", "auto", "default", why="there is one service tier")
    fields.fixed("store", False, why="answers are not stored")
    fields.fixed("metadata", {}, why="answers are not stored, so metadata has no place to go")
