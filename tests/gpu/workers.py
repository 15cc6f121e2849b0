"""Cases of a check on a GPU in processes of their own: a fault or a hang costs one case, not those that follow.

A module with cases calls `run` in the parent and `work` in its workers, which are started as
`python -m MODULE --worker`.  A worker takes names of cases from its standard input, one a line, and answers each with a
line of JSON.
"""

import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

ANSWER = "@answer "


def work(cases: dict[str, Callable[[], dict]]) -> None:
    """Runs the cases that the parent names; an exception ends only its case."""
    for line in sys.stdin:
        try:
            answer = cases[line.strip()]()
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error)[:400]}", "trace": traceback.format_exc()[-2500:]}
        print(ANSWER + json.dumps(answer), flush=True)


def run(
    module: str, names: Sequence[str], workers: int, case_seconds: float, seconds: float, environment: dict[str, str]
) -> dict[str, dict]:
    """Runs cases in several workers at a time.

    Args:
        module: the module of the worker's command line.
        names: of the cases.
        case_seconds: after so long without an answer a worker is killed and its case has failed.
        seconds: cases that have not begun by then are left out.

    Returns: the answer for each case that was begun; `{"failed": why}` for those that raised, faulted or hung.
    """
    begin = time.monotonic()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    answers: dict[str, dict] = {}

    def serve() -> None:
        worker = None
        while time.monotonic() - begin < seconds:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or _Worker(module, environment)
            answer = answers[name] = worker.ask(name, case_seconds)
            said = f"{answer.get('said', '')}{answer.get('failed', '')}"
            print(f"[{time.monotonic() - begin:5.1f}] {name}: {said}", flush=True)
            if worker.dead or "CUDA" in answer.get("failed", ""):
                # What a faulty kernel leaves of a process is of no use to the next case.
                worker.stop()
                worker = None
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(min(workers, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class _Worker:
    """A process that runs cases, and the lines that it prints."""

    def __init__(self, module: str, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        self.dead = self.asked = False
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, name: str, seconds: float) -> dict:
        assert self.process.stdin is not None
        last: list[str] = []
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            # The first case waits for the imports.
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
        self.process.kill()
        self.process.wait()
