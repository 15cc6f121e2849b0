"""Cases of a check on a GPU in processes of their own: a fault or a hang costs one case, not those that follow.

`python -m tests.gpu.workers` is a worker; a module with cases has a function `cases` that gives them by name.
"""

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from jaxinfer.bench.workers import serve, work

FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
"""For XLA: every kernel is launched for itself, so that each run has the same ones, and none is chosen by timing."""


def main(
    module: str,
    description: str | None,
    lock: str,
    *,
    case_seconds: float,
    seconds: float,
    flags: str = FLAGS,
    details: Callable[[dict[str, dict]], Iterable[str]] = lambda answers: (),
) -> int:
    """The command line of a check: runs its cases, prints what they said last, and writes all answers as JSON.

    Args:
        module: where the cases are.
        lock: environment variable with the path of the lock that all workers share.
        case_seconds: see `run`.
        seconds: after which no answer is waited for, where the caller does not say.
        flags: for XLA.
        details: lines to print before what the cases said.

    Returns: the exit status, 1 if a case has failed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the answers as JSON")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=seconds, help="cases without an answer by then are left out")
    parser.add_argument("--workers", type=int, default=10)
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in importlib.import_module(module).cases() if arguments.only in name]
    environment = os.environ | {
        lock: str(Path(tempfile.mkdtemp()) / "lock"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": flags,
    }
    answers = run(module, names, arguments.workers, case_seconds, arguments.seconds, environment)
    (arguments.out / f"{module.split('.')[-1]}.json").write_text(json.dumps(answers, indent=1))
    print()
    failed = [name for name, answer in answers.items() if "failed" in answer]
    for name in failed:
        print(f"BROKEN {name}: {answers[name]['failed'][:300]}\n{answers[name].get('trace', '')[-800:]}")
    for line in details(answers):
        print(line)
    for name in (name for name in names if name in answers):
        print(f"{name}: {answers[name].get('said', '')}{answers[name].get('failed', '')}"[:300])
    print(f"{len(answers)} of {len(names)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


def run(
    module: str, names: Sequence[str], workers: int, case_seconds: float, seconds: float, environment: dict[str, str]
) -> dict[str, dict]:
    """Runs cases in several workers at a time.

    Args:
        module: where the cases are.
        names: of the cases.
        case_seconds: after so long without an answer a worker is killed and its case has failed.
        seconds: cases that have not been answered by then are left out.

    Returns: the answer for each case; `{"failed": why}` for those that raised, faulted or hung.
    """
    begin = time.monotonic()
    answers: dict[str, dict] = {}
    requests = [{"module": module, "name": name} for name in names]
    with closing(serve(__name__, requests, workers, case_seconds, environment)) as served:
        for index, answer in served:
            answers[names[index]] = answer
            said = f"{answer.get('said', '')}{answer.get('failed', '')}"
            print(f"[{time.monotonic() - begin:5.1f}] {names[index]}: {said}", flush=True)
            if time.monotonic() - begin > seconds:
                break
    return answers


def one(module: str, name: str) -> dict:
    """The answer of a case."""
    return importlib.import_module(module).cases()[name]()


if __name__ == "__main__":
    work(one)
