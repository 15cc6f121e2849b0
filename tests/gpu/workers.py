"""Cases of a check on a GPU in processes of their own: a fault or a hang costs one case, not those that follow.

`python -m tests.gpu.workers` is a worker; a module with cases has a function `cases` that gives them by name.
"""

import importlib
import time
from collections.abc import Sequence
from contextlib import closing

from jaxinfer.bench.workers import serve, work


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
