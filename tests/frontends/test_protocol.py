"""Bodies of OpenAI's API: what is accepted, what is refused and with which words, and what answers look like."""

import json
from typing import Any

import pytest

from jaxinfer.engine.request import (
    Completion,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    Update,
)
from jaxinfer.protocol import ApiError, ChatCall, CompletionCall, load_json, parse_call
from jaxinfer.protocol.call import Answer
from jaxinfer.tokenizer import byte_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
ANSWER = Answer(name="x", model="m", created=7)


def refused(url: str, body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_call(url, body)
    assert caught.value.status == 400
    return caught.value


def scored(text: str, *, data: bytes | None = None, top: int = 0, logprob: float = -0.5) -> TokenLogprobs:
    raw = text.encode() if data is None else data
    chosen = Logprob(token_id=raw[0], logprob=logprob, rank=1, text=raw.decode("utf-8", "replace"), token_bytes=raw)
    others = [
        Logprob(token_id=65 + i, logprob=-1.0 - i, rank=i + 1, text=chr(65 + i), token_bytes=bytes([65 + i]))
        for i in range(top)
    ]
    return TokenLogprobs(chosen=chosen, top=others)


def output(text: str, ids: list[int], **kw: Any) -> RequestOutput:
    completion = Completion(
        index=0, text=text, token_ids=ids, finish_reason="length", logprobs=kw.pop("logprobs", None)
    )
    return RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=kw.pop("prompt_ids", [1, 2]),
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(arrival=0.0),
        **kw,
    )


def test_completion_defaults_are_openais() -> None:
    call = parse_call(COMPLETIONS, {"model": "m", "prompt": "Hello"})
    assert isinstance(call, CompletionCall)
    assert call.prompts == ("Hello",)
    assert (call.params.max_tokens, call.params.n, call.params.temperature) == (16, 1, 1.0)
    assert (call.stream, call.echo, call.params.logprobs) == (False, False, None)


def test_chat_without_max_tokens_may_use_what_the_context_leaves() -> None:
    assert parse_call(CHAT, {"messages": MESSAGES}).params.max_tokens is None
    assert parse_call(CHAT, {"messages": MESSAGES, "max_tokens": 5}).params.max_tokens == 5
    assert parse_call(CHAT, {"messages": MESSAGES, "max_completion_tokens": 6}).params.max_tokens == 6


def test_all_sampling_fields_arrive() -> None:
    sampling = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "seed": 42,
        "prompt_logprobs": 2,
        "logit_bias": {"12": -100},
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    for url, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        params = parse_call(url, {**body, **sampling, "max_tokens": 9}).params
        expected = {
            **sampling,
            "stop": ("a", "b"),
            "stop_token_ids": (7, 8),
            "logit_bias": {12: -100.0},
            "max_tokens": 9,
        }
        assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),
    ],
)
def test_prompt_forms(prompt: object, expected: object) -> None:
    call = parse_call(COMPLETIONS, {"prompt": prompt})
    assert isinstance(call, CompletionCall)
    assert call.prompts == expected


@pytest.mark.parametrize("prompt", [None, [], {}, 3, True, [1, "a"], [[1], "a"], [True], [[1.5]], ["a"] * 2049])
def test_other_prompts_are_refused(prompt: object) -> None:
    error = refused(COMPLETIONS, {"prompt": prompt})
    assert error.param == "prompt"
    assert "expected" in error.message and "got" in error.message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "expected a number, got the string 'hot'"),
        ("temperature", -1, "temperature"),
        ("temperature", True, "expected a number, got true"),
        ("top_p", 0, "top_p"),
        ("n", 0, "expected an integer from 1 to 128, got the number 0"),
        ("n", 1000, "to 128"),
        ("n", 1.5, "expected an integer"),
        ("max_tokens", -1, "max_tokens"),
        ("seed", "x", "seed"),
        ("stream", "yes", "expected true or false"),
        ("stop", [""], "empty string"),
        ("stop", 5, "expected a string"),
        ("logit_bias", {"a": 1}, "token ids as keys"),
        ("logit_bias", {"1": 101}, "from -100 to 100"),
        ("logit_bias", [1], "expected an object"),
        ("stop_token_ids", ["a"], "array of token ids"),
        ("stream_options", {"include_usage": True}, "only allowed with stream=true"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("min_tokens", 999, "min_tokens"),
        ("prompt_logprobs", 1000, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_wrong_values_are_refused_by_name(url: str, field: str, value: object, words: str) -> None:
    base = {"prompt": "x"} if url == COMPLETIONS else {"messages": MESSAGES}
    error = refused(url, {**base, "max_tokens": 8, field: value})
    assert words in error.message
    assert error.param is not None and error.param.startswith(field)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_unknown_fields_are_all_named(url: str) -> None:
    base = {"prompt": "x"} if url == COMPLETIONS else {"messages": MESSAGES}
    error = refused(url, {**base, "temprature": 1, "top_n": 2})
    assert error.message == "unknown fields: temprature, top_n"
    assert error.code == "unknown_field"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("service_tier", "priority"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("stream_options", {"include_obfuscation": True}),
        ("stream_options", {"continuous_usage_stats": True}),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("truncate_prompt_tokens", 100),
        ("use_beam_search", True),
    ],
)
def test_what_is_not_supported_is_refused(field: str, value: object) -> None:
    error = refused(CHAT, {"messages": MESSAGES, "stream": True, field: value})
    assert error.param is not None and error.param.startswith(field)


def test_values_that_ask_for_nothing_pass() -> None:
    idle = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "metadata": None,
        "user": "me",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stream_options": None,
        "audio": None,
        "skip_special_tokens": True,
        "length_penalty": 1.0,
    }
    assert parse_call(CHAT, {"messages": MESSAGES, **idle}).params.n == 1
    assert parse_call(COMPLETIONS, {"prompt": "x", "suffix": None, "best_of": 1, "user": "me"}).params.n == 1


def test_suffix_and_best_of_are_refused() -> None:
    assert refused(COMPLETIONS, {"prompt": "x", "suffix": "y"}).param == "suffix"
    assert refused(COMPLETIONS, {"prompt": "x", "best_of": 2}).param == "best_of"
    assert parse_call(COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 2}).params.n == 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([*MESSAGES, {"role": "user", "content": "x", "mood": "good"}], "messages[1].mood"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: object, param: str) -> None:
    assert refused(CHAT, {"messages": messages}).param == param


def test_messages_are_normalised() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    history = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    call = parse_call(CHAT, {"messages": [{"role": "developer", "content": parts}, history]})
    assert isinstance(call, ChatCall)
    assert call.messages == [{"role": "system", "content": "ab"}, {"role": "assistant", "content": "x"}]


def test_chat_is_rendered_by_the_template_with_one_bos() -> None:
    tokenizer = byte_tokenizer()
    (prompt,) = parse_call(CHAT, {"messages": MESSAGES}).encode(tokenizer)
    assert list(prompt.ids) == [256, 258, *b"Hi", 261, 259]
    (prompt,) = parse_call(CHAT, {"messages": MESSAGES, "add_generation_prompt": False}).encode(tokenizer)
    assert list(prompt.ids) == [256, 258, *b"Hi", 261]
    with pytest.raises(ApiError, match="add_generation_prompt"):
        parse_call(CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": 1}}).encode(tokenizer)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ApiError, match="no tokenizer"):
        parse_call(COMPLETIONS, {"prompt": "x"}).encode(None)
    with pytest.raises(ApiError, match="no tokenizer"):
        parse_call(CHAT, {"messages": MESSAGES}).encode(None)
    (prompt,) = parse_call(COMPLETIONS, {"prompt": [5, 6]}).encode(None)
    assert list(prompt.ids) == [5, 6]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1} x', b"[" * 200_000],
)
def test_json_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        load_json(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_body_must_be_an_object(body: object) -> None:
    assert "expected a JSON object" in refused(COMPLETIONS, body).message


def test_requests_of_several_prompts_have_names_of_their_own() -> None:
    call = parse_call(COMPLETIONS, {"prompt": ["a", "b"]})
    prompts = call.encode(byte_tokenizer())
    assert [r.id for r in call.requests("name", prompts)] == ["name/0", "name/1"]
    assert [r.id for r in call.requests("name", prompts[:1])] == ["name"]
    assert list(prompts[1].ids) == [256, *b"b"]


def test_completion_logprobs_with_echo() -> None:
    call = parse_call(COMPLETIONS, {"prompt": "éa", "echo": True, "logprobs": 1, "max_tokens": 2})
    assert call.params.prompt_logprobs == 1
    prompts = call.encode(byte_tokenizer())
    halves = [scored("", data=b"\xc3"), scored("", data=b"\xa9")]
    result = output(
        "xy",
        [120, 121],
        prompt_ids=prompts[0].ids,
        prompt_logprobs=[None, *halves, scored("a")],
        logprobs=[scored("x", top=1, logprob=float("-inf")), scored("y", top=1)],
    )
    body: Any = call.response(ANSWER, prompts, [result])
    choice = body["choices"][0]
    assert choice["text"] == "éaxy"
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "bytes:\\xc3", "bytes:\\xa9", "a", "x", "y"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -9999.0, -0.5]
    assert choice["logprobs"]["top_logprobs"][-1] == {"A": -1.0, "y": -0.5}
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert "prompt_logprobs" not in choice
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    json.dumps(body, allow_nan=False)


def test_max_tokens_zero_only_scores_the_prompt() -> None:
    assert refused(COMPLETIONS, {"prompt": "x", "max_tokens": 0}).param == "max_tokens"
    call = parse_call(COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0})
    prompts = call.encode(byte_tokenizer())
    result = output("z", [122], prompt_logprobs=[None, scored("a"), scored("b")], logprobs=[scored("z")])
    body: Any = call.response(ANSWER, prompts, [result])
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["logprobs"]["tokens"] == ["<|bos|>", "a", "b"]
    assert body["usage"]["completion_tokens"] == 0


def test_chat_logprobs_carry_bytes() -> None:
    call = parse_call(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2})
    assert call.params.logprobs == 2
    result = output("x", [120], logprobs=[scored("", data=b"\xc3", top=2)])
    body: Any = call.response(ANSWER, call.encode(byte_tokenizer()), [result])
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xC3])
    assert [top["token"] for top in entry["top_logprobs"]] == ["A", "B"]


def test_models_without_tokenizer_answer_with_ids() -> None:
    call = parse_call(COMPLETIONS, {"prompt": [5, 6], "return_token_ids": True, "logprobs": 0, "prompt_logprobs": 0})
    bare = TokenLogprobs(chosen=Logprob(token_id=9, logprob=-1.0, rank=2))
    result = output("", [9], prompt_ids=[5, 6], logprobs=[bare], prompt_logprobs=[None, bare])
    body: Any = call.response(ANSWER, call.encode(None), [result])
    choice = body["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([9], [5, 6])
    assert choice["logprobs"]["tokens"] == ["token_id:9"]
    assert choice["prompt_logprobs"] == [None, {"9": {"logprob": -1.0, "rank": 2, "decoded_token": "token_id:9"}}]


def test_chat_stream_begins_with_the_role_and_counts_usage() -> None:
    call = parse_call(CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "n": 2})
    stream = call.open_stream(ANSWER, call.encode(byte_tokenizer()))
    assert stream.feed(0, Update(request_id="x", prefill=(3, 6))) == []
    first: Any = stream.feed(0, Update(request_id="x", token_ids=[97], text="a"))
    assert [chunk["choices"][0]["delta"] for chunk in first] == [{"role": "assistant", "content": ""}, {"content": "a"}]
    other: Any = stream.feed(0, Update(request_id="x", index=1, token_ids=[195], text=""))
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]["role"]) for c in other] == [(1, "assistant")]
    last: Any = stream.feed(0, Update(request_id="x", token_ids=[98], text="", finish_reason="stop"))
    assert last[0]["choices"][0]["finish_reason"] == "stop" and last[0]["usage"] is None
    usage: Any = stream.usage()
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}


def test_completion_stream_echoes_first_and_numbers_choices_over_prompts() -> None:
    body = {"prompt": ["ab", "c"], "stream": True, "echo": True, "n": 2, "logprobs": 0}
    call = parse_call(COMPLETIONS, body)
    stream = call.open_stream(ANSWER, call.encode(byte_tokenizer()))
    tokens = [None, scored("a"), scored("b")]
    update = Update(request_id="x/0", token_ids=[120], text="x", logprobs=[scored("x")], prompt_logprobs=tokens)
    first: Any = stream.feed(0, update)
    assert first[0]["choices"][0]["text"] == "abx"
    assert first[0]["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2]  # <|bos|> is not in the text
    more: Any = stream.feed(0, Update(request_id="x/0", token_ids=[121], text="y", logprobs=[scored("y")]))
    assert more[0]["choices"][0]["logprobs"]["text_offset"] == [3]
    other: Any = stream.feed(1, Update(request_id="x/1", index=1, token_ids=[122], text="z", prompt_logprobs=[None]))
    assert (other[0]["choices"][0]["index"], other[0]["choices"][0]["text"]) == (3, "cz")
