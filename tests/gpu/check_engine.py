"""Checks and figures of the engine on real GPUs: `python -m tests.gpu.check_engine` from the root, on one or two.

The fixtures in float32 against their reference; a random model of a billion parameters in bfloat16, context-parallel
against one card, with narrower caches, and with a prompt's last tokens in a step of their own; and a prompt of 65,536
tokens.  Prints a table and exits with 1 if a bound is broken.
"""

import gc
import sys
import time
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
from scipy.special import log_softmax

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.runner import Runner
from tests.oracles import oracle

FIXTURES = ("deepseek_v3", "deepseek_v3_fp8", "deepseek_v2_lite")
SHARE = {"memory_fraction": 0.15}
"""Room for other checks beside."""
LOGIT_TOLERANCE = 5e-5
DIVERGENCE = 1e-3
"""Bound on a median KL divergence, in nats: other orders of summation in bfloat16, and 8 bits of a cache."""
BILLION = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": 768,
    "intermediate_size": 6144,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 32768,
}


def fixture_error(name: str, mesh: str) -> tuple[float, bool]:
    """Largest deviation of the logits, and whether the greedy continuation is the reference's."""
    reference = np.load(oracle(name) / "reference.npz")
    error, equal = 0.0, True
    with LLM(
        model=str(oracle(name)), precision="fp32", mesh=mesh, chunk_size=32, page_size=16, max_num_seqs=1, **SHARE
    ) as llm:
        for row, ids in enumerate(reference["input_ids"]):
            error = max(error, float(np.abs(llm.logits(ids.tolist()) - reference["logits"][row]).max()))
            greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            tokens = llm.generate([ids.tolist()], greedy)[0].token_ids
            close = np.flatnonzero(reference["greedy_margin"][row] < 1e-3)
            sure = close[0] if len(close) else 16
            equal &= list(tokens[:sure]) == reference["greedy"][row][:sure].tolist()
    return error, equal


def billion(mesh: str, prompt: list[int], rows: list[int], long_prompt: list[int]):
    """Logits of rows of a prompt, the answer to a long one, and how long both took."""
    started = time.monotonic()
    with LLM(
        model="deepseek-v3",
        weights="random",
        overrides=BILLION,
        precision="bf16",
        mesh=mesh,
        max_context=131072,
        max_num_seqs=1,
        **SHARE,
    ) as llm:
        ready = time.monotonic() - started
        logits = llm.logits(prompt, rows=rows)
        out = llm.generate([long_prompt], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))[0]
        again = llm.generate([long_prompt], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))[0]
    gc.collect()
    return logits, out.token_ids, (ready, again.metrics.ttft, again.metrics.tpot)


def log_probabilities(prompt: list[int], rows: list[int], **options) -> np.ndarray:
    """Of rows of a prompt, `[rows, vocab]`, with other options of the engine."""
    model = {"model": "deepseek-v3", "weights": "random", "overrides": BILLION, "precision": "bf16"}
    # Programs compile when they are first used: those of other steps never are.
    with (
        mock.patch.object(Runner, "compile"),
        LLM(**model, max_context=8192, max_num_seqs=1, **SHARE, **options) as llm,
    ):
        logits = llm.logits(prompt, rows=rows)
    gc.collect()
    return log_softmax(logits.astype(np.float64), axis=-1)


def variants(prompt: list[int], rows: list[int]) -> Iterator[tuple[str, bool]]:
    """Lines about other forms of the cache and of few tokens, and whether each is within `DIVERGENCE`."""
    # With chunks of 256 the last 20 of 4,116 tokens are a step of their own, which reads in the absorbed form.
    longer, last = [*prompt, *prompt[:20]], list(range(4097, 4116))
    cases = {
        "int8": (prompt, rows, {"kv": "int8"}),
        "int8, layers 0 and 1 in bf16": (prompt, rows, {"kv": "int8,0-1=bf16"}),
        "20 tokens by themselves": (longer, last, {"chunk_size": 256}),
    }
    exact = {len(text): log_probabilities(text, of) for text, of in ((prompt, rows), (longer, last))}
    for name, (text, of, options) in cases.items():
        one, two = exact[len(text)], log_probabilities(text, of, **options)
        divergence = float(np.median(np.sum(np.exp(one) * (one - two), axis=-1)))
        agreement = float(np.mean(one.argmax(-1) == two.argmax(-1)))
        line = f"{name}, {len(of)} rows: median KL to bf16 {divergence:.1e}, top-1 agreement {100 * agreement:.1f} %"
        yield line, divergence <= DIVERGENCE


def main() -> int:
    meshes = ["cp=1", "cp=2"][: len(jax.devices())]
    print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    lines, broken = [], []

    def found(line: str, good: bool = True) -> None:
        print(line, flush=True)
        lines.append(line)
        if not good:
            broken.append(line)

    for mesh in meshes:
        for name in FIXTURES[: 3 if mesh == "cp=1" else 2]:
            error, equal = fixture_error(name, mesh)
            line = f"{mesh} {name}: max |logits - reference| {error:.1e}, greedy equal: {equal}"
            found(line, error <= LOGIT_TOLERANCE and equal)
    rng = np.random.default_rng(0)
    prompt, long_prompt = rng.integers(3, 32768, 4096).tolist(), rng.integers(3, 32768, 65536).tolist()
    rows = list(range(0, 4096, 8))
    for line, good in variants(prompt, rows):
        found(line, good)
    results = {}
    for mesh in meshes:
        results[mesh] = billion(mesh, prompt, rows, long_prompt)
        ready, ttft, tpot = results[mesh][2]
        found(
            f"{mesh} 1B bf16, 65,536-token prompt: TTFT {ttft:.2f} s (compiled before), {1e3 * tpot:.1f} ms per token "
            f"after it; ready in {ready:.0f} s"
        )
    if "cp=2" in results:
        one, two = (log_softmax(results[mesh][0].astype(np.float64), axis=-1) for mesh in ("cp=1", "cp=2"))
        divergence = np.median(np.sum(np.exp(one) * (one - two), axis=-1))
        agreement = np.mean(one.argmax(-1) == two.argmax(-1))
        same = sum(a == b for a, b in zip(results["cp=1"][1], results["cp=2"][1], strict=True))
        found(
            f"cp=2 against cp=1, 512 rows of 4,096: median KL {divergence:.1e}, top-1 agreement "
            f"{100 * agreement:.1f} %; {same} of 32 greedy tokens after 65,536 equal",
            bool(divergence <= DIVERGENCE and agreement >= 0.98),
        )
    print("\n".join(["", *lines]))
    for line in broken:
        print("BROKEN:", line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
