"""Cancelling, disconnecting, prefill progress, and shutting down."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from jaxinfer.http import jobs
from jaxinfer.http.server import bind
from tests.frontends.fakes import fake_engine
from tests.frontends.live import Live, eventually, live

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = {"prompt": "x" * 4000, "max_tokens": 4000, "temperature": 0}


@pytest.fixture
def slow() -> Iterator[Live]:
    """A server whose steps take 20 ms; the long request takes 16 of them for its prompt, and 4,000 for its answer."""
    with live(fake_engine(0.02)) as running:
        yield running


def reason_count(server: Live, reason: str) -> int:
    return server.engine.stats().finished.get(reason, 0)


def test_prefill_progress_is_sent_as_comments(slow: Live) -> None:
    text = slow.completion(**LONG | {"max_tokens": 1}, stream=True).text
    progress = [tuple(map(int, pair)) for pair in re.findall(r"^: prefill (\d+)/(\d+)$", text, re.M)]
    assert len(progress) >= 10
    assert progress == sorted(progress) and {total for _, total in progress} == {4001}
    assert text.index(": prefill") < text.index("data: ")
    several = slow.completion(prompt=["x" * 1000, "y" * 500], max_tokens=1, stream=True).text
    assert {total for _, total in re.findall(r"^: prefill (\d+)/(\d+)$", several, re.M)} == {"1502"}


def test_a_stream_that_waits_shows_life(slow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_KEEP_ALIVE_SECONDS", 0.05)
    slow.runner.go.clear()
    with slow.client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}
    ) as response:
        lines = response.iter_lines()
        assert [line for _, line in zip(range(4), lines, strict=False)] == [": waiting", "", ": waiting", ""]
        slow.runner.go.set()
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_prefill_progress_is_in_the_metrics(slow: Live) -> None:
    with slow.client.stream(
        "POST", "/v1/completions", json={**LONG, "stream": True}, headers={"X-Request-Id": "long"}
    ) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(": prefill"))
        page = slow.client.get("/metrics").text
    assert 'jaxinfer_prefill_total_tokens{request="long"} 4001' in page
    assert re.search(r'jaxinfer_prefill_done_tokens\{request="long"\} [1-9]', page)
    assert eventually(slow.idle)
    assert 'request="long"' not in slow.client.get("/metrics").text


@pytest.mark.parametrize("mark", [": prefill", "data: "])
def test_a_stream_whose_client_leaves_is_aborted(slow: Live, mark: str) -> None:
    with slow.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(mark))
        assert not slow.idle()
    assert eventually(slow.idle)
    assert reason_count(slow, "abort") == 1


def test_a_whole_answer_whose_client_leaves_is_aborted(slow: Live) -> None:
    with pytest.raises(httpx.ReadTimeout):
        slow.client.post("/v1/completions", json=LONG, timeout=0.3)
    assert eventually(slow.idle)
    assert reason_count(slow, "abort") == 1


@pytest.mark.parametrize("mark", [": prefill", "data: "])
def test_delete_cancels_a_stream(slow: Live, mark: str) -> None:
    with slow.client.stream(
        "POST", "/v1/completions", json={**LONG, "stream": True}, headers={"X-Request-Id": "mine"}
    ) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(mark))
        answer = slow.client.delete("/v1/requests/mine")
        assert (answer.status_code, answer.json()["cancelled"]) == (200, True)
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert rest[-1] == "data: [DONE]"
    assert eventually(slow.idle)


def test_delete_cancels_a_whole_answer_of_several_prompts(slow: Live) -> None:
    body = {**LONG, "prompt": ["x" * 300, "y" * 200], "n": 2}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow.client.post, "/v1/completions", json=body, headers={"X-Request-Id": "both"})
        assert eventually(lambda: slow.engine.stats().running == 4)
        assert slow.client.delete("/v1/requests/both").status_code == 200
        choices = future.result().json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
    assert all(choice["text"] for choice in choices)
    assert eventually(slow.idle)


def test_short_requests_are_answered_while_a_long_prompt_is_computed(slow: Live) -> None:
    with slow.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(": prefill"))
        assert slow.completion(prompt="short", max_tokens=1).status_code == 200
        assert slow.engine.stats().prefilling == 1, "the long one is still at its prompt"
    assert eventually(slow.idle)


def test_many_clients_at_once(slow: Live) -> None:
    with ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(lambda i: slow.completion(prompt=f"p{i}", max_tokens=3, temperature=0).json(), range(48))
        )
    alone = [slow.completion(prompt=f"p{i}", max_tokens=3, temperature=0).json() for i in range(0, 48, 12)]
    assert [answer["choices"][0]["text"] for answer in answers[::12]] == [a["choices"][0]["text"] for a in alone]


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match="cannot listen on"):
        bind("203.0.113.1", 0)


class Program:
    """`tests.frontends.live` as a process of its own."""

    def __init__(self, step: float = 0.0, build: float = 0.0, drain: float = 20.0) -> None:
        command = [sys.executable, "-m", "tests.frontends.live", str(step), str(build), str(drain)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def status(self, path: str) -> int:
        try:
            return httpx.get(f"{self.url}{path}", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> None:
        assert eventually(lambda: self.status("/ready") == 200, 60)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_zero(number: signal.Signals) -> None:
    program = Program(step=0.03)
    program.wait_ready()
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "stream": True}
    seen: dict[str, int] = {}
    with httpx.stream("POST", f"{program.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        program.process.send_signal(number)
        assert eventually(lambda: program.status("/ready") == 503)
        seen["new"] = httpx.post(f"{program.url}/v1/completions", json=body, timeout=10).status_code
        seen["health"] = program.status("/health")
        rest = [line for line in lines if line.startswith("data: ")]
    assert seen == {"new": 503, "health": 200}
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    code, out, err = program.end()
    assert (code, "Traceback" in err) == (0, False), err
    assert out.strip() == f"jaxinfer: serving fake on {program.url}/v1"


def test_what_outlives_the_drain_timeout_is_told_so() -> None:
    program = Program(step=0.03, drain=0.5)
    program.wait_ready()
    body = {"prompt": "abc", "max_tokens": 2000, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(httpx.post, f"{program.url}/v1/completions", json=body, timeout=30)
        streamed = pool.submit(httpx.post, f"{program.url}/v1/completions", json={**body, "stream": True}, timeout=30)
        time.sleep(0.5)
        program.process.send_signal(signal.SIGTERM)
        assert whole.result().status_code == 503
        assert '"code":"draining"' in streamed.result().text
    code, _, err = program.end()
    assert (code, "Traceback" in err) == (0, False), err


def test_a_signal_while_the_engine_is_built_ends_at_once() -> None:
    program = Program(build=60)
    assert eventually(lambda: program.status("/health") == 200, 60)
    assert httpx.get(f"{program.url}/ready").json() == {"status": "compiling"}
    started = time.monotonic()
    program.process.send_signal(signal.SIGTERM)
    code, _, err = program.end()
    assert (code, "Traceback" in err) == (0, False), err
    assert time.monotonic() - started < 10


def test_an_engine_that_cannot_be_built_ends_the_server() -> None:
    code, _, err = Program(build=-1).end()
    assert code == 1
    assert "cannot start: expected a model, got none" in err


def test_half_a_body_is_no_error() -> None:
    with live(fake_engine()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.completion(prompt="x", max_tokens=1).status_code == 200
        assert threading.active_count() < 20
