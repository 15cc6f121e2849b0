"""Prompts through `LLM` on GPUs with hybrid or dense attention, each chunk timed, and logits to compare."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from scipy.special import log_softmax

from jaxinfer import LLM, SamplingParams
from jaxinfer.build import build_engine
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.engine.request import Request
from jaxinfer.engine.runner import Runner

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
"""Bound on a median KL divergence, as in `check_engine`: other orders of summation in bfloat16."""
DECODED = 12


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


def prompt(length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(length).integers(3, vocab_size, length).tolist()


def opened(options: EngineOptions) -> LLM:
    """An LLM whose programs compile when they are first used: those of smaller steps never are."""
    with mock.patch.object(Runner, "compile"):
        return LLM.from_engine(build_engine(options, progress=False))


def smoke(small: bool, turn: Turn, out: Path) -> None:
    """Logits of a small random model with budgets for everything, against dense."""
    del turn, out
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
            logits[name] = llm.logits(ids, rows=rows)
            greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            tokens[name] = list(llm.generate([ids], greedy)[0].token_ids)
    said, good = compared(logits["dense"], logits["hybrid"])
    same = sum(a == b for a, b in zip(tokens["dense"], tokens["hybrid"], strict=True))
    said = f"budgets for everything against dense: {said}, {same} of 8 greedy tokens equal"
    say(event="row", said=f"{said}; {time.monotonic() - started:.0f} s", good=good)


def compared(one: np.ndarray, two: np.ndarray) -> tuple[str, bool]:
    """How far two sets of logits `[rows, vocab]` are apart, and whether that is within bounds."""
    one, two = (log_softmax(array.astype(np.float64), axis=-1) for array in (one, two))
    divergence = float(np.median(np.sum(np.exp(one) * (one - two), axis=-1)))
    agreement = float(np.mean(one.argmax(-1) == two.argmax(-1)))
    said = f"{len(one)} rows, median KL {divergence:.1e}, top-1 agreement {100 * agreement:.0f} %"
    return said, bool(np.isfinite(divergence)) and divergence < DIVERGENCE and agreement > 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts of several lengths, each in a turn of its own, behind logits of one that needs no turn."""

    attention: str
    lengths: tuple[int, ...]
    memory_fraction: float
    model: str = "deepseek-v3"
    overrides: dict[str, Any] = dataclasses.field(default_factory=lambda: WIDE)
    mesh: str = ""
    compared: int = 0
    """Length of the prompt whose logits are kept, in the second half of it; 0: none."""

    def options(self, small: bool) -> EngineOptions:
        options: dict[str, Any] = {
            "model": self.model,
            "weights": "random" if self.overrides else "auto",
            "overrides": self.overrides,
            "precision": "bf16",
            "attention": self.attention,
            "mesh": self.mesh,
            "max_context": max(self.lengths) + 64,
            "chunk_size": 8192,
            "max_num_seqs": 1,
            "memory_fraction": self.memory_fraction,
        }
        if small:
            options |= {"precision": "fp32", "chunk_size": 512, "max_context": 4096 + 64, "memory_fraction": 0.9}
            options |= {"overrides": SMALL} if self.overrides else {}
            if self.attention == "hybrid":
                options["attention"] = (
                    "hybrid:window=512,dense_below=1024,hot_epoch=512,candidates=32,retrieve_blocks=4"
                )
        return EngineOptions(**options)

    def __call__(self, small: bool, turn: Turn, out: Path) -> None:
        lengths = tuple(4096 >> number for number in range(len(self.lengths)))[::-1] if small else self.lengths
        options, begin = self.options(small), time.monotonic()
        with opened(options) as llm:
            loaded = time.monotonic() - begin
            runner = llm.engine.runner
            assert isinstance(runner, Runner) and options.chunk_size is not None
            compiled = compile_steps(runner, options.chunk_size)
            if self.compared:
                length = 2048 if small else self.compared
                rows = list(range(length // 2, length, length // 96))
                ids = prompt(length, runner.config.vocab_size)
                np.save(out / f"{self.attention}-{self.mesh.replace('=', '')}.npy", llm.logits(ids, rows=rows))
            warm = time.monotonic()
            one_prompt(llm, options.chunk_size, lambda _: False)
            warm = time.monotonic() - warm
            held = {
                name: sum(array.nbytes for array in jax.tree.leaves(tree)) / 1e9
                for name, tree in (("weights", runner.params), ("cache", runner.cache))
            }
            known = {"loaded": round(loaded), "compiled": compiled, "first prompt": round(warm)}
            known |= {"gb": held | {"peak": peak_gigabytes()}}
            for length in lengths:
                turn.wait(**known)
                known = {}
                one_prompt(llm, length, lambda _: turn.over)


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
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.devices()) / 1e9


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
        if prefilling and len(chunks) % 8 == 0:
            tell()
        if over(len(chunks)) and engine.has_work:
            found["cut"] = True
            engine.abort(request.id)
            engine.step()
    tell()
