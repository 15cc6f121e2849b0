"""Checks and times window attention on one Hopper GPU: `python -m tests.gpu.check_window [--seconds N] [--out DIR]`.

Cases run in processes of their own, which compile side by side and take turns on the GPU: comparisons with the
reference, times of the kernel with and without windows, and of all that a layer of hybrid attention does with what its
queries share: gathering and expanding keys, window, sinks and anchors.  TFLOP/s are of useful work: 2 (192 + 128) for
each key that a query and head read.  Prints a table last and writes all answers as JSON.  Exits with 1 if a bound is
broken.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.timing import alone
from jaxinfer.bench.timing import measure as time_of
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.mla_sparse import mla_window
from jaxinfer.kernels.mosaic.attention import Blocks, attend
from jaxinfer.kernels.reference import mla_sparse as reference
from jaxinfer.kernels.selection.grid import window_start
from jaxinfer.model import sparse
from jaxinfer.model.batch import PrefillBatch, SparsePrefill
from jaxinfer.sharding.collectives import merge
from jaxinfer.sharding.layout import Layout
from tests.gpu import workers

MODULE = "tests.gpu.check_window"
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share."""
FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
HELD_SECONDS, CASE_SECONDS = 12, 70
REPEATS = 12
NORM_BOUND, BIAS_BOUND, LSE_BOUND = 8e-3, 2e-3, 4e-3
SCALE = 192**-0.5
NOPE, ROPE, V, RANK = 128, 64, 128, 512
MULTIPROCESSORS = 132
POLICY = Hybrid()
GAP = POLICY.anchor_gap


@dataclasses.dataclass(frozen=True)
class Check:
    """Shapes of a comparison; `kind` says which keys each query reads, `data` what the latents are like."""

    tokens: int
    context: int
    heads: int
    kind: str = "windows"
    data: str = "normal"


CHECKS = {
    "windows": Check(600, 8192, 16),
    "windows that begin anywhere": Check(1003, 8192, 3, "odd"),
    "any ranges": Check(777, 1500, 5, "random"),
    "rising scores, any ranges": Check(777, 1500, 5, "random", "rising"),
    "falling scores": Check(600, 8192, 4, "windows", "falling"),
    "others' rows between": Check(1024, 8192, 16, "segments"),
    "stripes": Check(1024, 16384, 16, "stripes"),
    "no window": Check(300, 1500, 4, "none"),
    "the end of a million": Check(512, 2**20, 16),
    "V3, 8,192 queries": Check(8192, 65536, 128),
}


def ranges_of(check: Check, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """First key and limit of each query."""
    tokens, context = check.tokens, check.context
    positions = np.arange(context - tokens, context)
    if check.kind in ("random", "none"):
        first = rng.integers(0, context, tokens)
        length = rng.integers(-50, 700, tokens) if check.kind == "random" else np.zeros(tokens, int)
        return first, np.minimum(first + length, context)
    if check.kind == "odd":
        return np.maximum(positions - 999, 0) // 24 * 24, positions + 1
    if check.kind == "stripes":
        positions = np.concatenate([np.arange(s, s + tokens // 2) for s in (6144, context - tokens)])
    sizes = {"window": POLICY.window, "block": POLICY.block, "query_block": POLICY.query_block}
    first, limit = window_start(positions, **sizes, dense_below=0), positions + 1
    if check.kind == "segments":
        nobody = np.arange(tokens) // 300 % 2 == 1
        first, limit = np.where(nobody, 0, first), np.where(nobody, 0, limit)
    return first, limit


def numbers(check: Check, read: np.ndarray, known: np.ndarray) -> tuple[jax.Array, ...]:
    """Queries, context, expansions and shared keys; rows that nobody reads are NaN."""
    shapes = (
        (check.tokens, check.heads, NOPE + ROPE),
        (check.context, RANK + ROPE),
        (check.heads, NOPE, RANK),
        (check.heads, V, RANK),
        (len(known), RANK + ROPE),
    )
    q, context, k_b, v_b, shared = (
        jax.random.normal(seed, shape, jnp.bfloat16)
        for seed, shape in zip(jax.random.split(jax.random.key(1), len(shapes)), shapes, strict=True)
    )
    if check.data != "normal":
        sizes = jnp.linspace(0.1, 20, check.context, dtype=jnp.bfloat16)
        context *= (sizes if check.data == "rising" else sizes[::-1])[:, None]
    context, shared = (jnp.where(at[:, None], rows, jnp.nan) for at, rows in ((read, context), (known, shared)))
    return q, context, (k_b / RANK**0.5).astype(k_b.dtype), (v_b / RANK**0.5).astype(v_b.dtype), shared


def run_check(name: str) -> dict[str, Any]:
    check, rng = CHECKS[name], np.random.default_rng(0)
    first, limit = (np.asarray(bound, np.int32) for bound in ranges_of(check, rng))
    count = POLICY.sinks + check.context // GAP
    before = (POLICY.sinks + np.maximum(first, 0) // GAP).astype(np.int32) * (limit > first)
    if check.kind in ("random", "none"):
        before = rng.integers(0, count + 1, check.tokens).astype(np.int32) * (rng.random(check.tokens) < 0.8)
        before = before.astype(np.int32)
    steps = np.zeros(check.context + 1, int)
    np.add.at(steps, first[limit > first], 1)
    np.add.at(steps, limit[limit > first], -1)
    read, known = np.cumsum(steps)[: check.context] > 0, np.arange(count) < before.max()
    rows = np.unique(np.r_[:64, np.linspace(0, check.tokens - 1, min(check.tokens, 600)).astype(int)])
    behind = POLICY.window + POLICY.block + POLICY.query_block
    runs = {"windows": (1, check.tokens + behind), "stripes": (2, check.tokens // 2 + behind)}.get(check.kind)

    def kernel(first, limit, before, q, context, k_b, v_b, shared):
        found = mla_window(
            q, context, k_b, v_b, first, limit, shared, before, scale=SCALE, runs=runs, implementation="mosaic"
        )
        return found[0][rows], found[1][rows], jnp.isfinite(found[0]).all()

    def exact(first, limit, before, q, context, k_b, v_b, shared):
        context, shared = jnp.nan_to_num(context), jnp.nan_to_num(shared)
        bounds = first[rows], limit[rows]
        return reference.mla_window(q[rows], context, k_b, v_b, *bounds, shared, before[rows], scale=SCALE)

    make = jax.jit(functools.partial(numbers, check)).lower(read, known).compile()
    places = first, limit, before
    programs = [jax.jit(f).lower(*places, *make.out_info).compile() for f in (kernel, exact)]
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = make(read, known)
        (out, lse, finite), (wanted, wanted_lse) = (jax.device_get(run(*places, *operands)) for run in programs)
    seen = ((limit > first) | (before > 0))[rows]
    return verdict(out, lse, wanted, wanted_lse, seen, bool(finite))


def verdict(out, lse, wanted, wanted_lse, seen: np.ndarray, finite: bool) -> dict[str, Any]:
    """Errors of `[T, H, v]` and `[T, H]`, where only the queries `seen` see a key."""
    out, wanted = out.astype(np.float64), wanted.astype(np.float64)
    error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    bias = float((out - wanted).sum() / np.abs(wanted).sum())
    some, wanted_some = lse[seen], wanted_lse[seen]
    lse_error = float(np.max(np.abs(some - wanted_some) / np.maximum(1, np.abs(wanted_some) / 64)))
    good = finite and error <= NORM_BOUND and abs(bias) <= BIAS_BOUND and lse_error <= LSE_BOUND
    good &= bool((out[~seen] == 0).all() and np.isneginf(lse[~seen]).all())
    said = f"{'ok' if good else 'BAD'} error {error:.1e}, signed {bias:+.1e}, log-sum-exp {lse_error:.1e}"
    return {"said": said} if good else {"said": said, "failed": "; a bound is broken", "trace": f"finite {finite}"}


TOKENS, HEADS = 8192, 128
BLOCKS = {
    "": Blocks(),
    ", 64 keys, 4 stages": Blocks(keys=64, stages=4),
    ", L2 16 MiB": Blocks(l2_bytes=16 * 2**20),
    ", L2 64 MiB": Blocks(l2_bytes=64 * 2**20),
}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def expanded(keys: int) -> tuple[jax.Array, ...]:
    return (
        normal(1, TOKENS, HEADS, NOPE + ROPE),
        normal(2, keys, HEADS, NOPE),
        normal(3, keys, ROPE),
        normal(4, keys, HEADS, V),
    )


def timed(program: Callable, make: Callable, places: tuple, flops: float, repeats: int = REPEATS) -> dict[str, Any]:
    """Times a compiled program, its attention kernels and products apart from the rest."""
    with alone(os.environ[LOCK], HELD_SECONDS):
        arguments = *make(), *map(jnp.asarray, places)
        timing = time_of(lambda _: program(*arguments), jax.block_until_ready, repeats)
    parts = {"attention": 0.0, "products": 0.0, "others": 0.0}
    for name, seconds in timing.kernels:
        product = any(word in name.lower() for word in ("gemm", "nvjet", "cutlass", "xmma"))
        parts["attention" if "mla_prefill" in name else "products" if product else "others"] += seconds
    rate = flops / (parts["attention"] or timing.seconds) / 1e12
    said = f"{timing.clock}: {timing.seconds * 1e3:.3f} ms"
    if flops:
        said += f", attention {rate:.0f} TFLOP/s"
    if timing.kernels:
        said += " (" + ", ".join(f"{part} {seconds * 1e3:.3f}" for part, seconds in parts.items() if seconds) + ")"
        longest = sorted(timing.kernels, key=lambda kernel: -kernel[1])[:8]
        print("; ".join(f"{name[:60]} {seconds * 1e6:.0f} us" for name, seconds in longest), flush=True)
    return {"said": said, "flops": flops} | dataclasses.asdict(timing)


def chunk(begin: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of `TOKENS` successive positions, and their ends."""
    positions = np.arange(begin, begin + TOKENS)
    sizes = {"window": POLICY.window, "block": POLICY.block, "query_block": POLICY.query_block}
    return window_start(positions, **sizes, dense_below=0).astype(np.int32), (positions + 1).astype(np.int32)


def run_kernel(form: str, blocks: str) -> dict[str, Any]:
    """The kernel on expanded keys: windows, windows and 2,000 anchors, or no window (`dense`, causal)."""
    first, limit = chunk(65536)
    front = {"windows": 0, "windows, 2,000 anchors": 2048, "dense, 8K keys": 0, "dense, 12K keys": 0}[form]
    start, end = first - first[0] + front, limit - first[0] + front
    before = np.full(TOKENS, min(front, 2000), np.int32)
    keys = -(-int(end.max()) // 128) * 128
    sizes = {"scale": SCALE, "blocks": BLOCKS[blocks], "multiprocessors": MULTIPROCESSORS}
    if form.startswith("dense"):
        keys = TOKENS if "8K" in form else keys
        before = np.arange(TOKENS, dtype=np.int32) + 1 + keys - TOKENS
        places, read = (before,), int(before.sum())
    else:
        places, read = (before, start, end), int((before + end - start).sum())

    def attention(q, k, k_rope, v, before, *window):
        return attend(q, k, k_rope, v, before, window or None, **sizes)

    make = jax.jit(functools.partial(expanded, keys)).lower().compile()
    program = jax.jit(attention).lower(*make.out_info, *places).compile()
    return timed(program, make, places, 2 * (NOPE + ROPE + V) * HEADS * read)


def latents(length: int) -> tuple[jax.Array, ...]:
    k_b, v_b = normal(2, HEADS, NOPE, RANK) / RANK**0.5, normal(3, HEADS, V, RANK) / RANK**0.5
    context = normal(4, length // 8, RANK + ROPE)
    return (
        normal(1, TOKENS, HEADS, NOPE + ROPE),
        k_b.astype(jnp.bfloat16),
        v_b.astype(jnp.bfloat16),
        jnp.tile(context, (8, 1)),
    )


def run_near(length: int, form: str) -> dict[str, Any]:
    """What the last 8,192 queries of a context share, as `model.sparse` attends to it; `apart`: in two kernels."""
    first, limit = chunk(length - TOKENS)
    anchors = np.arange(POLICY.sinks // GAP + 1, length // GAP) * GAP + GAP // 2
    shared = np.full(POLICY.sinks + length // GAP, np.iinfo(np.int32).max, np.int32)
    shared[: POLICY.sinks] = np.arange(POLICY.sinks)
    shared[POLICY.sinks :][: len(anchors)] = anchors
    before = np.searchsorted(shared, first)
    layout = Layout(1, 64, 64)

    def near(q, k_b, v_b, rows, shared, positions):
        context = sparse.Context(rows, jnp.zeros(()), shared, jnp.zeros(()))
        if form == "near":
            return sparse._attend_near(q, k_b, v_b, context, positions, layout, POLICY, SCALE)
        first = sparse.windows(positions, POLICY)
        runs = sparse.window_runs(TOKENS, layout, POLICY)
        none = jnp.zeros(TOKENS, jnp.int32)
        window = mla_window(q, rows, k_b, v_b, first, positions + 1, rows[:128], none, scale=SCALE, runs=runs)
        count = jnp.searchsorted(shared, first, method="compare_all").astype(jnp.int32)
        return merge(*window, *mla_prefill(q, rows.at[shared].get(mode="clip"), k_b, v_b, count, scale=SCALE))

    make = jax.jit(functools.partial(latents, length)).lower().compile()
    places = shared, limit - 1
    program = jax.jit(near).lower(*make.out_info, *places).compile()
    return timed(program, make, places, 2 * (NOPE + ROPE + V) * HEADS * int((limit - first + before).sum()))


def run_queries(form: str) -> dict[str, Any]:
    """Queries into the space of the latents, by query block; `two products`: the rotary part copied beside."""
    first = np.r_[np.arange(0, TOKENS, POLICY.query_block), np.full(8, -1)].astype(np.int32)
    token = np.arange(TOKENS, dtype=np.int32)

    def queries(q, k_b, v_b, context, first, token):
        if form == "one product":
            none = jnp.zeros((), jnp.int32)
            chunk = SparsePrefill(query_blocks=first, segments=none, pages=none, shared=none, tiles=none, count=none)
            batch = PrefillBatch(
                tokens=token,
                positions=token,
                segments=token * 0,
                write_page=token // 64,
                write_offset=token % 64,
                tile_pages=none,
                tile_segment=none,
                tile_start=none,
                homes=none,
                num_tiles=none,
                num_dense_tiles=none,
                sparse=chunk,
            )
            return sparse._queries(q, k_b, batch, TOKENS // 64, POLICY).absorbed
        rows = jnp.minimum(jnp.maximum(first, 0)[:, None] + jnp.arange(POLICY.query_block), TOKENS - 1)
        absorbed = jnp.einsum("thn,hnc->htc", q[..., :NOPE], k_b, preferred_element_type=jnp.float32).swapaxes(0, 1)
        return jnp.concatenate((absorbed.astype(q.dtype), q[..., NOPE:]), axis=-1)[rows]

    make = jax.jit(functools.partial(latents, TOKENS)).lower().compile()
    program = jax.jit(queries).lower(*make.out_info, first, token).compile()
    return timed(program, make, (first, token), 0)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    first, *others = CHECKS
    kernel: dict[str, Callable[[], dict[str, Any]]] = {}
    for form in ("windows", "windows, 2,000 anchors", "dense, 8K keys", "dense, 12K keys"):
        kernel[f"time kernel {form}"] = functools.partial(run_kernel, form, "")
    near = {
        f"time {form} {length // 1024}K": functools.partial(run_near, length, form)
        for length in (65536, 524288, 262144)
        for form in ("near", "apart")
    }
    found = {f"check {first}": functools.partial(run_check, first)} | kernel | near
    found |= {f"check {name}": functools.partial(run_check, name) for name in others}
    found |= {f"time queries, {form}": functools.partial(run_queries, form) for form in ("one product", "two products")}
    for blocks in filter(None, BLOCKS):
        found[f"time kernel windows{blocks}"] = functools.partial(run_kernel, "windows", blocks)
    return found


def details(answers: dict[str, dict]) -> Iterator[str]:
    """The longest kernels of what is timed as a whole."""
    for name, answer in answers.items():
        for kernel, seconds in sorted(answer.get("kernels", []), key=lambda pair: -pair[1])[:6]:
            if name.startswith(("time near 512K", "time queries")):
                yield f"{name}: {kernel[:90]} {seconds * 1e6:.0f} us"


if __name__ == "__main__":
    sys.exit(workers.main(MODULE, __doc__, LOCK, case_seconds=CASE_SECONDS, seconds=100, flags=FLAGS, details=details))
