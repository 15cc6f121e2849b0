"""Times of a call: of its kernels, as CUPTI sees them, or by the host's clock."""

import dataclasses
import fcntl
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

WARM_SECONDS = 0.2
"""How long a call is repeated before it is timed: clocks and power are then those of steady work."""
_QUEUED = 4


@contextmanager
def alone(lock: str, seconds: float) -> Iterator[None]:
    """Holds the device by a file that all its users lock: nothing else runs there while something is timed.

    After so many seconds an alarm ends the process: a kernel that hangs lets nothing else end it, nor others begin.
    """
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median seconds of one call.

    Attributes:
        seconds: all kernels together, or by the host's clock the whole call.
        kernels: name and median seconds of each kernel in turn; empty by the host's clock.
        clock: `cupti` or `host`.
        began, ended: `time.time()` around warming up and measuring.
    """

    seconds: float
    kernels: list[tuple[str, float]]
    clock: str
    began: float
    ended: float


def measure(run: Callable[[int], Any], wait: Callable[[Any], Any], repeats: int) -> Timing:
    """Times a call.

    Args:
        run: starts the i-th call, i from 0.
        wait: returns when what `run` returned is there.
        repeats: how many calls the median is of.
    """
    began, calls = time.time(), 0
    until = time.perf_counter() + WARM_SECONDS
    while calls == 0 or time.perf_counter() < until:
        wait([run(calls + i) for i in range(_QUEUED if calls else 1)])
        calls += _QUEUED
    found = _by_cupti(run, wait, repeats)
    clock = "cupti"
    if found is None:
        found, clock = (_by_host(run, wait, repeats), []), "host"
    return Timing(*found, clock, began, time.time())


def _by_cupti(run, wait, repeats: int) -> tuple[float, list[tuple[str, float]]] | None:
    """None where CUPTI is not to be had, or did not see the same kernels in every call."""
    if jax.default_backend() != "gpu":
        return None
    from jax._src.lib import mosaic_gpu  # is part of JAX's CUDA plugin

    extension = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    try:
        extension._cupti_init()
    except RuntimeError as error:
        print("no CUPTI:", error)
        return None
    try:
        for first in range(0, repeats, _QUEUED):
            wait([run(i) for i in range(first, min(first + _QUEUED, repeats))])
    finally:
        timings = extension._cupti_get_timings(True)
    size, odd = divmod(len(timings or ()), repeats)
    calls = [timings[i * size : (i + 1) * size] for i in range(repeats)]
    if not size or odd or any([name for name, _ in call] != [name for name, _ in calls[0]] for call in calls):
        print(f"CUPTI saw {len(timings or ())} kernels in {repeats} calls")
        return None
    kernels = [
        (of_call[0][0], statistics.median(milliseconds for _, milliseconds in of_call) / 1e3)
        for of_call in zip(*calls, strict=True)
    ]
    return statistics.median(sum(t for _, t in call) for call in calls) / 1e3, kernels


def _by_host(run, wait, repeats: int) -> float:
    samples = []
    for i in range(repeats):
        begin = time.perf_counter()
        wait(run(i))
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)
