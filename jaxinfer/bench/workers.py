"""Requests served by processes of their own: a fault or a hang costs one request, not those that follow.

A worker is started as `python -m MODULE`, whose main calls `work`.  It takes requests from its standard input, a line
of JSON each, and answers with a line of JSON.
"""

import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

ANSWER = "@answer "


def work(function: Callable[..., dict[str, Any]]) -> None:
    """Calls `function` with the fields of every request; an exception ends only its request.

    What a faulty kernel leaves of a process is of no use to the next request: after an answer that is `spent`, as every
    failure of CUDA is, the process is replaced.
    """
    for line in sys.stdin:
        try:
            answer = function(**json.loads(line))
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:400]}"
            answer = {"failed": why, "trace": traceback.format_exc()[-2500:], "spent": "CUDA" in why}
        print(ANSWER + json.dumps(answer), flush=True)


def serve(
    module: str, requests: Sequence[dict[str, Any]], workers: int, seconds: float, environment: dict[str, str]
) -> Generator[tuple[int, dict[str, Any]]]:
    """Serves requests by several workers at a time; ends them all when it is closed.

    Args:
        module: the module of the worker's command line.
        requests: what `work` passes to its function.
        seconds: after so long without an answer a worker is killed and its request has failed; twice that for the
            first request of a worker, which waits for the imports.

    Yields: the index of a request and its answer, as they come; `{"failed": why}` where it raised, faulted or hung.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    for index in range(len(requests)):
        waiting.put(index)
    running: list[_Worker] = []
    closed = threading.Event()

    def loop() -> None:
        worker = None
        while not closed.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None:
                worker = _Worker(module, environment)
                running.append(worker)
                if closed.is_set():  # too late for those that end the workers to have seen it
                    break
            answer = worker.ask(requests[index], seconds)
            answers.put((index, answer))
            if worker.dead or answer.pop("spent", False):
                worker.stop()
                worker = None
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(min(workers, len(requests)))]
    for thread in threads:
        thread.start()
    try:
        for _ in requests:
            yield answers.get()
    finally:
        closed.set()
        for worker in running:
            worker.process.kill()
        for thread in threads:
            thread.join()


class _Worker:
    """A process that serves requests, and the lines that it prints."""

    def __init__(self, module: str, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        self.dead = self.asked = False
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        last: list[str] = []
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            until = time.monotonic() + seconds * (1 if self.asked else 2)
            self.asked = True
            while (line := self.lines.get(timeout=max(0.01, until - time.monotonic()))) is not None:
                if line.startswith(ANSWER):
                    return json.loads(line[len(ANSWER) :])
                last = [*last[-40:], line]
            why = f"the process ended with {self.process.wait()}"
        except queue.Empty:
            why = f"no answer after {seconds:.0f} s"
        except BrokenPipeError:
            why = "the process had ended"
        self.dead = True
        return {"failed": why, "trace": "".join(last)[-2500:]}

    def stop(self) -> None:
        # The broken pipe is that of a request which it did not come to read.
        with suppress(BrokenPipeError), self.process:
            self.process.kill()
            self.reader.join()
