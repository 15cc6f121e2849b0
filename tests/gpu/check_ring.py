"""Whether the ring over cp hides its communication, on two Hopper GPUs: `python -m tests.gpu.check_ring [--out DIR]`.

The attention half of DeepSeek-V3 layers on a mesh cp=2, 8,192 tokens on each rank at the end of a context of 32K on
each.  A trace of one call gives, for each device, how much of the time of the collective permutes lies under the
attention kernel and under any kernel; beside it the time of one device with as many pairs of queries and keys.  Before
that, the same prompt on one and on two devices.  A process for each case: they differ in the flags of XLA.
"""

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.configs.presets import preset
from jaxinfer.sharding.mesh import AXES
from tests.gpu import workers
from tests.gpu.attention_half import Half
from tests.gpu.check_layer import values_of

MODULE = "tests.gpu.check_ring"
CASE_SECONDS, REPEATS, LAYERS = 150, 4, 2
TOKENS, CONTEXT = 8192, 32768
ERROR = 2e-2
PERMUTE = re.compile(r"nccl|sendrecv|collective.?permute|p2p|ptop", re.IGNORECASE)
ATTENTION = re.compile(r"mla_prefill")
FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
SCHEDULES = {
    "": "",
    ", permutes as early as can be": " --xla_gpu_enable_latency_hiding_scheduler=false",
}
"""Flags by what they do: XLA begins a permute just early enough by its own estimate, which knows no Mosaic kernel."""

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of times as disjoint intervals in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: list[Interval], other: list[Interval]) -> float:
    """Length of what two lists of disjoint intervals have in common."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def kernels_of(folder: Path) -> dict[str, list[tuple[str, Interval]]]:
    """Name and time (in microseconds) of every kernel and copy in a trace, by device."""
    found: dict[str, list[tuple[str, Interval]]] = {}
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if "GPU" not in plane.name:
                continue
            # Beside the streams, a plane has lines that are derived from them.
            events = [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
            times = [(e.name, (e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3)) for e in events]
            if times:
                found[plane.name] = times
    return found


def overlap(kernels: list[tuple[str, Interval]]) -> dict:
    """What a device's trace says of its permutes; times in microseconds."""
    permutes = [span for name, span in kernels if PERMUTE.search(name)]
    attention = [span for name, span in kernels if ATTENTION.search(name)]
    others = union(span for name, span in kernels if not PERMUTE.search(name))
    all_permutes = union(permutes)
    hops = [
        {
            "permute": end - begin,
            "under attention": common([(begin, end)], union(attention)),
            "under kernels": common([(begin, end)], others),
        }
        for begin, end in permutes
    ]
    return {
        "hops": hops,
        "permutes": length(all_permutes),
        "under attention": common(all_permutes, union(attention)),
        "under kernels": common(all_permutes, others),
        "attention": sum(end - begin for begin, end in attention),
        "attention kernels": len(attention),
        "span": max(span[1] for _, span in kernels) - min(span[0] for _, span in kernels),
    }


def half_of(ranks: int) -> Half:
    mesh = Mesh(np.array(jax.devices()[:ranks]).reshape(1, ranks, 1, 1), AXES)
    return Half(config=preset("deepseek-v3", {"num_layers": LAYERS}), mesh=mesh, layers=LAYERS)


def compiled(half: Half, tokens: int, context: int) -> tuple[Callable, tuple]:
    batch, pages = half.prefill_batch(tokens, context)
    shapes = half.operands(batch, pages)
    return half.program(batch, shapes[1]).lower(*shapes).compile(), values_of(shapes, batch)


def run(program: Callable, values: tuple) -> tuple[float, dict[str, list[tuple[str, Interval]]]]:
    """Seconds of one layer, by the host's clock over several calls, and the trace of one more."""
    weights, *state, tables, places = values
    seconds = 0.0
    for repeats in (1, REPEATS):
        begin = time.perf_counter()
        for _ in range(repeats):
            state[:] = program(weights, *state, tables, places)
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - begin) / repeats / LAYERS
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state[:] = program(weights, *state, tables, places)
            jax.block_until_ready(state)
        return seconds, kernels_of(Path(folder))


def time_ring(ranks: int) -> dict:
    """Two ranks, or one with as many queries and as many keys for each of them in the mean."""
    # The last 16,384 of 65,536 positions see 57,344 keys in the mean, as do the last 8,192 of 61,440.
    context = CONTEXT if ranks == 2 else 2 * CONTEXT - TOKENS // 2
    program, values = compiled(half_of(ranks), TOKENS, context)
    seconds, traces = run(program, values)
    said, details = [f"{1e3 * seconds:.2f} ms a layer by the host"], {}
    for device, kernels in traces.items():
        found = overlap(kernels)
        text = (
            f"{device}: {found['attention kernels']} attention kernels, {found['attention'] / 1e3:.2f} ms of a span of "
        )
        text += f"{found['span'] / 1e3:.2f}"
        if found["hops"]:
            times = [hop["permute"] for hop in found["hops"]]
            text += f"; {len(times)} permutes of {np.median(times):.0f} us (longest {max(times):.0f}), together "
            text += (
                f"{found['permutes'] / 1e3:.2f} ms, {100 * found['under attention'] / found['permutes']:.0f} % under "
            )
            text += f"attention, {100 * found['under kernels'] / found['permutes']:.0f} % under any kernel"
        by_name: dict[str, float] = defaultdict(float)
        for name, (begin, end) in kernels:
            by_name[name[:50]] += end - begin
        most = sorted(by_name.items(), key=lambda item: -item[1])[:8]
        said.append(text)
        details[device] = found | {"names": {name: round(time, 1) for name, time in most}}
    if not traces:
        said.append("the trace has no GPU")
    return {"said": "; ".join(said), "devices": details, "seconds": seconds}


def check_ring() -> dict:
    """A prompt of 2,048 tokens: the stream after two layers on two devices as on one."""
    whole, parts = half_of(1), half_of(2)
    results, tokens = {}, 2048
    for half in (whole, parts):
        program, (weights, cache, x, tables, places) = compiled(half, tokens // half.ranks, tokens // half.ranks)
        order = np.arange(tokens)
        where = half.layout.rank(order, 0), half.layout.local_index(order)
        stream = np.random.default_rng(0).normal(size=(tokens, x.shape[-1])).astype(np.float32)
        dealt = np.empty(x.shape, np.float32)
        dealt[where] = stream
        _, out = program(weights, cache, jax.device_put(dealt, x.sharding), tables, places)
        results[half.ranks] = np.asarray(out)[where] - stream
    error = float(np.linalg.norm(results[2] - results[1]) / np.linalg.norm(results[1]))
    said = f"error {error:.1e}"
    return {"said": said} if error < ERROR else {"said": said, "failed": f"; bound {ERROR}"}


def cases() -> dict[str, Callable[[], dict]]:
    return {
        "time cp=2": functools.partial(time_ring, 2),
        "check cp=2 against cp=1": check_ring,
        "time cp=1": functools.partial(time_ring, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the answers as JSON")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=200, help="no case begins after so long")
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, dict] = {}
    # One after the other: each has both devices to itself.
    for name in cases():
        for suffix, flags in SCHEDULES.items():
            if arguments.only not in name or (suffix and name != "time cp=2"):
                continue
            left = arguments.seconds - (time.monotonic() - begin)
            if left <= 0:
                continue
            environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": FLAGS + flags}
            found = workers.run(MODULE, [name], 1, min(CASE_SECONDS, left) / 2, left, environment)
            answers |= {name + suffix: answer for name, answer in found.items()}
            (arguments.out / "check_ring.json").write_text(json.dumps(answers, indent=1))
    print()
    for name, answer in answers.items():
        print(f"{name}: {answer.get('said', '')} {answer.get('failed', '')}")
        for device, found in answer.get("devices", {}).items():
            print(f"    {device}: {found['names']}")
            for hop in found["hops"][:6]:
                print("        hop of", ", ".join(f"{key} {value:.0f} us" for key, value in hop.items()))
    failed = [name for name, answer in answers.items() if "failed" in answer]
    for name in failed:
        print(f"BROKEN {name}: {answers[name]['failed']}\n{answers[name].get('trace', '')[-1200:]}")
    print(f"{len(answers)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
