"""Checks and times MLA prefill in e4m3 on one Hopper GPU: `python -m tests.gpu.check_mla_prefill_e4m3 [--out DIR]`.

As `check_mla_prefill`: comparisons with float32 on the same e4m3 operands, so that errors are those of the weights and
the sums; times of the kernel alone beside the one in bfloat16 and cuDNN's, "rested" and "steady"; and of the operation
with all it does.  "Weighed again": the largest score looked for in every tile, the price of data that is never quiet.
Prints a table last, and writes all answers as JSON.  Exits with 1 if a bound is broken.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.timing import alone
from jaxinfer.bench.timing import measure as time_of
from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.mosaic import attention_e4m3
from jaxinfer.kernels.mosaic.attention_e4m3 import KEYS, Blocks, attend, value_order
from jaxinfer.kernels.reference.expansion import E4M3, Operands
from tests.gpu import workers
from tests.gpu.check_mla_prefill import (
    HEADS,
    LOCK,
    TIMED,
    TOKENS,
    Check,
    limits_of,
    rates,
    run_cudnn,
    series,
)
from tests.gpu.check_mla_prefill import run_time as run_bfloat16

MODULE = "tests.gpu.check_mla_prefill_e4m3"
BIAS_BOUND, LSE_BOUND = 5e-3, 2e-3
NORM_BOUND = {"normal": 4e-2, "rising": 1e-1, "falling": 1e-1, "heavy": 1e-1}
"""Roundings of weights in a mean of values of both signs; of positive values `POSITIVE_BOUND`."""
POSITIVE_BOUND = 1e-2
PRODUCTS = 32
"""Of e4m3 numbers, which tensor cores add up at a time: see `score_bound`."""
SCALE = 192**-0.5
MULTIPROCESSORS = 132
FLASH_ATTENTION_3 = {"8K": " (FlashAttention-3 915)", "8K, no mask": "", "64K": " (FlashAttention-3 967)"}
REPEATS, CASE_SECONDS, HELD_SECONDS = 12, 60, 8

CHECKS = {
    "odd lengths": Check(1003, 2999, 5, "causal"),
    "near-uniform positive, 64K": Check(256, 65536, 2, data="uniform"),
    "near-uniform positive, 512K": Check(256, 524288, 2, data="uniform"),
    "one key of half the weight, 64K": Check(256, 65536, 2, data="sink"),
    "heavy tails": Check(256, 16384, 2, "causal", "heavy"),
    "rising scores, random limits": Check(777, 1111, 3, "random", "rising"),
    "falling scores": Check(1003, 2999, 5, "causal", "falling"),
    "keys of 192": Check(500, 1500, 3, "causal", nope=192),
    "one tile": Check(128, 128, 1),
    "random limits": Check(777, 1111, 3, "random"),
    "segments": Check(2048, 1024, 16, "segments"),
    "rising scores": Check(1003, 2999, 5, "causal", "rising"),
    "positive, 64K": Check(256, 65536, 2, data="positive"),
    "one key of half the weight, 512K": Check(256, 524288, 2, data="sink"),
    "bundled": Check(500, 3000, 4, "causal", nope=64),
    "more than 2^31 elements of output": Check(139264, 256, 128, "causal"),
    "more than 2^31 elements of keys": Check(200, 139264, 128, "causal"),
}
BLOCKS = {
    "chosen": Blocks(),
    "2 stages": Blocks(stages=2),
    "3 stages": Blocks(stages=3),
    "5 stages": Blocks(stages=5),
    "L2 32 MiB": Blocks(l2_bytes=32 * 2**20),
    "L2 64 MiB": Blocks(l2_bytes=64 * 2**20),
}


def operands_of(check: Check) -> Operands:
    """Random numbers; keys of the values in their natural order."""
    tokens, keys = -(-check.tokens // 8) * 8, -(-check.keys // KEYS) * KEYS
    seeds = jax.random.split(jax.random.key(1), 6)

    def normal(index, *shape):
        return jax.random.normal(seeds[index], shape, jnp.bfloat16)

    q, q_rope = normal(0, tokens, check.heads, check.nope), normal(1, tokens, check.heads, check.rope)
    k, k_rope = normal(2, keys, check.heads, check.nope), normal(3, keys, check.rope)
    v = normal(4, check.heads, check.v, keys)
    if check.data in ("positive", "uniform", "sink"):
        v = jnp.abs(v)
    if check.data == "uniform":
        q, q_rope = q * 0.05, q_rope * 0.05
    if check.data == "sink":
        # The first key alone meets the first number of the rotary queries, with a score of the logarithm of the keys.
        q, q_rope = q * 0.5, (q_rope * 0.5).at[..., 0].set(8)
        k_rope = k_rope.at[:, 0].set(0).at[0, 0].set(jnp.bfloat16(np.log(keys) / SCALE / 8))
    if check.data == "heavy":
        k = (k * jnp.exp(1.2 * jax.random.normal(seeds[5], (keys, 1, 1)))).astype(jnp.bfloat16)
    if check.data in ("rising", "falling"):
        sizes = jnp.linspace(0.1, 40, keys)
        sizes = sizes if check.data == "rising" else sizes[::-1]
        k, k_rope = k * sizes[:, None, None], k_rope * sizes[:, None]
    rounded = [jnp.clip(a, -448, 448).astype(E4M3) for a in (q, q_rope, k, k_rope, v)]
    head = jnp.arange(check.heads)
    scale = 2.0 ** (head[:, None] % 3 - jnp.arange(tokens) % 2)
    rounded[:2] = [(a.astype(jnp.float32) / scale.T[..., None]).astype(E4M3) for a in rounded[:2]]
    names = "q", "q_rope", "k", "k_rope", "v"
    return Operands(q_scale=scale, v_scale=1 + head / 7, **dict(zip(names, rounded, strict=True)))


def moved(operands: Operands) -> Operands:
    """The same with the values as the kernel wants them."""
    v = operands.v
    groups = v.reshape(*v.shape[:2], -1, 16)[..., value_order()]
    return dataclasses.replace(operands, v=groups.reshape(v.shape))


def score_bound(check: Check, largest: np.ndarray) -> np.ndarray:
    """How far scores may be off for which `largest` is the largest absolute value.

    Tensor cores shift 32 products and what was summed before to the largest exponent of them, and drop what is below
    2^-13 of it, towards zero.  So every addend loses at most 2^-13 of the largest score; signs are mixed, and losses
    grow as the square root of their number.  The largest errors on a card were 1.0 to 1.4 times those of this
    arithmetic on the CPU, of fewer rows.
    """
    steps = (check.nope + check.rope) / PRODUCTS
    return (steps * (PRODUCTS + 1)) ** 0.5 * 2.0**-13 * largest


def expected(check: Check, rows: np.ndarray, heads: list[int], limit: jax.Array, operands: Operands):
    """Output `[H, T, v]`, log-sum-exp and largest absolute score `[H, T]` of some rows and heads, in float32."""

    def wide(array):
        return array.astype(jnp.float32)

    def one(head):
        keys = jnp.concatenate((wide(operands.k[:, head]), wide(operands.k_rope)), axis=1)
        queries = jnp.concatenate((wide(operands.q[rows, head]), wide(operands.q_rope[rows, head])), axis=1)
        scores = jnp.dot(queries, keys.T, precision="highest") * (SCALE * operands.q_scale[head, rows])[:, None]
        seen = jnp.arange(len(keys)) < limit[rows][:, None]
        largest = jnp.max(jnp.where(seen, jnp.abs(scores), 0), axis=1)
        scores = jnp.where(seen, scores, -jnp.inf)
        weights = jnp.nan_to_num(jax.nn.softmax(scores, axis=1))
        out = jnp.dot(weights, wide(operands.v[head]).T, precision="highest") * operands.v_scale[head]
        return out, jax.nn.logsumexp(scores, axis=1), largest

    return jax.lax.map(one, jnp.asarray(heads))


def run_check(name: str, multiprocessors: int = MULTIPROCESSORS) -> dict[str, Any]:
    check = CHECKS[name]
    limit = jnp.asarray(np.pad(limits_of(check), (0, -check.tokens % 8)), jnp.int32)
    rows = np.unique(np.r_[: min(512, check.tokens), max(check.tokens - 512, 0) : check.tokens])
    heads = list(range(0, check.heads, max(check.heads // 8, 1)))

    def kernel(limit, operands):
        out, lse = attend(operands, limit, scale=SCALE, blocks=Blocks(), multiprocessors=multiprocessors)
        return out[rows][:, np.asarray(heads)].swapaxes(0, 1), lse[np.asarray(heads)][:, rows], jnp.isfinite(out).all()

    make = jax.jit(functools.partial(operands_of, check)).lower().compile()
    order = jax.jit(moved).lower(make.out_info).compile()
    programs = [
        jax.jit(f).lower(limit, make.out_info).compile()
        for f in (kernel, functools.partial(expected, check, rows, heads))
    ]
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make()
        wanted, wanted_lse, largest = jax.device_get(programs[1](limit, operands))
        out, lse, finite = jax.device_get(programs[0](limit, order(operands)))
    bound, scores = NORM_BOUND.get(check.data, POSITIVE_BOUND), score_bound(check, largest)
    answer = verdict(out, lse, wanted, wanted_lse, np.asarray(limit)[rows] > 0, bound, scores, bool(finite))
    return answer | {"spent": "2^31" in name}  # a process keeps what it has allocated


def verdict(
    out, lse, wanted, wanted_lse, seen: np.ndarray, bound: float, scores: np.ndarray | float = 0.0, finite: bool = True
) -> dict[str, Any]:
    """Errors of `[H, T, v]` and `[H, T]`, where only some of the T queries see a key and scores may be off by so much.

    A log-sum-exp is off by no more than the scores, but for what weights and sums are.
    """
    out, wanted = out.astype(np.float64), wanted.astype(np.float64)
    error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    bias = float((out - wanted).sum() / np.abs(wanted).sum())
    of_rows = np.abs((out - wanted).sum(axis=2) / np.maximum(np.abs(wanted).sum(axis=2), 1e-30))
    wrong = np.abs(lse[:, seen] - wanted_lse[:, seen])
    allowed = LSE_BOUND * np.maximum(1, np.abs(wanted_lse[:, seen]) / 64) + np.broadcast_to(scores, lse.shape)[:, seen]
    of_bound = float(np.max(wrong / allowed))
    empty = bool((out[:, ~seen] == 0).all() and np.isneginf(lse[:, ~seen]).all())
    said = f"error {error:.1e}, signed {bias:+.1e} (of a row {of_rows.max():.1e} at most)"
    said += f", log-sum-exp {wrong.max():.1e}, {of_bound:.2f} of its bound"
    # A NaN fails every comparison.
    held = {
        f"error <= {bound}": error <= bound,
        f"signed error <= {BIAS_BOUND}": abs(bias) <= BIAS_BOUND,
        "log-sum-exp within its bound": of_bound <= 1,
        "finite": finite,
        "nothing where no key is seen": empty,
    }
    broken = [what for what, holds in held.items() if not holds]
    return {"said": f"BAD {said}", "failed": f"not {', '.join(broken)}"} if broken else {"said": f"ok {said}"}


def public_operands(tokens: int, keys: int, heads: int) -> tuple[jax.Array, ...]:
    shapes = (tokens, heads, 192), (keys, 576), (heads, 128, 512), (heads, 128, 512)
    seeds = jax.random.split(jax.random.key(2), 4)
    q, latents, k_b, v_b = (jax.random.normal(a, b, jnp.bfloat16) for a, b in zip(seeds, shapes, strict=True))
    return q, latents, k_b / 512**0.5, v_b / 512**0.5


def run_public() -> dict[str, Any]:
    """The public operation against its own reference, both on the GPU, with NaN where nothing was written."""

    def operands():
        q, latents, *weights = public_operands(700, 1500, 16)
        return q, latents.at[1300:].set(jnp.nan), *weights

    limit = jnp.asarray(np.random.default_rng(0).integers(0, 1301, 700), jnp.int32)
    make = jax.jit(operands).lower().compile()
    programs = [
        jax.jit(functools.partial(mla_prefill, scale=SCALE, e4m3=True, implementation=i))
        .lower(*make.out_info, limit)
        .compile()
        for i in ("mosaic", "reference")
    ]
    with alone(os.environ[LOCK], HELD_SECONDS):
        (out, lse), (wanted, wanted_lse) = (jax.device_get(program(*make(), limit)) for program in programs)
    swapped = out.swapaxes(0, 1), lse.T, wanted.swapaxes(0, 1), wanted_lse.T
    return verdict(*swapped, np.asarray(limit) > 0, NORM_BOUND["normal"])


def limits(name: str) -> jax.Array:
    keys, causal, _ = TIMED[name]
    row = jnp.arange(TOKENS, dtype=jnp.int32)
    return row + 1 + keys - TOKENS if causal else jnp.full_like(row, keys)


def run_time(name: str, blocks: str, largest: float = attention_e4m3._LARGEST) -> dict[str, Any]:
    keys, causal, _ = TIMED[name]
    make = jax.jit(functools.partial(operands_of, Check(TOKENS, keys, HEADS))).lower().compile()
    kernel = functools.partial(attend, scale=SCALE, blocks=BLOCKS[blocks], multiprocessors=MULTIPROCESSORS)
    with patch.object(attention_e4m3, "_LARGEST", largest):
        program = jax.jit(kernel).lower(make.out_info, limits(name)).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands, limit = make(), limits(name)
        calls, groups = (4, 12) if keys == TOKENS else (1, 8)
        found = series(lambda: program(operands, limit), jax.block_until_ready, calls, groups)
    answer = rates(found, keys, causal)
    return answer | {"said": answer["said"] + FLASH_ATTENTION_3[name]}


def run_operation(name: str, e4m3: bool) -> dict[str, Any]:
    """All kernels of the public operation, the longest named: what making the operands costs."""
    make = jax.jit(functools.partial(public_operands, TOKENS, TIMED[name][0], HEADS)).lower().compile()
    whole = functools.partial(mla_prefill, scale=SCALE, e4m3=e4m3, implementation="mosaic")
    program = jax.jit(whole).lower(*make.out_info, limits(name)).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = *make(), limits(name)
        timing = time_of(lambda _: program(*operands), jax.block_until_ready, REPEATS)
    longest = sorted(timing.kernels, key=lambda kernel: -kernel[1])[:7]
    said = f"{timing.clock}: {timing.seconds * 1e3:.3f} ms: "
    said += ", ".join(f"{kernel[:40]} {seconds * 1e3:.3f}" for kernel, seconds in longest)
    return {"said": said} | dataclasses.asdict(timing)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """The most important first."""
    checks = {f"check {name}": functools.partial(run_check, name) for name in CHECKS}
    found: dict[str, Callable[[], dict[str, Any]]] = {name: checks[name] for name in list(checks)[:8]}
    found["check the public operation"] = run_public
    for name in TIMED:
        found[f"time {name}: chosen"] = functools.partial(run_time, name, "chosen")
        found[f"time {name}: bfloat16"] = functools.partial(run_bfloat16, name, "chosen")
        found[f"time {name}: cuDNN in bfloat16"] = functools.partial(run_cudnn, name)
    for blocks in ("3 stages", "5 stages"):
        found |= {f"time {name}: {blocks}": functools.partial(run_time, name, blocks) for name in ("8K", "64K")}
    for name in ("64K", "8K"):
        found[f"time {name}: operation in e4m3"] = functools.partial(run_operation, name, True)
    found["time 8K: weighed again"] = functools.partial(run_time, "8K", "chosen", -1.0)
    found |= {name: case for name, case in checks.items() if "2^31" not in name}
    for name in TIMED:
        found |= {f"time {name}: {blocks}": functools.partial(run_time, name, blocks) for blocks in BLOCKS}
    return found | checks


if __name__ == "__main__":
    sys.exit(workers.main(MODULE, __doc__, LOCK, case_seconds=CASE_SECONDS, seconds=80))
