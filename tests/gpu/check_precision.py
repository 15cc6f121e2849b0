"""The model in fp8 and int8 on a GPU: `python -m tests.gpu.check_precision --out DIR` from the root, one card.

First a mixture-of-experts layer of DeepSeek-V3 by itself, under two histograms: right to within its casts, its time by
kernel, and how much of it the grouped products are.  Then a random model of a billion parameters of the same shape in
each precision: its logits against bfloat16's and against the reference kernels', and the time to the first token of
65,536.  Cases run in processes of their own (see `workers`).
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.timing import alone, measure
from jaxinfer.configs.model import ModelConfig
from jaxinfer.configs.presets import preset
from jaxinfer.kernels import dispatch
from jaxinfer.kernels.quantize import dequantize, dequantize_weight, quantize
from jaxinfer.kernels.quantized import Quantized, quantize_for, quantize_weight_like
from jaxinfer.model import moe
from jaxinfer.model.params import shapes_of, use
from jaxinfer.model.precision import Precision
from jaxinfer.sharding.mesh import MeshShape
from jaxinfer.sharding.rules import Plan, Rules
from tests.gpu import workers
from tests.gpu.check_engine import BILLION

MODULE = "tests.gpu.check_precision"
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share."""
HELD_SECONDS = 20
REPEATS = 7
KINDS = "fp8 row", "fp8 block", "int8 row"
PEERS = {"gate_up": 1.292e15, "down": 1.334e15, "small groups": 9.63e14, "shared": 1.38e15, "bytes": 3.89e12}
"""DeepGEMM in FP8 on an H200: FLOP/s of the grouped products with 1,000 rows a group and more, of both with fewer
(256), of the shared expert's two together; bytes/s of weights where a group has a few rows."""
MORE = 1.1
"""Bound on the deviation from experts without casts on the way, relative to that of a reference with the casts.  The
two do not agree number by number: products that differ by the rounding of bfloat16 now and then go to another code."""

LAYERS = {
    # name: tokens of all ranks, tokens of the rank's own, experts held of 256
    "prefill, all experts": (8192, 8192, 256),
    "prefill, a rank of eight, 8K tokens each": (65536, 8192, 32),
    "decode, a rank of eight": (512, 64, 32),
    "decode, all experts": (64, 64, 256),
    "prefill, a rank of eight, a tile": (8192, 1024, 32),
}


def routing(tokens: int, skewed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Eight of 256 experts for each token, their popularity equal or by Zipf's law, and weights that sum to 2.5."""
    rng = np.random.default_rng(0)
    popularity = rng.permutation(1 / np.arange(1, 257)) if skewed else np.ones(256)
    drawn = np.log(popularity)[None] + rng.gumbel(size=(tokens, 256))
    weights = rng.uniform(0.1, 1, (tokens, 8))
    return (
        np.argpartition(-drawn, 8, axis=1)[:, :8].astype(np.int32),
        (2.5 * weights / weights.sum(axis=1, keepdims=True)).astype(np.float32),
    )


def random_layer(layer: moe.MoE) -> dict:
    """Weights of one layer, those of the experts stacked on a leading axis of one and made expert by expert."""
    key = iter(jax.random.split(jax.random.key(0), 64))

    def make(like: Quantized, key: jax.Array) -> Quantized:
        return quantize_weight_like(jax.random.normal(key, like.shape) * like.shape[-1] ** -0.5, like)

    def one(shape):
        if not isinstance(shape, Quantized):
            return (jax.random.normal(next(key), shape.shape) * shape.shape[-1] ** -0.5).astype(shape.dtype)
        if shape.shape[0] != layer.config.num_experts:
            return jax.jit(functools.partial(make, shape))(next(key))
        expert = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape[1:], part.dtype), shape)
        keys = jax.random.split(next(key), shape.shape[0])
        return jax.jit(lambda keys: jax.lax.map(functools.partial(make, expert), keys))(keys)

    return stacked(jax.tree.map(one, shapes_of(layer), is_leaf=lambda leaf: isinstance(leaf, Quantized)))


def stacked(weights: dict) -> dict:
    """With the leading axis of layers that experts have; of shapes as of arrays."""

    def lead(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
        return leaf[None]

    return weights | {name: jax.tree.map(lead, weights[name]) for name in ("gate_up", "down")}


def check_layer(name: str, kind: str) -> dict:
    """Right to within its casts, and its time, under both histograms: one program serves all."""
    tokens, own, held = LAYERS[name]
    config = preset("deepseek-v3", {} if "block" in kind else {"weight_block_size": None})
    precision = Precision.named(kind.split()[0], config, jnp.dtype(jnp.bfloat16))
    here = preset("deepseek-v3", {"num_experts": held, "weight_block_size": config.weight_block_size})
    layer = moe.MoE(here, precision)
    # All tokens in one tile, as many as there are: what larger tiles would bring.
    moe.EXCHANGE_TOKENS = tokens
    plan = Plan.prefill(Rules(MeshShape()))
    router = jax.random.normal(jax.random.key(2), (config.num_experts, config.hidden_size)) / 85
    bias, norm = jnp.zeros(config.num_experts), jnp.ones(config.hidden_size)
    router = SimpleNamespace(router=router, router_bias=bias, config=config, dtype=precision.dtype)

    def routed(weights, rows, experts, factors):
        return use(layer, weights, plan)._routed(rows, experts, factors, 0, plan)

    def whole(weights, x, rows, experts, factors):
        """The rank's part of a layer, without the exchange: its own tokens are quantised, all tokens have been."""
        module, mine = use(layer, weights, plan), quantize_for(weights["shared"]["gate_up"], x[:own])
        # The router's work is done, its choice is not taken.
        chosen, its_weights = moe.MoE.route(router, x[:own], norm)
        factors = factors.at[:own].add(0 * its_weights + 0 * chosen)
        return module._routed(rows if own < tokens else mine, experts, factors, 0, plan), module.shared(mine, plan)

    def quantized(weights, x):
        return quantize_for(weights["shared"]["gate_up"], x)

    # Compiled before the device is taken: while one case has it, no other works there.
    begin = time.monotonic()
    made = stacked(shapes_of(layer))
    x = jax.ShapeDtypeStruct((tokens, config.hidden_size), jnp.float32)
    choice = [jax.ShapeDtypeStruct((tokens, 8), dtype) for dtype in (jnp.int32, jnp.float32)]
    quantize_rows = jax.jit(quantized).lower(made, x).compile()
    rows = jax.eval_shape(quantized, made, x)
    program = jax.jit(whole).lower(made, x, rows, *choice).compile()
    routed_program = jax.jit(routed).lower(made, rows, *choice).compile()
    said, kernels, errors = [f"compiled in {time.monotonic() - begin:.1f} s"], {}, []
    with alone(os.environ[LOCK], 2 * HELD_SECONDS):
        weights = random_layer(layer)
        x = jax.random.normal(jax.random.key(1), x.shape)
        rows = quantize_rows(weights, x)
        for histogram in ("even", "Zipf"):
            experts, factors = (jnp.asarray(array) for array in routing(tokens, histogram == "Zipf"))
            got = np.asarray(routed_program(weights, rows, experts, factors)[:16])
            exact, cast = (expected(weights, rows, experts[:16], factors[:16], casts) for casts in (False, True))
            errors.append(tuple(float(np.linalg.norm(y - exact) / np.linalg.norm(exact)) for y in (got, cast)))
            call = functools.partial(program, weights, x, rows, experts, factors)
            timing = measure(lambda _, call=call: call(), jax.block_until_ready, REPEATS)
            times: dict[str, float] = {}
            for kernel, seconds in timing.kernels:
                times[kernel] = times.get(kernel, 0) + seconds
            counts = np.bincount(np.minimum(np.asarray(experts), held).reshape(-1), minlength=held + 1)[:held]
            total, products = timing.seconds, sum(t for kernel, t in times.items() if "gemm" in kernel)
            flop = 6 * config.hidden_size * config.moe_intermediate_size * (counts.sum() + own)
            said.append(
                f"{histogram}: error {errors[-1][0]:.2e}, of casts {errors[-1][1]:.2e}; {1e3 * total:.2f} ms by "
                f"{timing.clock}, {flop / total / 1e12:.0f} TFLOP/s, floor of DeepGEMM / time "
                f"{floor(config, counts, own) / total:.2f}, own products {100 * products / total:.0f} % of the time; "
                f"{counts.sum()} rows"
            )
            most = sorted(times.items(), key=lambda item: -item[1])[:14]
            kernels |= {f"{histogram} {kernel}": round(1e6 * seconds, 1) for kernel, seconds in most}
    answer = {"said": "; ".join(said), "kernels": kernels, "errors": errors}
    wrong = f"expected errors of at most {MORE} times what the casts cost, got {errors}"
    return answer if all(got < MORE * casts for got, casts in errors) else answer | {"failed": wrong}


def floor(config: ModelConfig, counts: np.ndarray, own: int) -> float:
    """Seconds that the products of a layer take if each runs as DeepGEMM does (`PEERS`)."""
    size = config.hidden_size * config.moe_intermediate_size
    rows, held = counts.sum(), np.count_nonzero(counts)
    shared = max(6 * size * own / PEERS["shared"], 3 * size / PEERS["bytes"])
    if rows < 128 * held:
        return 3 * size * held / PEERS["bytes"] + shared
    peers = [PEERS["small groups"]] * 2 if rows < 1000 * held else [PEERS["gate_up"], PEERS["down"]]
    return rows * size * (4 / peers[0] + 2 / peers[1]) + shared


def expected(weights: dict, rows: Quantized, experts: jax.Array, factors: jax.Array, casts: bool) -> np.ndarray:
    """The routed experts of a few tokens in float32; with `casts`, what lies between two products rounded as the layer
    rounds it."""
    held, scheme = weights["gate_up"].shape[1], rows.scheme
    x = dequantize(rows.values[:16], rows.scale[:16].T, jnp.float32)

    def multiplied(weight, expert):
        values = weight.values[0, expert].reshape(-1, weight.shape[-1])
        blocks = () if scheme == "row" else (weight.shape[-1] // 128,)
        return dequantize_weight(values, weight.scale[0, expert].reshape(-1, *blocks), jnp.float32)

    # Weights are an argument: what a program closes over, it holds as constants, here 11 GB.
    @jax.jit
    def one(weights, x, expert, factor):
        gate_up = jnp.dot(multiplied(weights["gate_up"], expert), x, precision="highest")
        if casts:
            gate_up = gate_up.astype(jnp.bfloat16).astype(jnp.float32)
        gate, up = jnp.split(gate_up, 2)
        hidden = jax.nn.silu(gate) * up
        if casts:
            hidden = dequantize(*quantize(hidden[None], scheme=scheme, dtype=rows.dtype), jnp.float32)[0]
        return factor * jnp.dot(multiplied(weights["down"], expert), hidden, precision="highest")

    out = np.zeros((16, x.shape[1]))
    for token in range(16):
        for choice in range(8):
            if int(experts[token, choice]) < held:
                out[token] += np.asarray(one(weights, x[token], experts[token, choice], factors[token, choice]))
    return out


MODELS = {
    "bf16": ("bf16", {}),
    "fp8 row": ("fp8", {"weight_block_size": None}),
    "fp8 block": ("fp8", {}),
    "int8": ("int8", {}),
    "fp8 row, first projection bf16": ("fp8", {"weight_block_size": None}),
    "fp8 row, reference kernels": ("fp8", {"weight_block_size": None}),
    "int8, reference kernels": ("int8", {}),
}
PROMPT, ROWS = 4096, list(range(0, 4096, 8))


def check_model(name: str) -> dict:
    """The logits of some rows of a prompt, left as a file for the table, and how long things took."""
    precision, changes = MODELS[name]
    reference = "reference" in name
    if reference:
        dispatch.choose = lambda op, implementation, reason_against: "reference"  # type: ignore
    rng = np.random.default_rng(0)
    prompt, long_prompt = rng.integers(3, 32768, PROMPT).tolist(), rng.integers(3, 32768, 65536).tolist()
    begin = time.monotonic()
    with LLM(
        model="deepseek-v3",
        weights="random",
        overrides=BILLION | changes,
        precision=precision,
        unquantized_first_ffn="first" in name,
        max_context=8192 if reference else 131072,
        max_num_seqs=1,
        memory_fraction=0.12,
    ) as llm:
        ready = time.monotonic() - begin
        logits = llm.logits(prompt, rows=ROWS)
        np.save(file_of(name), logits)
        if reference:
            return {"said": f"ready in {ready:.0f} s"}
        greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        with alone(os.environ[LOCK], HELD_SECONDS):
            llm.generate([long_prompt], greedy)
            metrics = llm.generate([long_prompt], greedy)[0].metrics
        held = sum(array.nbytes for array in jax.tree.leaves(llm.engine.runner.params))
    return {
        "said": f"65,536 tokens: TTFT {metrics.ttft:.3f} s, then {1e3 * (metrics.tpot or 0):.2f} ms a token; ready in "
        f"{ready:.0f} s (others compile meanwhile); weights {held / 1e9:.2f} GB"
    }


def file_of(name: str) -> Path:
    return Path(os.environ["CHECK_OUT"]) / f"logits {name}.npy".replace(" ", "_").replace(",", "")


def compare(answers: dict[str, dict]) -> list[str]:
    """Lines about the logits of two precisions: median KL divergence, share of rows with the same best token."""
    lines = []
    pairs = [(name, "bf16") for name in MODELS if name not in ("bf16",)]
    pairs += [("fp8 row", "fp8 row, reference kernels"), ("int8", "int8, reference kernels")]
    for name, other in pairs:
        if file_of(name).exists() and file_of(other).exists():
            one, two = (log_softmax(np.load(file_of(n)).astype(np.float64), axis=-1) for n in (other, name))
            divergence = np.median(np.sum(np.exp(one) * (one - two), axis=-1))
            agreement = np.mean(one.argmax(-1) == two.argmax(-1))
            lines.append(f"{name} against {other}: median KL {divergence:.2e}, top-1 {100 * agreement:.1f} %")
    return lines


def cases() -> dict[str, Callable[[], dict]]:
    layers = {f"layer {kind}, {name}": functools.partial(check_layer, name, kind) for name in LAYERS for kind in KINDS}
    return {f"model {name}": functools.partial(check_model, name) for name in MODELS} | layers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for logits and answers")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=240, help="no case begins after so long")
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ["CHECK_OUT"] = str(arguments.out)
    environment = os.environ | {
        LOCK: str(Path(tempfile.mkdtemp()) / "lock"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Every kernel launched for itself, so that each run has the same ones.
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    }
    names = [name for name in cases() if arguments.only in name]
    answers: dict[str, dict] = {}
    # Models compile for long, on one core each; a layer of all experts takes 12 GB and as much again to be made.
    for kind, at_a_time in (("model ", 7), ("layer ", 3)):
        left = arguments.seconds - (time.monotonic() - begin)
        chosen = [name for name in names if name.startswith(kind)]
        answers |= workers.run(MODULE, chosen, at_a_time, 150, left, environment)
        (arguments.out / "check_precision.json").write_text(json.dumps(answers, indent=1))
    print()
    for name, answer in answers.items():
        print(f"{name}: {answer.get('said', '')}{answer.get('failed', '')}")
        if "kernels" in answer:
            print("   ", ", ".join(f"{kernel[:40]} {us}" for kernel, us in answer["kernels"].items()))
    print("\n".join(compare(answers)))
    failed = [name for name, answer in answers.items() if "failed" in answer]
    for name in failed:
        print(f"BROKEN {name}: {answers[name]['failed']}\n{answers[name].get('trace', '')[-1500:]}")
    print(f"{len(answers)} of {len(names)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
