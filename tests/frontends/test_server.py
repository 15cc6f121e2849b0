"""The endpoints over a real connection, with OpenAI's own client and with raw HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.frontends.fakes import MODEL, expected_ids, fake_engine
from tests.frontends.live import Live, eventually, live

GREEDY = {"temperature": 0}
HI = [256, 258, *b"Hi", 261, 259]


def text(ids: list[int]) -> str:
    return bytes(ids).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_engine()) as running:
        yield running
        assert eventually(running.idle), "the tests left something in the engine"


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events; checks that it ends as it must."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def test_models(server: Live) -> None:
    (model,) = server.openai.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert server.openai.models.retrieve(MODEL).id == MODEL
    assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError, match="expected 'fake'"):
        server.openai.models.retrieve("other/model")


def test_completion(server: Live) -> None:
    answer = server.openai.completions.create(model=MODEL, prompt="abc", max_tokens=7, temperature=0)
    (choice,) = answer.choices
    assert choice.text == text(expected_ids([256, *b"abc"], 7))
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == MODEL and answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 7, 11)


def test_completion_of_token_ids_and_of_several_prompts(server: Live) -> None:
    answer = server.openai.completions.create(model=MODEL, prompt=[[256, 1], [7, 8, 9]], max_tokens=3, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == text(expected_ids([256, 1], 3))
    assert answer.choices[1].text == text(expected_ids([7, 8, 9], 3))
    assert answer.usage is not None and answer.usage.total_tokens == 2 + 3 + 3 + 3


def test_chat(server: Live) -> None:
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=5, temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text(expected_ids(HI, 5))
    assert choice.finish_reason == "length" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(HI)


def test_chat_stream(server: Live) -> None:
    chunks = list(
        server.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[0].choices[0].delta.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text(expected_ids(HI, 6))
    assert sum(map(bool, pieces)) == 6, "each token is sent as it comes"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(HI), 6)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_stream_of_several_samples(server: Live) -> None:
    stream = server.openai.completions.create(
        model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=4, seed=3, stream=True, logprobs=1
    )
    texts = {0: "", 1: "", 2: "", 3: ""}
    tokens: dict[int, int] = dict.fromkeys(texts, 0)
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += len(choice.logprobs.tokens or []) if choice.logprobs else 0
    whole = server.openai.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=4, seed=3)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert tokens == dict.fromkeys(texts, 4)
    assert texts[0] != texts[1], "samples of one prompt have seeds of their own"


def test_seed_repeats_and_stop_strings_cut(server: Live) -> None:
    first, second = (server.completion(prompt="abc", seed=5, max_tokens=12).json()["choices"][0] for _ in range(2))
    assert first["text"] == second["text"] and len(first["text"]) == 12
    stop = first["text"][4:6]
    cut = server.completion(prompt="abc", seed=5, max_tokens=12, stop=stop).json()["choices"][0]
    assert cut["text"] == first["text"][: first["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    streamed = events(server.completion(prompt="abc", seed=5, max_tokens=12, stop=stop, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == cut["text"]
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


def test_logprobs_through_the_client(server: Live) -> None:
    chat = server.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    expected = text(expected_ids(HI, 2))
    assert "".join(token.token for token in logprobs.content) == expected
    assert [token.logprob for token in logprobs.content] == [-0.25, -0.25]
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2]
    assert bytes(logprobs.content[0].bytes or []).decode() == expected[0]


@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_whole_and_streamed(server: Live, n: int) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 2, "n": n, **GREEDY}
    for choice in server.completion(**body).json()["choices"]:
        assert choice["text"] == "abc" + text(expected_ids([256, *b"abc"], 2))
        assert choice["logprobs"]["tokens"] == ["<|bos|>", *choice["text"]]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.25, -0.25]
        streamed = [
            event["choices"][0]
            for event in events(server.completion(**body, stream=True))
            if event["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in streamed) == choice["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in streamed for item in part["logprobs"][key]] == choice["logprobs"][key]


def test_vllms_extra_fields(server: Live) -> None:
    answer = server.openai.completions.create(
        model=MODEL,
        prompt="abc",
        max_tokens=4,
        extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "prompt_logprobs": 1},
    )
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["prompt_logprobs"]) == 4
    body = server.completion(prompt=[1, 2], max_tokens=3, return_token_ids=True, **GREEDY).json()
    assert body["choices"][0]["token_ids"] == expected_ids([1, 2], 3)
    stopped = server.completion(
        prompt=[1, 2], max_tokens=3, stop_token_ids=[expected_ids([1, 2], 1)[0]], **GREEDY
    ).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_errors_have_openais_form(server: Live) -> None:
    cases = [
        (server.client.get("/nowhere"), 404, "there is no GET /nowhere"),
        (server.client.get("/v1/completions"), 405, "expected POST"),
        (server.client.post("/v1/completions", content=b"{"), 400, "not valid JSON"),
        (server.client.post("/v1/completions", content=b"[1]"), 400, "expected a JSON object"),
        (server.completion(prompt="x", foo=1, bar=2), 400, "unknown fields: bar, foo"),
        (server.completion(prompt="x", model="gpt-4"), 404, "expected 'fake'"),
        (server.completion(prompt="x" * 9000, max_tokens=5), 400, "8192"),
        (server.completion(prompt="x" * 9000, max_tokens=5), 400, "9001"),
        (server.completion(prompt="x", max_tokens=9000), 400, "9000"),
        (server.completion(prompt=[999]), 400, "999"),
        (server.completion(prompt=["ok", ""], max_tokens=9000), 400, "9000"),
        (server.chat(tools=[{"type": "function"}]), 400, "tools are not supported"),
        (server.chat(response_format={"type": "json_object"}), 400, "response_format"),
        (server.client.post("/v1/chat/completions", json={"messages": []}), 400, "messages"),
        (server.client.delete("/v1/requests/none"), 404, "no running request named 'none'"),
    ]
    for response, status, words in cases:
        error = response.json()["error"]
        assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"})
        assert words in error["message"], error
        assert response.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.openai.completions.create(model=MODEL, prompt="x", temperature=-1)


def test_a_stream_that_is_refused_is_a_400(server: Live) -> None:
    response = server.completion(prompt="x" * 9000, stream=True)
    assert response.status_code == 400 and "8192" in response.json()["error"]["message"]


def test_request_id_comes_back_and_is_unique_while_it_runs(server: Live) -> None:
    named = {"X-Request-Id": "mine.1"}
    answer = server.client.post("/v1/completions", json={"prompt": "x"}, headers=named)
    assert answer.headers["x-request-id"] == "mine.1" and answer.json()["id"] == "cmpl-mine.1"
    server.runner.go.clear()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}, headers=named) as first:
        assert first.status_code == 200
        second = server.client.post("/v1/completions", json={"prompt": "y"}, headers=named)
        server.runner.go.set()
        assert second.status_code == 409 and "mine.1" in second.json()["error"]["message"]
        first.read()
    again = server.client.post("/v1/completions", json={"prompt": "x"}, headers=named)
    assert again.status_code == 200
    wrong = server.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "a b"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "X-Request-Id"


def test_health_ready_and_metrics(server: Live) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.completion(prompt="abc", max_tokens=4)
    page = server.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in page.text.splitlines()
        if not line.startswith("#")
    }
    assert values["jaxinfer_ready"] == 1
    assert values["jaxinfer_prompt_tokens_total"] >= 4
    assert values["jaxinfer_generation_tokens_total"] >= 4
    assert values["jaxinfer_time_to_first_token_seconds_count"] >= 1
    assert values["jaxinfer_time_per_output_token_seconds_count"] >= 1
    assert values["jaxinfer_e2e_request_latency_seconds_count"] >= 1
    assert values['jaxinfer_requests_finished_total{reason="length"}'] >= 1
    assert values["jaxinfer_compilations_after_ready_total"] == 0
    for name in ("requests_running", "requests_waiting", "kv_page_usage_ratio", "preemptions_total", "faults_total"):
        assert f"jaxinfer_{name}" in values


def test_a_fault_of_the_engine_is_an_error_and_the_server_goes_on(server: Live) -> None:
    def fail(step: object) -> None:
        raise MemoryError("out of memory: asked for 7 GB")

    server.runner.fail = fail
    try:
        whole = server.completion(prompt="abc")
        streamed = server.completion(prompt="abc", stream=True)
    finally:
        server.runner.fail = lambda step: None
    assert whole.status_code == 500 and "asked for 7 GB" in whole.json()["error"]["message"]
    assert "asked for 7 GB" in events(streamed)[-1]["error"]["message"]
    assert server.completion(prompt="abc").status_code == 200


def test_a_model_without_tokenizer_takes_token_ids_only() -> None:
    with live(fake_engine(tokenizer=None)) as server:
        refused = server.completion(prompt="text")
        assert refused.status_code == 400 and "no tokenizer" in refused.json()["error"]["message"]
        assert server.chat().status_code == 400
        body = server.completion(prompt=[1, 2, 3], max_tokens=2, return_token_ids=True, **GREEDY).json()
        assert body["choices"][0]["token_ids"] == expected_ids([1, 2, 3], 2)


def test_before_the_engine_is_there() -> None:
    with live(None) as server:
        assert server.client.get("/health").status_code == 200
        ready = server.client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        for response in (
            server.completion(prompt="x"),
            server.client.get("/v1/models"),
            server.client.delete("/v1/requests/x"),
        ):
            assert response.status_code == 503 and "loading" in response.json()["error"]["message"]
        assert "jaxinfer_ready 0" in server.client.get("/metrics").text


def test_api_key_and_model_name() -> None:
    with live(fake_engine(), api_key="secret", served_model_name="served") as server:
        assert server.openai.completions.create(model="served", prompt="x").model == "served"
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer é"},
        ):
            raw = [(key, value.encode()) for key, value in headers.items()]
            response = httpx.get(f"{server.url}/v1/models", headers=raw)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["x-request-id"]
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        assert server.completion(prompt="x", model=MODEL).status_code == 404


def test_big_bodies_and_their_limit() -> None:
    with live(fake_engine(pages_per_rank=300_000, chunk_size=1 << 20, max_context=4_500_000), max_body_mb=5) as server:
        body = server.completion(prompt="x" * 4_000_000, max_tokens=2).json()
        assert body["usage"]["prompt_tokens"] == 4_000_001
        for size in (6_000_000, 60_000_000):
            response = server.completion(prompt="x" * size)
            message = response.json()["error"]["message"]
            assert response.status_code == 413
            assert "5242880" in message and str(size + 13) in message
