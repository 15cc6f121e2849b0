"""Hybrid attention as a whole on one Hopper GPU, beside dense: `python -m tests.gpu.check_hybrid --seconds 270`.

Four cases in processes of their own, which get ready side by side and then take turns on the GPU:

* `layer`: the attention of one layer of DeepSeek-V3 over 8,192 rows at the end of a context, by part;
* `hybrid`, `dense`: four layers of DeepSeek-V3's width with 32 experts, through `LLM`: time to first token, each chunk,
  tokens after it, and memory.  Both have two turns, of which the second is the last to come;
* `smoke`: a small model whose hybrid policy has budgets for everything, its logits against dense ones.  It takes no
  turn: it compiles for minutes, and its work on the GPU is of milliseconds.

What a case has found is printed at once, and a table last.  A case that hangs is ended, and the others go on.
`--small` tries the script without a GPU.
"""

import argparse
import functools
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
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.timing import measure
from jaxinfer.build import build_engine
from jaxinfer.configs.attention import DENSE, PRESETS, parse_policy
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.presets import preset
from jaxinfer.engine.request import Request
from jaxinfer.engine.runner import Runner
from jaxinfer.sharding import mesh as meshes
from tests.gpu.hybrid_layer import Layer, by_part, part_of_kernels, timed_calls

MODULE = "tests.gpu.check_hybrid"
WIDE = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 32, "max_positions": 1 << 20}
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 2048,
    "max_positions": 1 << 20,
}
EVERYTHING = (
    "hybrid:window=256,anchor_gap=128,dense_below=128,hot_epoch=256,head_groups=4,voters=16,candidates=32,"
    "retrieve_blocks=28,hot_blocks=4"
)
"""Budgets for all blocks of 4,096 tokens."""
DIVERGENCE = 1e-3
"""Bound on the median KL divergence of the smoke test, as in `check_engine`: other orders of summation in bfloat16."""
DECODED = 12
LONGEST_TURN = {"hybrid": 40.0, "dense": 45.0, "layer": 30.0}
"""Seconds of the first turn of each case; the second may take what is left."""
GRACE = 8.0
"""Seconds after its turn in which a case ends its step, or is ended."""
WAIT_SHARE, READY_SHARE = 0.5, 0.65
"""Shares of the time: until the first, who is ready waits for cases before it; after the second, those that are still
not ready are ended, as they may hang."""


def prompt(length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(length).integers(3, vocab_size, length).tolist()


def say(**event: Any) -> None:
    """A line for the parent."""
    print("@" + json.dumps(event), flush=True)


class Turn:
    """When a case may use the GPU, and until when: the parent says so on standard input."""

    def __init__(self):
        self.until = 0.0

    def wait(self, **ready: Any) -> None:
        say(event="ready", **ready)
        seconds = float(sys.stdin.readline())
        self.until = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until


def smoke(small: bool, turn: Turn) -> None:
    """Logits of a small random model with budgets for everything, against dense."""
    del turn
    length = 1024 if small else 4096
    ids, rows = prompt(length, SMALL["vocab_size"]), list(range(63, length, 64))
    logits, tokens = {}, {}
    started = time.monotonic()
    for name, attention in (("dense", "dense"), ("hybrid", EVERYTHING)):
        options = EngineOptions(
            model="deepseek-v3",
            weights="random",
            overrides=SMALL,
            precision="fp32" if small else "bf16",
            attention=attention,
            max_context=length + 64,
            chunk_size=length // 4,
            max_num_seqs=1,
            memory_fraction=0.05 if not small else 0.9,
        )
        with opened(options) as llm:
            logits[name] = log_softmax(llm.logits(ids, rows=rows).astype(np.float64), axis=-1)
            greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            tokens[name] = list(llm.generate([ids], greedy)[0].token_ids)
    one, two = logits["dense"], logits["hybrid"]
    divergence = float(np.median(np.sum(np.exp(one) * (one - two), axis=-1)))
    agreement = float(np.mean(one.argmax(-1) == two.argmax(-1)))
    same = sum(a == b for a, b in zip(tokens["dense"], tokens["hybrid"], strict=True))
    said = (
        f"budgets for everything against dense, {len(rows)} rows of {length:,}: median KL {divergence:.1e}, top-1 "
        f"agreement {100 * agreement:.0f} %, {same} of 8 greedy tokens equal; {time.monotonic() - started:.0f} s"
    )
    good = bool(np.isfinite(divergence)) and divergence < DIVERGENCE and agreement > 0.95
    say(event="row", said=said, good=good)


def opened(options: EngineOptions) -> LLM:
    """An LLM whose programs compile when they are first used: those of smaller steps never are."""
    with mock.patch.object(Runner, "compile"):
        return LLM.from_engine(build_engine(options, progress=False))


def layer(small: bool, turn: Turn) -> None:
    """Times of one layer's attention by part, dense and hybrid, at the end of several contexts."""
    mesh = meshes.make(meshes.parse(""))
    sizes = SMALL if small else WIDE
    config = preset("deepseek-v3", sizes | {"num_hidden_layers": 1, "first_k_dense_replace": 1})
    contexts = (4096, 2048) if small else (1048576, 524288, 65536, 262144)
    chunk, tile, repeats = (512, 256, 1) if small else (8192, 8192, 6)
    hybrid = parse_policy("hybrid:window=512,dense_below=512,candidates=32") if small else PRESETS["balanced"]
    policies = {"hybrid": hybrid.for_model(config.num_heads, config.latent_dim), "dense": DENSE}
    layers = {name: Layer(config, of, contexts[0], chunk, 64, tile, mesh) for name, of in policies.items()}
    batches = {name: {c: of.batch(c) for c in contexts} for name, of in layers.items()}

    def ready(name: str) -> tuple[Callable, float]:
        begin = time.monotonic()
        shapes = layers[name].shapes(batches[name][contexts[0]])
        program = jax.jit(layers[name].step, donate_argnums=2).lower(*shapes).compile()
        return program, time.monotonic() - begin

    with ThreadPoolExecutor(2) as pool:
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
            timing = measure(call, jax.block_until_ready, repeats if name == "hybrid" else min(repeats, 2))
            parts, strange = by_part(timing.kernels, part_of_kernels(program.as_text()))
            say(
                event="row",
                policy=name,
                context=context,
                milliseconds=1e3 * timing.seconds,
                clock=timing.clock,
                kernels=len(timing.kernels),
                parts={part: round(1e3 * seconds, 3) for part, seconds in parts.items()},
                strange={kernel: round(1e3 * seconds, 3) for kernel, seconds in list(strange.items())[:8]},
                good=finite,
            )


def prompts(attention: str, small: bool, turn: Turn) -> None:
    """Prompts of several lengths through `LLM`, each chunk timed.

    Hybrid computes the longest in its first turn.  Dense computes the shortest and half of the longest: how long the
    prompts between would take, its first chunks tell.
    """
    lengths, chunk = ((1024, 2048, 4096), 512) if small else ((65536, 131072, 262144, 524288), 8192)
    changes = {"precision": "fp32", "overrides": SMALL, "attention": attention} if small else {}
    if small and attention == "hybrid":
        changes["attention"] = "hybrid:window=512,dense_below=1024,hot_epoch=512,candidates=32,retrieve_blocks=4"
    options = {
        "model": "deepseek-v3",
        "weights": "random",
        "overrides": WIDE,
        "precision": "bf16",
        "attention": attention,
        "max_context": lengths[-1] + 4096,
        "chunk_size": chunk,
        "max_num_seqs": 1,
        "memory_fraction": 0.9 if small else {"dense": 0.3, "hybrid": 0.4}[attention],
    }
    begin = time.monotonic()
    with opened(EngineOptions(**(options | changes))) as llm:
        loaded = time.monotonic() - begin
        runner = llm.engine.runner
        assert isinstance(runner, Runner)
        compiled = compile_steps(runner, chunk)
        warm = time.monotonic()
        one_prompt(llm, chunk, lambda _: False)
        warm = time.monotonic() - warm
        held = {
            name: sum(array.nbytes for array in jax.tree.leaves(tree)) / 1e9
            for name, tree in (("weights", runner.params), ("cache", runner.cache))
        }
        known = {"loaded": round(loaded), "compiled": compiled, "first prompt": round(warm)}
        turn.wait(**known, gb=held | {"peak": peak_gigabytes()})
        *others, longest = lengths
        if attention == "hybrid":
            one_prompt(llm, longest, lambda _: turn.over)
            turn.wait()
            for length in others:
                one_prompt(llm, length, lambda _: turn.over)
            return
        waited = False

        def over(chunks: int) -> bool:
            nonlocal waited
            if not waited and (turn.over or chunks == longest // chunk // 2):
                waited = True
                turn.wait()
            return turn.over

        one_prompt(llm, others[0], over)
        one_prompt(llm, longest, over)


def compile_steps(runner: Runner, chunk: int) -> dict[str, int]:
    """Compiles a whole chunk's prefill and decode of one sequence side by side; seconds that each took."""
    programs, batcher, nobody = runner._programs, runner._batcher, [[]]
    batches = {"prefill": batcher.prefill(nobody, chunk).batch, "decode": batcher.decode(nobody, 1)}
    batches = {name: runner._put(batch) for name, batch in batches.items()}

    def seconds(name: str) -> int:
        begin = time.monotonic()
        getattr(programs, name).lower(runner.params, runner.cache, runner.tables, *batches[name]).compile()
        return round(time.monotonic() - begin)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(batches, pool.map(seconds, batches), strict=True))


def peak_gigabytes() -> float:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9


def one_prompt(llm: LLM, length: int, over: Callable[[int], bool]) -> None:
    """Computes a prompt and some tokens after it, step by step; tells of every fourth chunk, and of the end.

    `over` is asked after each step, with the number of chunks that are done, whether to end here.
    """
    engine, config = llm.engine, llm.config
    assert config is not None
    params = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)
    request = Request(id=f"prompt of {length}", prompt_ids=prompt(length, config.vocab_size), params=params)
    engine.add(request)
    chunks: list[float] = []
    tokens: list[float] = []
    found = {"length": length, "chunks": chunks, "tokens": tokens, "cut": False}

    def tell() -> None:
        say(event="row", **found, peak=round(peak_gigabytes(), 2), good=engine.stats().faults == 0)

    prefilling = True
    while engine.has_work:
        begin = time.monotonic()
        updates = engine.step()
        took = round(time.monotonic() - begin, 5)
        (chunks if prefilling else tokens).append(took)
        prefilling = prefilling and not any(update.token_ids for update in updates)
        if any(update.error for update in updates) or engine.stats().faults:
            raise RuntimeError(f"the engine failed: {[update.error for update in updates]}")
        if prefilling and len(chunks) % 4 == 0:
            tell()
        if over(len(chunks)) and engine.has_work:
            found["cut"] = True
            engine.abort(request.id)
            engine.step()
    tell()


CASES: dict[str, Callable[[bool, Turn], None]] = {
    "hybrid": functools.partial(prompts, "hybrid"),
    "dense": functools.partial(prompts, "dense"),
    "layer": layer,
    "smoke": smoke,
}
"""In the order of their turns."""


class Process:
    """A case in a process of its own; what it prints goes to a queue."""

    def __init__(self, name: str, small: bool, lines: "queue.SimpleQueue[tuple[str, str | None]]"):
        command = [sys.executable, "-m", MODULE, "--case", name, *(["--small"] if small else [])]
        # Every kernel launched for itself, so that it can be timed by name, and products as the engine has them.
        flags = "--xla_gpu_enable_command_buffer= --xla_gpu_enable_triton_gemm=false" if name == "layer" else ""
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment |= {"XLA_FLAGS": flags} if flags else {}
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


def run(names: list[str], seconds: float, small: bool) -> dict[str, list[dict[str, Any]]]:
    """Runs cases; the events of each, `{"event": "failed"}` last where its process did not end well."""
    begin = time.monotonic()
    lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
    processes = {name: Process(name, small, lines) for name in names}
    events: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    waiting, ready, turn, turn_ends = list(names), [], None, 0.0
    turns = dict.fromkeys(names, 0)
    try:
        while (waiting or ready or turn) and (left := seconds - (now := time.monotonic() - begin)) > 0:
            for name in late(waiting, turn, now, turn_ends, seconds):
                print(f"[{now:5.1f}] {name}: took too long, and is ended", flush=True)
                processes[name].process.kill()
            if turn is None and ready and (chosen := next_turn(ready, waiting, turns, now / seconds)):
                turn = chosen
                ready.remove(turn)
                turn_ends = now + min(LONGEST_TURN[turn] if turns[turn] == 0 else left, left - GRACE)
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


def next_turn(ready: list[str], waiting: list[str], turns: dict[str, int], share: float) -> str | None:
    """Whose turn is next, after a share of the time; None: one that is not ready comes before."""

    def rank(name: str) -> tuple[int, int]:
        return turns[name], list(CASES).index(name)

    chosen = min(ready, key=rank)
    return chosen if share > WAIT_SHARE or all(rank(chosen) < rank(name) for name in waiting) else None


def shortly(event: dict[str, Any]) -> str:
    """An event as a line; of the chunks only the last ones."""
    shown = {key: value for key, value in event.items() if key != "event"}
    if "chunks" in shown:
        chunks = shown.pop("chunks")
        shown |= {"seconds": round(sum(chunks), 3), "last chunks": chunks[-8:]}
    return event["event"] + " " + ", ".join(f"{key} {value}" for key, value in shown.items())


def report(events: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The tables."""
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
    longest: dict[str, dict[str, Any]] = {}
    for name in ("dense", "hybrid"):
        for row in rows.get(name, [])[1:]:
            longest[name] = max(longest.get(name, row), row, key=lambda row: (len(row["chunks"]), len(row["tokens"])))
            if row["tokens"]:
                lines.append(
                    f"{name}, prompt of {row['length']:,}: TTFT {sum(row['chunks']):.2f} s, then "
                    f"{1e3 * float(np.median(row['tokens'][1:])):.1f} ms a token; peak {row['peak']} GB"
                )
    for count in (8, 16, 24, 32, 40, 48, 56, 64):
        so_far = {name: row["chunks"][:count] for name, row in longest.items() if len(row["chunks"]) >= count}
        if not so_far:
            continue
        sums = {name: sum(chunks) for name, chunks in so_far.items()}
        last = {name: float(np.median(chunks[-3:])) for name, chunks in so_far.items()}
        lines.append(
            f"first {count} chunks of 8,192: "
            + "; ".join(f"{name} {sums[name]:.2f} s (a chunk there {1e3 * last[name]:.0f} ms)" for name in sums)
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for all events as JSON")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=270, help="all is ended by then")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--case", help="run this case as a process of its own (internal)")
    arguments = parser.parse_args()
    if arguments.case:
        CASES[arguments.case](arguments.small, Turn())
        return 0
    names = [name for name in CASES if name in arguments.only.split(",")]
    events = run(names, arguments.seconds, arguments.small)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "check_hybrid.json").write_text(json.dumps(events))
    print()
    print("\n".join(report(events)))
    bad = [name for name, found in events.items() if any(e["event"] == "failed" or not e.get("good", 1) for e in found)]
    missing = [name for name in names if not any(event["event"] == "row" for event in events[name])]
    for name in bad:
        print("BROKEN", name)
    for name in missing:
        print("NO FIGURES", name)
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main())
