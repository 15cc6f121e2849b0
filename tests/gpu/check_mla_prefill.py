"""Checks and times the MLA prefill kernel on one Hopper GPU: `python -m tests.gpu.check_mla_prefill [--out DIR]`.

Cases run in processes of their own, which compile side by side and take turns on the GPU: comparisons with float32, and
times of the kernel without the expansion of keys and values, beside cuDNN's.  A time is of a series of calls after a
rest: the first at the clock of a rested card ("rested"), the last at what its power allows ("steady").  Prints tables
last and writes all answers as JSON.  Exits with 1 if a bound is broken.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench import workers
from jaxinfer.bench.timing import alone
from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.mosaic.attention import Blocks, attend
from jaxinfer.kernels.mosaic.mla_prefill import _fitting

MODULE = "tests.gpu.check_mla_prefill"
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share."""
HELD_SECONDS = 15
NORM_BOUND, BIAS_BOUND, LSE_BOUND = 4e-3, 1e-3, 2e-3
SCALE = 192**-0.5
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Check:
    """Shapes of a comparison; `limits` names how many keys each query sees, `data` what the operands are like."""

    tokens: int
    keys: int
    heads: int
    limits: str = "all"
    data: str = "normal"
    nope: int = 128
    v: int = 128
    rope: int = 64


CHECKS = {
    "one tile": Check(128, 128, 1),
    "several tiles, no mask": Check(256, 1024, 4),
    "causal": Check(1024, 1024, 5, "causal"),
    "odd lengths": Check(1003, 2999, 5, "causal"),
    "random limits": Check(777, 1111, 3, "random"),
    "segments": Check(2048, 1024, 16, "segments"),
    "bundled": Check(500, 3000, 4, "causal", nope=64),
    "GLM-5": Check(500, 1500, 3, "causal", nope=192, v=256),
    "rising scores": Check(1003, 2999, 5, "causal", "rising"),
    "rising scores, random limits": Check(777, 1111, 3, "random", "rising"),
    "falling scores": Check(1003, 2999, 5, "causal", "falling"),
    "positive values, 64K": Check(256, 65536, 2, data="positive"),
    "near-uniform positive, 64K": Check(256, 65536, 2, data="uniform"),
    "more than 2^31 elements of output": Check(139264, 256, 128, "causal"),
    "more than 2^31 elements of keys": Check(200, 139264, 128, "causal"),
}
# keys of 8,192 queries, whether each sees only those before it, FlashAttention-3 (TFLOP/s, another run on an H200).
TIMED = {"8K": (8192, True, "768"), "8K, no mask": (8192, False, ""), "64K": (65536, True, "674")}
BLOCKS = {
    "chosen": Blocks(),
    "64 keys, 4 stages": Blocks(keys=64, stages=4),
    "L2 16 MiB": Blocks(l2_bytes=16 * 2**20),
    "L2 64 MiB": Blocks(l2_bytes=64 * 2**20),
}
TOKENS, HEADS = 8192, 128


def limits_of(check: Check) -> np.ndarray:
    rng = np.random.default_rng(0)
    tokens, keys, row = check.tokens, check.keys, np.arange(check.tokens)
    if check.limits == "causal":
        return row + 1 + keys - tokens if keys >= tokens else row * keys // tokens
    if check.limits == "random":
        return rng.integers(0, keys + 1, tokens) * (rng.random(tokens) < 0.8)
    if check.limits == "segments":
        return np.where(row // 300 % 2 == 1, np.minimum(row % 300 + 500, keys), 0)
    return np.full(tokens, keys)


def operands_of(check: Check) -> tuple[jax.Array, ...]:
    """Queries, keys, rotary key and values, lengths rounded up to multiples of 8."""
    tokens, keys = (-(-n // 8) * 8 for n in (check.tokens, check.keys))
    shapes = (tokens, check.heads, check.nope + check.rope), (keys, check.heads, check.nope), (keys, check.rope)
    seeds = jax.random.split(jax.random.key(1), 4)
    arrays = [
        jax.random.normal(seed, shape, jnp.bfloat16)
        for seed, shape in zip(seeds, (*shapes, (keys, check.heads, check.v)), strict=True)
    ]
    if check.data in ("positive", "uniform"):
        arrays[3] = jnp.abs(arrays[3])
    if check.data == "uniform":
        arrays[0] = arrays[0] * 0.05
    if check.data in ("rising", "falling"):
        sizes = jnp.linspace(0.1, 40, keys)
        sizes = sizes if check.data == "rising" else sizes[::-1]
        arrays[1:3] = [(a * sizes.reshape(-1, *[1] * (a.ndim - 1))).astype(jnp.bfloat16) for a in arrays[1:3]]
    return tuple(arrays)


def expected(check: Check, rows: np.ndarray, heads: list[int], limit: jax.Array, q, k, k_rope, v):
    """Output `[H, T, v]` and log-sum-exp `[H, T]` of some rows and heads, in float32."""

    def one(head):
        keys = jnp.concatenate((k[: check.keys, head], k_rope[: check.keys]), axis=1).astype(jnp.float32)
        scores = jnp.dot(q[rows, head].astype(jnp.float32), keys.T, precision="highest") * SCALE
        scores = jnp.where(jnp.arange(check.keys) < limit[rows][:, None], scores, -jnp.inf)
        weights = jnp.nan_to_num(jax.nn.softmax(scores, axis=1))
        out = jnp.dot(weights, v[: check.keys, head].astype(jnp.float32), precision="highest")
        return out, jax.nn.logsumexp(scores, axis=1)

    return jax.lax.map(one, jnp.asarray(heads))


def run_check(name: str) -> dict[str, Any]:
    check = CHECKS[name]
    limit = jnp.asarray(np.pad(limits_of(check), (0, -check.tokens % 8)), jnp.int32)
    rows = np.unique(np.r_[: min(512, check.tokens), max(check.tokens - 512, 0) : check.tokens])
    heads = list(range(0, check.heads, max(check.heads // 8, 1)))
    blocks = _fitting(check.nope, check.rope, check.v)[0]

    def kernel(limit, *operands):
        out, lse = attend(*operands, limit, scale=SCALE, blocks=blocks, multiprocessors=MULTIPROCESSORS)
        return out[rows][:, np.asarray(heads)].swapaxes(0, 1), lse[np.asarray(heads)][:, rows], jnp.isfinite(out).all()

    make = jax.jit(functools.partial(operands_of, check)).lower().compile()
    programs = [
        jax.jit(f).lower(limit, *make.out_info).compile()
        for f in (kernel, functools.partial(expected, check, rows, heads))
    ]
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        (out, lse, finite), (wanted, wanted_lse) = (jax.device_get(program(limit, *operands)) for program in programs)
    answer = verdict(out, lse, wanted, wanted_lse, np.asarray(limit)[rows] > 0, bool(finite))
    return answer | {"spent": "2^31" in name}  # a process keeps what it has allocated


def verdict(out, lse, wanted, wanted_lse, seen: np.ndarray, finite: bool = True, factor: int = 1) -> dict[str, Any]:
    """Errors of `[H, T, v]` and `[H, T]`, where only some of the T queries see a key."""
    out, wanted = out.astype(np.float64), wanted.astype(np.float64)
    error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    bias = float((out - wanted).sum() / np.abs(wanted).sum())
    some, wanted_some = lse[:, seen], wanted_lse[:, seen]
    lse_error = float(np.max(np.abs(some - wanted_some) / np.maximum(1, np.abs(wanted_some) / 64)))
    good = finite and error <= factor * NORM_BOUND and abs(bias) <= BIAS_BOUND and lse_error <= factor * LSE_BOUND
    good &= bool((out[:, ~seen] == 0).all() and np.isneginf(lse[:, ~seen]).all())
    said = f"{'ok' if good else 'BAD'} error {error:.1e}, signed {bias:+.1e}, log-sum-exp {lse_error:.1e}"
    return {"said": said} if good else {"said": said, "failed": "a bound is broken", "trace": f"finite {finite}"}


def run_public() -> dict[str, Any]:
    """The public operation against its own reference, both on the GPU, with NaN where nothing was written."""

    def operands():
        shapes = (700, 16, 192), (1500, 576), (16, 128, 512), (16, 128, 512)
        seeds = jax.random.split(jax.random.key(2), 4)
        q, latents, k_b, v_b = (jax.random.normal(a, b, jnp.bfloat16) for a, b in zip(seeds, shapes, strict=True))
        return q, latents.at[1300:].set(jnp.nan), k_b / 512**0.5, v_b / 512**0.5

    limit = jnp.asarray(np.random.default_rng(0).integers(0, 1301, 700), jnp.int32)
    make = jax.jit(operands).lower().compile()
    programs = [
        jax.jit(functools.partial(mla_prefill, scale=SCALE, implementation=i)).lower(*make.out_info, limit).compile()
        for i in ("mosaic", "reference")
    ]
    with alone(os.environ[LOCK], HELD_SECONDS):
        (out, lse), (wanted, wanted_lse) = (jax.device_get(program(*make(), limit)) for program in programs)
    swapped = out.swapaxes(0, 1), lse.T, wanted.swapaxes(0, 1), wanted_lse.T
    return verdict(*swapped, np.asarray(limit) > 0, factor=2)


def series(call: Callable[[], Any], wait: Callable[[Any], Any], calls: int, groups: int) -> list[float]:
    """Seconds of a call, group by group, after a rest."""
    wait(call())
    time.sleep(0.4)
    found = []
    for _ in range(groups):
        begin = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        found.append((time.perf_counter() - begin) / calls)
    return found


def rates(found: list[float], keys: int, causal: bool) -> dict[str, Any]:
    pairs = TOKENS * (keys - TOKENS) + TOKENS * (TOKENS + 1) // 2 if causal else TOKENS * keys
    flops = 2 * 320 * HEADS * pairs
    late = sorted(found[len(found) // 2 :])
    rested, steady = (flops / seconds / 1e12 for seconds in (min(found[:2]), late[len(late) // 2]))
    said = f"rested {rested:.0f}, steady {steady:.0f} TFLOP/s"
    return {"said": said, "rested": rested, "steady": steady, "series": found}


def run_time(name: str, blocks: str) -> dict[str, Any]:
    keys, causal, _ = TIMED[name]
    row = jnp.arange(TOKENS, dtype=jnp.int32)
    limit = row + 1 + keys - TOKENS if causal else jnp.full_like(row, keys)
    make = jax.jit(functools.partial(operands_of, Check(TOKENS, keys, HEADS))).lower().compile()
    kernel = functools.partial(attend, scale=SCALE, blocks=BLOCKS[blocks], multiprocessors=MULTIPROCESSORS)
    program = jax.jit(kernel).lower(*make.out_info, limit).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        calls, groups = (4, 12) if keys == TOKENS else (1, 8)
        found = series(lambda: program(*operands, limit), jax.block_until_ready, calls, groups)
    return rates(found, keys, causal)


def run_cudnn(name: str) -> dict[str, Any]:
    """cuDNN's attention: causal where both lengths are equal, else without a mask."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    keys, causal, _ = TIMED[name]
    causal &= keys == TOKENS
    with alone(os.environ[LOCK], HELD_SECONDS), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (
            torch.randn((1, length, HEADS, width), device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for length, width in ((TOKENS, 192), (keys, 192), (keys, 128))
        )
        attention = torch.nn.functional.scaled_dot_product_attention
        calls, groups = (4, 12) if keys == TOKENS else (1, 8)
        found = series(
            lambda: attention(q, k, v, is_causal=causal, scale=SCALE), lambda _: torch.cuda.synchronize(), calls, groups
        )
    return rates(found, keys, causal)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"check {name}": functools.partial(run_check, name) for name in CHECKS
    }
    found["check the public operation"] = run_public
    for name in TIMED:
        found[f"time {name}: cuDNN"] = functools.partial(run_cudnn, name)
        found |= {f"time {name}: {blocks}": functools.partial(run_time, name, blocks) for blocks in BLOCKS}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the answers as JSON")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=100, help="no answer is waited for after so long")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in cases() if arguments.only in name]
    environment = os.environ | {
        LOCK: str(Path(tempfile.mkdtemp()) / "lock"),
        "CHECK_GPU_WORKER": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    begin, answers = time.monotonic(), {}
    served = workers.serve(MODULE, [{"name": name} for name in names], arguments.workers, 80, environment)
    for index, answer in served:
        answers[names[index]] = answer
        said = answer.get("said", answer.get("failed"))
        print(f"[{time.monotonic() - begin:5.1f}] {names[index]}: {said}", flush=True)
        if time.monotonic() - begin > arguments.seconds:
            break
    served.close()
    (arguments.out / "check_mla_prefill.json").write_text(json.dumps(answers, indent=1))
    for name in (name for name in names if name.startswith("check") and name in answers):
        print(f"{name}: {answers[name].get('said', 'failed')}")
    for length, (_, _, peer) in TIMED.items():
        print(f"\nTFLOP/s rested, steady: 128 heads of 192 and 128, 8,192 queries, {length}; FlashAttention-3 {peer}")
        for name, answer in answers.items():
            if name.startswith(f"time {length}:") and "steady" in answer:
                print(f"{answer['rested']:6.0f} {answer['steady']:6.0f}  {name.split(': ')[1]}")
    failed = [name for name, answer in answers.items() if "failed" in answer]
    for name in failed:
        print(f"BROKEN {name}: {answers[name]['failed']}\n{answers[name].get('trace', '')[-800:]}")
    print(f"{len(answers)} of {len(names)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed or len(answers) < len(names) else 0


if __name__ == "__main__":
    if "CHECK_GPU_WORKER" in os.environ:
        workers.work(lambda name: cases()[name]())
    else:
        sys.exit(main())
