"""Hybrid attention as a whole on Hopper GPUs, beside dense: `python -m tests.gpu.check_hybrid --seconds 400`.

Cases in processes of their own, which get ready side by side and then take turns:

* `layer`: the attention of one layer of DeepSeek-V3 over 8,192 rows at the end of a context, by part;
* `hybrid`, `dense`: prompts through four layers of DeepSeek-V3's width with 32 experts, by `LLM`: time to first token,
  each chunk, tokens after it, and memory; hybrid attention also a prompt of a million tokens;
* `hybrid_cp2`, `dense_cp2`: the same on two GPUs, their logits beside those of one;
* `bundled_...`, `probe_...`: prompts through the bundled model and `retrieval-probe`;
* `smoke`: a small model whose hybrid policy has budgets for everything, its logits against dense ones.  It takes no
  turn: it compiles for minutes, and its work on the GPU is of milliseconds.

What a case has found is printed at once, and a table last.  A case that hangs is ended, and the others go on.
`--small` tries the script without a GPU.
"""

import argparse
import dataclasses
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.timing import measure
from jaxinfer.configs.attention import DENSE, PRESETS, parse_policy
from jaxinfer.configs.presets import preset
from jaxinfer.sharding import mesh as meshes
from tests.gpu.hybrid_layer import Layer, by_part, part_of_kernels, timed_calls
from tests.gpu.hybrid_prompts import SMALL, WIDE, Prompts, Turn, compared, say, smoke

MODULE = "tests.gpu.check_hybrid"
GRACE = 8.0
"""Seconds after its turn in which a case ends its step, or is ended."""
SELECTION = "retrieve", "level 1", "candidates", "level 2", "record", "hot", "choose"
"""Parts that are the selection, whose kernels are listed one by one."""
READY_SHARE = 0.75
"""Share of the time after which those that are still not ready are ended, as they may hang."""


def layer(small: bool, turn: Turn, out: Path) -> None:
    """Times of one layer's attention by part, dense and hybrid, at the end of several contexts."""
    del out
    mesh = meshes.make(meshes.parse(""))
    sizes = SMALL if small else WIDE
    config = preset("deepseek-v3", sizes | {"num_hidden_layers": 1, "first_k_dense_replace": 1})
    contexts = (4096, 2048) if small else (1048576, 524288, 65536, 262144)
    chunk, tile, repeats = (512, 256, 1) if small else (8192, 8192, 6)
    hybrid = parse_policy("hybrid:window=512,dense_below=512,candidates=32") if small else PRESETS["balanced"]
    hybrid = hybrid.for_model(config.num_heads, config.latent_dim)
    policies = {"hybrid": (hybrid, False), "hybrid fp8": (hybrid, True), "dense": (DENSE, False)}
    policies["hybrid, half the probes"] = dataclasses.replace(hybrid, probes=hybrid.probes // 2), False
    if not small:
        heads = config.num_heads, config.latent_dim
        policies |= {name: (PRESETS[name].for_model(*heads), False) for name in ("fast", "accurate")}
    layers = {
        name: Layer(config, of, contexts[0], chunk, 64, tile, mesh, e4m3) for name, (of, e4m3) in policies.items()
    }
    batches = {name: {c: of.batch(c) for c in contexts} for name, of in layers.items()}

    tracing = threading.Lock()

    def ready(name: str) -> tuple[Callable, float]:
        begin = time.monotonic()
        shapes = layers[name].shapes(batches[name][contexts[0]])
        with tracing:  # one at a time: functions are given names while they are traced
            lowered = jax.jit(layers[name].step, donate_argnums=2).lower(*shapes)
        return lowered.compile(), time.monotonic() - begin

    with ThreadPoolExecutor(len(layers)) as pool:
        programs = dict(zip(layers, pool.map(ready, layers), strict=True))
    temporary = {name: of.memory_analysis().temp_size_in_bytes / 1e9 for name, (of, _) in programs.items()}
    weights, tables = layers["dense"].weights(), {name: of.tables() for name, of in layers.items()}
    x = jax.random.normal(jax.random.key(1), (chunk, config.hidden_size), jnp.bfloat16)
    turn.wait(compiled={name: round(took) for name, (_, took) in programs.items()}, temporary_gb=temporary)
    for context in contexts:
        for name, (program, _) in programs.items():
            if turn.over:
                return
            cache = jax.block_until_ready(jax.jit(layers[name].fill)(jnp.uint32(7)))
            batch = jax.device_put(batches[name][context])
            call = timed_calls(program, cache, lambda cache, given=(tables[name], batch): (weights, x, cache, *given))
            finite = bool(jnp.all(jnp.isfinite(call(0))))
            del cache
            timing = measure(call, jax.block_until_ready, min(repeats, 2) if name == "dense" else repeats)
            parts, strange, kernels = by_part(timing.kernels, part_of_kernels(program.as_text()))
            say(
                event="row",
                policy=name,
                context=context,
                milliseconds=1e3 * timing.seconds,
                clock=timing.clock,
                kernels=len(timing.kernels),
                parts={part: round(1e3 * seconds, 3) for part, seconds in parts.items()},
                strange={kernel: round(1e3 * seconds, 3) for kernel, seconds in list(strange.items())[:8]},
                selection={
                    f"{part}: {name[:50]}": round(1e3 * seconds, 4)
                    for part in SELECTION
                    for name, seconds in kernels[part].items()
                },
                good=finite,
            )


_LONG = (65536, 131072, 262144, 524288)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a process does, given whether it is to be small, its turns, and a folder."""

    run: Callable[[bool, Turn, Path], None]
    seconds: float = 30.0
    """Of a turn at most."""
    devices: int = 1
    flags: str = ""
    """For XLA."""


CASES = {
    "hybrid": Case(
        Prompts(attention="hybrid", lengths=(*_LONG, (1 << 20) - 64), memory_fraction=0.45, compared=49152), 60.0
    ),
    "dense": Case(Prompts(attention="dense", lengths=_LONG[:3], memory_fraction=0.29, compared=49152), 90.0),
    "hybrid_cp2": Case(
        Prompts(attention="hybrid", lengths=_LONG, memory_fraction=0.38, mesh="cp=2", compared=49152), devices=2
    ),
    "dense_cp2": Case(
        Prompts(attention="dense", lengths=_LONG, memory_fraction=0.29, mesh="cp=2", compared=49152), 60.0, devices=2
    ),
    # Every kernel launched for itself, so that it can be timed by name, and products as the engine has them.
    "layer": Case(layer, flags="--xla_gpu_enable_command_buffer= --xla_gpu_enable_triton_gemm=false"),
    "smoke": Case(smoke),
    **{
        f"{name}_{attention}": Case(
            Prompts(attention=attention, lengths=lengths, memory_fraction=0.06, model=model, overrides={}), 60.0
        )
        for (name, model, lengths), attention in itertools.product(
            (("bundled", "jaxinfer-12m", (65536, 131072 - 64)), ("probe", "retrieval-probe", _LONG)),
            ("hybrid", "dense"),
        )
    },
}
"""In the order of their turns."""


class Process:
    """A case in a process of its own; what it prints goes to a queue."""

    def __init__(self, name: str, small: bool, out: Path, lines: "queue.SimpleQueue[tuple[str, str | None]]"):
        command = [sys.executable, "-m", MODULE, "--case", name, "--out", str(out), *(["--small"] if small else [])]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment |= {"XLA_FLAGS": CASES[name].flags} if CASES[name].flags else {}
        if (count := len(list(Path("/dev").glob("nvidia[0-9]*")))) > 1:
            first = list(CASES).index(name) % count if CASES[name].devices == 1 else 0
            chosen = range(first, first + CASES[name].devices)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        self._name, self._lines = name, lines
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((self._name, line.rstrip("\n")))
        self.process.wait()
        self._lines.put((self._name, None))

    def go(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()


def run(names: list[str], seconds: float, small: bool, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs cases; the events of each, `{"event": "failed"}` last where its process did not end well."""
    begin = time.monotonic()
    lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
    processes = {name: Process(name, small, out, lines) for name in names}
    events: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    waiting, ready, turn, turn_ends = list(names), [], None, 0.0
    turns = dict.fromkeys(names, 0)
    try:
        while (waiting or ready or turn) and (left := seconds - (now := time.monotonic() - begin)) > 0:
            for name in late(waiting, turn, now, turn_ends, seconds):
                print(f"[{now:5.1f}] {name}: took too long, and is ended", flush=True)
                processes[name].process.kill()
            if turn is None and ready and left > 2 * GRACE:
                turn = min(ready, key=lambda name: (turns[name], list(CASES).index(name)))
                ready.remove(turn)
                turn_ends = now + min(CASES[turn].seconds, left - GRACE)
                turns[turn] += 1
                processes[turn].go(turn_ends - now)
            try:
                name, line = lines.get(timeout=min(left, 1))
            except queue.Empty:
                continue
            stamp = f"[{time.monotonic() - begin:5.1f}] {name}:"
            if line is None:
                waiting, ready = [n for n in waiting if n != name], [n for n in ready if n != name]
                turn = None if turn == name else turn
                if code := processes[name].process.returncode:
                    print(stamp, f"ended with {code}", flush=True)
                    events[name].append({"event": "failed"})
            elif not line.startswith("@{"):
                print(stamp, line, flush=True)
            else:
                event = json.loads(line[1:])
                events[name].append(event)
                print(stamp, shortly(event), flush=True)
                if event["event"] == "ready":
                    waiting, turn = [n for n in waiting if n != name], None if turn == name else turn
                    ready.append(name)
    finally:
        for process in processes.values():
            process.process.kill()
    return events


def late(waiting: list[str], turn: str | None, now: float, turn_ends: float, seconds: float) -> list[str]:
    """Cases that are to be ended: those that do not get ready, and the one that holds on to its turn."""
    found = list(waiting) if now > READY_SHARE * seconds else []
    return [*found, turn] if turn and now > turn_ends + GRACE else found


def shortly(event: dict[str, Any]) -> str:
    """An event as a line; of the chunks only the last ones."""
    shown = {key: value for key, value in event.items() if key != "event"}
    if "chunks" in shown:
        chunks = shown.pop("chunks")
        shown |= {"seconds": round(sum(chunks), 3), "last chunks": chunks[-8:]}
    return event["event"] + " " + ", ".join(f"{key} {value}" for key, value in shown.items())


def report(events: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The tables."""
    names = [name for name, case in CASES.items() if isinstance(case.run, Prompts)]
    rows = {name: [event for event in found if event["event"] == "row"] for name, found in events.items()}
    lines = [row["said"] for row in rows.get("smoke", [])]
    for name, found in events.items():
        for event in found:
            if event["event"] == "ready" and len(event) > 1:
                lines.append(f"{name}: {shortly(event)}")
    for row in rows.get("layer", []):
        parts = ", ".join(f"{part} {milliseconds:.2f}" for part, milliseconds in row["parts"].items())
        strange = ", ".join(f"{kernel} {milliseconds:.2f}" for kernel, milliseconds in row["strange"].items())
        lines.append(
            f"layer, context {row['context']:,}, {row['policy']}: {row['milliseconds']:.2f} ms ({row['clock']}, "
            f"{row['kernels']} kernels): {parts}; {strange}"
        )
    for name in names:
        for row in rows.get(name, []):
            if row.get("tokens"):
                lines.append(
                    f"{name}, prompt of {row['length']:,}: TTFT {sum(row['chunks']):.2f} s, then "
                    f"{1e3 * float(np.median(row['tokens'][1:])):.1f} ms a token; last chunks "
                    f"{1e3 * float(np.median(row['chunks'][-4:-1] or row['chunks'])):.0f} ms; peak {row['peak']} GB"
                )
    longest = {name: max((r["chunks"] for r in rows.get(name, [])), key=len, default=[]) for name in names}
    for count in (8, 16, 32, 48, 64, 96, 128):
        so_far = {name: chunks[:count] for name, chunks in longest.items() if len(chunks) >= count}
        said = [f"{name} {sum(of):.2f} s ({1e3 * float(np.median(of[-3:])):.0f} ms)" for name, of in so_far.items()]
        lines += [f"first {count} chunks of 8,192 (a chunk there): " + "; ".join(said)] if said else []
    return lines


def logits_apart(out: Path) -> list[tuple[str, bool]]:
    """The logits that cases left, each against those of one GPU, and hybrid against dense."""
    kept = {path.stem: np.load(path) for path in sorted(out.glob("*.npy"))}
    pairs = [("dense-", "dense-cp2"), ("hybrid-", "hybrid-cp2"), ("dense-", "hybrid-")]
    found = [(one, two, *compared(kept[one], kept[two])) for one, two in pairs if one in kept and two in kept]
    # Random weights: what hybrid attention leaves out is told, not judged.
    return [(f"{one} and {two}: {said}", good or (one, two) == pairs[2]) for one, two, said, good in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for all events as JSON")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=270, help="all is ended by then")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--case", help="run this case as a process of its own (internal)")
    arguments = parser.parse_args()
    if arguments.case:
        CASES[arguments.case].run(arguments.small, Turn(), arguments.out)
        return 0
    names = [name for name in CASES if name in arguments.only.split(",")]
    arguments.out.mkdir(parents=True, exist_ok=True)
    events = run(names, arguments.seconds, arguments.small, arguments.out)
    (arguments.out / "check_hybrid.json").write_text(json.dumps(events))
    print()
    print("\n".join(report(events)))
    apart = logits_apart(arguments.out)
    print("\n".join(said for said, _ in apart))
    bad = [name for name, found in events.items() if any(e["event"] == "failed" or not e.get("good", 1) for e in found)]
    missing = [name for name in names if not any(event["event"] == "row" for event in events[name])]
    bad += [said for said, good in apart if not good]
    for name in bad:
        print("BROKEN", name)
    for name in missing:
        print("NO FIGURES", name)
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main())
