"""The engine in its own thread."""

import threading
import time
from collections.abc import Iterator

import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.loop import EngineClosedError, EngineLoop
from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, Update
from jaxinfer.engine.step import Step
from tests.engine.drive import answer, engine, reference, request
from tests.engine.fake_runner import FakeRunner, capacity

SPEC = capacity(cp=2, chunk=16)


class Client:
    """Waits for the answer to one request."""

    def __init__(self, request: Request):
        self.request, self.accumulator = request, Accumulator(request)
        self.done, self.begun = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def __call__(self, update: Update) -> None:
        self.threads.add(threading.current_thread().name)
        self.accumulator.add(update)
        self.begun.set()
        if update.request_finished:
            self.done.set()

    def answer(self):
        assert self.done.wait(30), "no answer"
        return answer(self.accumulator.output)

    @property
    def reason(self) -> str | None:
        assert self.done.wait(30), "no answer"
        return self.accumulator.output.finish_reason


def submit(loop: EngineLoop, *args, **params) -> Client:
    client = Client(request(*args, **params))
    loop.submit(client.request, client)
    return client


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    with_gate = EngineLoop(engine(SPEC))
    with_gate.start()
    yield with_gate
    with_gate.stop()
    assert not with_gate.healthy


def runner(loop: EngineLoop) -> FakeRunner:
    assert isinstance(loop.engine.runner, FakeRunner)
    return loop.engine.runner


def slow(loop: EngineLoop, seconds: float = 0.02) -> None:
    runner(loop).before = lambda step: time.sleep(seconds)


def test_many_threads_submit(loop: EngineLoop):
    clients: list[Client] = []

    def work(first: int) -> None:
        for i in range(10):
            clients.append(submit(loop, first + 3 * i, max_tokens=8))

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 20, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        assert client.answer() == reference(client.request, SPEC)
        assert client.threads == {"engine"}
    assert loop.healthy and not loop._receivers


def test_refusals_reach_the_caller(loop: EngineLoop):
    with pytest.raises(ValueError, match="empty"):
        submit(loop, [])
    slow(loop)
    client = submit(loop, 5, max_tokens=200)
    with pytest.raises(ValueError, match="under way"):
        submit(loop, 5, id=client.request.id)
    assert len(loop._receivers) == 1
    assert loop.abort(client.request.id)
    assert client.reason == "abort"
    again = submit(loop, 5, id=client.request.id, max_tokens=3)
    assert again.answer() == reference(again.request, SPEC)


@pytest.mark.parametrize("length", [1, 3000])
def test_abort(loop: EngineLoop, length: int):
    slow(loop)
    client = submit(loop, length, max_tokens=500)
    assert client.begun.wait(30)
    start = time.monotonic()
    assert loop.abort(client.request.id)
    assert client.reason == "abort" and time.monotonic() - start < 5
    assert not loop.abort(client.request.id) and not loop.abort("unknown")
    stats = loop.engine.stats()
    assert stats.free_pages == stats.total_pages


def test_a_callback_that_raises_harms_itself_only(loop: EngineLoop, caplog: pytest.LogCaptureFixture):
    def broken(update: Update) -> None:
        raise RuntimeError("receiver gone")

    loop.submit(request(5, max_tokens=500), broken)
    client = submit(loop, 30, max_tokens=20)
    assert client.answer() == reference(client.request, SPEC)
    deadline = time.monotonic() + 30
    while loop._receivers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loop._receivers and loop.healthy and "receiver gone" in caplog.text
    assert loop.engine.stats().finished == {"abort": 1, "length": 1}


def test_a_bug_in_the_engine_ends_requests_with_an_error_and_serving_goes_on(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
):
    broken = threading.Event()
    schedule = type(loop.engine._scheduler).schedule

    def sometimes(self) -> Step:
        if broken.is_set():
            broken.clear()
            raise AssertionError("a bug")
        return schedule(self)

    monkeypatch.setattr(type(loop.engine._scheduler), "schedule", sometimes)
    slow(loop)
    client = submit(loop, 300, n=2, max_tokens=100)
    assert client.begun.wait(30)
    broken.set()
    assert client.reason == "error"
    output = client.accumulator.output
    assert output.error == "the engine failed: AssertionError: a bug"
    assert [one.finish_reason for one in output.outputs] == ["error", "error"]
    again = submit(loop, 40, max_tokens=5)
    assert again.answer() == reference(again.request, SPEC)
    assert loop.healthy


def test_mail_behind_a_failure_is_answered(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch):
    release, entered = threading.Event(), threading.Event()

    def wait(step: Step) -> None:
        entered.set()
        release.wait(30)

    runner(loop).before = wait
    first = submit(loop, 5, max_tokens=3)
    assert entered.wait(30)
    admit, late = Engine.admit, []
    # Two come while the step is computed; taking in the first of them fails.
    clients = [submit(loop, 6, n=2), submit(loop, 7)]

    def failing(self: Engine, one: Request) -> None:
        if one is clients[0].request:
            late.append(submit(loop, 9, max_tokens=3))
            raise KeyError("a bug")
        admit(self, one)

    monkeypatch.setattr(Engine, "admit", failing)
    release.set()
    for client in (first, *clients):
        assert client.reason == "error"
    assert [one.finish_reason for one in clients[0].accumulator.output.outputs] == ["error", "error"]
    assert late[0].answer() == reference(late[0].request, SPEC)  # came after that mail
    assert submit(loop, 8, max_tokens=2).reason == "length"


def test_drain_finishes_what_runs_and_refuses_new(loop: EngineLoop):
    slow(loop)
    client = submit(loop, 50, max_tokens=20)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(loop.drain(30)))
    thread.start()
    while loop._open:
        time.sleep(0.001)
    with pytest.raises(EngineClosedError):
        submit(loop, 5)
    thread.join(30)
    assert drained == [True]
    assert client.answer() == reference(client.request, SPEC)


def test_drain_aborts_after_the_timeout(loop: EngineLoop):
    slow(loop)
    client = submit(loop, 50, max_tokens=5000)
    assert client.begun.wait(30)
    assert loop.drain(0.1) is False
    assert client.done.is_set() and client.reason == "abort"


def test_stop_aborts_and_ends_the_thread():
    loop = EngineLoop(engine(SPEC))
    loop.start()
    slow(loop)
    client = submit(loop, 5, n=2, max_tokens=5000)
    assert client.begun.wait(30)
    loop.stop()
    assert not loop.healthy and client.done.is_set()
    assert [one.finish_reason for one in client.accumulator.output.outputs] == ["abort", "abort"]
    with pytest.raises(EngineClosedError):
        submit(loop, 5)
    loop.stop()  # a second time does nothing
    EngineLoop(engine(SPEC)).stop()  # nor does it before the start


def test_idle_means_asleep(loop: EngineLoop):
    submit(loop, 5).answer()
    time.sleep(0.05)
    before, clock = time.process_time(), time.monotonic()
    time.sleep(0.5)
    assert time.process_time() - before < 0.2 * (time.monotonic() - clock)
