"""The card for oneself, and times of programs on it."""

import contextlib
import fcntl
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator

import jax
from jax.experimental.mosaic import gpu as mosaic_gpu

LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers of a check share."""
HELD = 20


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Holds the card while something is timed; other workers compile meanwhile.

    Whoever holds it for `HELD` seconds is ended by an alarm: a kernel that hangs lets nothing else do so.
    """
    with open(os.environ[LOCK], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(HELD)
        try:
            yield
        finally:
            signal.alarm(0)


def seconds_of_kernels(function: Callable, *arguments, samples: int = 15) -> dict[str, float]:
    """Median seconds that a compiled program spends in each of its kernels, by CUPTI.

    Raises: RuntimeError if runs differ in their number of kernels.
    """
    jax.block_until_ready(function(*arguments))
    extension = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    extension._cupti_init()
    try:
        for _ in range(samples):
            jax.block_until_ready(function(*arguments))
    finally:
        timings = extension._cupti_get_timings(True)
    if not timings or len(timings) % samples:
        raise RuntimeError(f"CUPTI saw {len(timings)} kernels in {samples} runs")
    size = len(timings) // samples
    sums: dict[str, list[float]] = {}
    for sample in range(samples):
        times: dict[str, float] = {}
        for name, milliseconds in timings[sample * size : (sample + 1) * size]:
            times[name] = times.get(name, 0.0) + milliseconds / 1e3
        for name, seconds in times.items():
            sums.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in sums.items()}


def seconds_of_host(function: Callable, *arguments, samples: int = 9, calls: int = 3) -> float:
    """Median seconds of a call by the host's clock, several calls in flight."""
    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)
