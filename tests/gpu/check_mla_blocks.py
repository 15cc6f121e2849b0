"""Checks and times the block-sparse attention on one Hopper GPU: `python -m tests.gpu.check_mla_blocks [--out DIR]`.

Cases run in processes of their own (see `workers`), which compile side by side and take turns on the
GPU: comparisons with the reference in float32, and times at the size of DeepSeek-V3, 8,192 queries that read 2,560 keys
each, last without parts of the work.  Prints a table last, and writes all answers as JSON.  Exits with 1 if a bound is
broken.  `--only e4m3` runs the cases in e4m3 alone, which are compared with the reference of the same rounded numbers,
and with that of bfloat16; what is timed there is the kernel, and what makes its operands.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.timing import alone
from jaxinfer.bench.timing import measure as time_of
from jaxinfer.kernels.mosaic import mla_blocks as mosaic
from jaxinfer.kernels.mosaic import mla_blocks_e4m3 as mosaic_e4m3
from jaxinfer.kernels.reference import mla_sparse as reference
from tests.gpu import workers

MODULE = "tests.gpu.check_mla_blocks"
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share; they are told by it from their parent."""
HELD_SECONDS, CASE_SECONDS = 10, 80
REPEATS = 16
ROPE, BLOCK = 64, 128
SCALE = 0.07
OUT_BOUND, BIAS_BOUND, LSE_BOUND = 4e-3, 1e-3, 2e-3
WEIGHTS_BOUND, SUM_BOUND = 3e-2, 1e-2
"""In e4m3: what rounding of the weights costs, 2^-4 of each at most, and what is lost of sums of positive numbers."""
UNIT = 2.0**-3
PROCESSORS = 132
"""How many thread blocks run at a time, and in clusters of four: GPCs have 16 or 18 multiprocessors."""
SHARED = 0.7
"""Of the blocks of a list, how many the next query block reads as well."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a case.

    Attributes:
        anchors: how many keys do not count, about one in so many.
        lists: `drawn` as real ones are, or of `odd` lengths from 0 on.
        spread: standard deviation of the scores, in nats.
        sample: query blocks that are compared.
        positive: whether latents are.
        unit: of latents in e4m3, None for bfloat16.
    """

    n: int
    heads: int
    groups: int
    keys: int
    listed: int
    queries: int = 32
    rank: int = 512
    anchors: int = 512
    lists: str = "drawn"
    spread: float = 1.7
    sample: int = 1000
    positive: bool = False
    unit: float | None = None


V3 = Size(n=256, heads=128, groups=4, keys=65536, listed=20, sample=3)
CHECKED = {
    "small": Size(n=3, heads=128, groups=4, keys=4096, listed=3),
    "odd lists": Size(n=9, heads=128, groups=4, keys=8192, listed=8, lists="odd", anchors=40),
    "V3, 64K keys": V3,
    "V3, 1M keys, beyond 2^29 elements": dataclasses.replace(V3, keys=2**20),
    "scores far apart": Size(n=4, heads=128, groups=4, keys=8192, listed=8, spread=30.0),
    "weights that leave float32": Size(n=2, heads=128, groups=4, keys=8192, listed=8, spread=120.0),
    "4 heads of 256 numbers": Size(n=5, heads=4, groups=4, keys=8192, listed=8, rank=256, lists="odd"),
    "20 heads": Size(n=3, heads=20, groups=4, keys=8192, listed=8, lists="odd"),
}
CHECKED_E4M3 = [name for name in CHECKED if name not in ("V3, 1M keys, beyond 2^29 elements", "20 heads")]
LEFT_OUT = "nothing", "exponentials", "most of the copies", "products with values", "most products with keys"
"""Parts of the work; without `nothing` is the kernel as it is, but for query blocks that the reference computes."""
TIMED = {
    "64K": V3,
    "256K": dataclasses.replace(V3, keys=2**18),
    "512K": dataclasses.replace(V3, keys=2**19),
}


def in_e4m3(size: Size, **changes) -> Size:
    return dataclasses.replace(size, unit=UNIT, **changes)


def blocks_of(size: Size) -> np.ndarray:
    """int32 `[n, G, listed]`, ascending, -1 last; the last block is never listed."""
    rng = np.random.default_rng(size.n)
    number = size.keys // BLOCK - 1
    found = np.full((size.n, size.groups, size.listed), -1, np.int32)
    for group in range(size.groups):
        chosen = rng.permutation(number)[: size.listed]
        for i in range(size.n):
            if size.lists == "drawn" and i:
                kept = chosen[rng.random(len(chosen)) < SHARED]
                fresh = rng.permutation(np.setdiff1d(np.arange(number), kept))
                chosen = np.concatenate((kept, fresh[: size.listed - len(kept)]))
            count = (i + group) % (size.listed + 1) if size.lists == "odd" else size.listed
            found[i, group, :count] = np.sort(chosen[:count])
    return found


def free_of(size: Size) -> np.ndarray:
    """bool `[S]`; of odd lists, the first block of the first group that has one counts nowhere."""
    rng = np.random.default_rng(7)
    free = rng.random(size.keys) >= 1 / size.anchors
    if size.lists == "odd":
        first = blocks_of(size)[1, 0, 0]
        free[first * BLOCK : (first + 1) * BLOCK] = False
    return free


def numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Even numbers of variance 1 from a hash of the index: XLA needs no memory beside the result."""
    index = functools.reduce(lambda s, d: s * jnp.uint32(shape[d]) + _along(shape, d), range(len(shape)), jnp.uint32(0))
    bits = (index + jnp.uint32(seed)) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    return ((bits >> 8).astype(jnp.float32) / 2**24 - 0.5) * 12**0.5


def _along(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)


def operands_of(size: Size) -> tuple[jax.Array, jax.Array]:
    """Queries and context in bfloat16; the context is NaN in the last block, which no list has."""
    dim = size.rank + ROPE
    factor = size.spread / (SCALE * dim**0.5)
    q = (numbers((size.n, size.queries, size.heads, dim), 1) * factor).astype(jnp.bfloat16)
    context = numbers((size.keys, dim), 2).astype(jnp.bfloat16)
    if size.positive:
        context = jnp.abs(context)
    return q, context.at[size.keys - BLOCK :].set(jnp.nan)


def sizes_of(size: Size) -> dict[str, Any]:
    return {"block": BLOCK, "kv_rank": size.rank, "scale": SCALE}


def kernel_of(size: Size) -> Callable:
    if size.unit is None:
        return functools.partial(mosaic.mla_blocks, **sizes_of(size), multiprocessors=PROCESSORS)
    run = functools.partial(mosaic_e4m3.mla_blocks, **sizes_of(size), multiprocessors=PROCESSORS)
    return lambda *operands: run(*operands, jnp.float32(size.unit))


def check(size: Size) -> dict[str, Any]:
    blocks, free = blocks_of(size), free_of(size)
    sample = np.unique(np.linspace(0, size.n - 1, min(size.n, size.sample)).astype(np.int32))

    def exact(q, context, blocks, free):
        """Of the numbers as they are rounded, and in e4m3 also the output of those in bfloat16."""
        with jax.default_matmul_precision("highest"):
            run = functools.partial(reference.mla_blocks, q.astype(jnp.float32), context, blocks, free)
            if size.unit is None:
                return *run(**sizes_of(size)), None
            center = reference.center_of(context, blocks_of(size), BLOCK, size.rank)  # of all, not only the compared
            with patch.object(reference, "center_of", lambda *_: center):
                return *run(jnp.float32(size.unit), **sizes_of(size)), run(**sizes_of(size))[0]

    make = jax.jit(functools.partial(operands_of, size)).lower().compile()
    q, context = make.out_info
    kernel = jax.jit(kernel_of(size)).lower(q, context, blocks, free).compile()
    part = jax.ShapeDtypeStruct((len(sample), *q.shape[1:]), q.dtype)
    exact = jax.jit(exact).lower(part, context, blocks[sample], free).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        q, context = make()
        runs = [kernel(q, context, blocks, free) for _ in range(3)]
        same = all(bool(jnp.all(a == b)) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
        out, lse = (np.asarray(array[sample], np.float32) for array in runs[0])
        wanted, wanted_lse, unrounded = jax.device_get(exact(q[sample], context, blocks[sample], free))
    if unrounded is None:
        return verdict(out, lse, wanted, wanted_lse, same)
    # Losses of adding up e4m3 products, see `check_mla_prefill_e4m3.score_bound`; a largest score is some five standard
    # deviations.  Off by 1, a score counts where another is as near to the largest, of few rows.
    shift = (size.rank / 32 * 33) ** 0.5 * 2.0**-13 * 5 * size.spread
    out_bound = SUM_BOUND if size.positive else WEIGHTS_BOUND + 0.2 * min(shift, 1.0)
    answer = verdict(out, lse, wanted, wanted_lse, same, (out_bound, SUM_BOUND, LSE_BOUND + shift))
    gain = float(np.vdot(out, wanted) / np.vdot(wanted, wanted)) - 1
    far = float(np.linalg.norm(out - unrounded) / np.linalg.norm(unrounded))
    return answer | {"said": f"{answer['said']}, gain {gain:+.1e}, of bfloat16 {far:.1e}"}


def verdict(
    out, lse, wanted, wanted_lse, same: bool, bounds: tuple[float, float, float] = (OUT_BOUND, BIAS_BOUND, LSE_BOUND)
) -> dict[str, Any]:
    empty = np.isneginf(wanted_lse)
    error = float(np.linalg.norm(out - wanted) / max(np.linalg.norm(wanted), 1e-30))
    bias = float(np.mean(out - wanted) / max(np.mean(np.abs(wanted)), 1e-30))
    lse_error = float(np.max(np.abs(lse[~empty] - wanted_lse[~empty]), initial=0.0))
    out_bound, bias_bound, lse_bound = bounds
    good = error <= out_bound and abs(bias) <= bias_bound and lse_error <= lse_bound and same
    good &= bool(np.all(np.isneginf(lse[empty]))) and bool(np.all(out[empty] == 0))
    said = f"{'ok' if good else 'BAD'} error {error:.1e}, bias {bias:.0e}, log-sum-exp {lse_error:.1e}, repeats {same}"
    return {"said": said} if good else {"said": said, "failed": f"; bounds {out_bound}, {bias_bound}, {lse_bound}"}


@contextmanager
def left_out(part: str) -> Iterator[None]:
    """Traces the kernel without a part of its work, to see what limits: its answers are wrong."""
    copy, wgmma = plgpu.copy_gmem_to_smem, plgpu.wgmma
    half = V3.rank // 2

    def fewer_rows(source, target, barrier, **collective):
        rows = pl.ds(0, 16)
        if collective:  # keys
            source, target = source.at[rows], target.at[rows]
        copy(source, target, barrier, **collective)

    def without_values(accumulator, a, b):
        if b.shape[1] != half:
            wgmma(accumulator, a, b)

    def without_keys(accumulator, a, b):
        if a.shape[1] != half:
            wgmma(accumulator, a, b)

    with ExitStack() as patches:
        patches.enter_context(patch.object(mosaic, "_mended", lambda *arrays: arrays[4:6]))
        if part == "exponentials":
            patches.enter_context(patch.object(jnp, "exp2", lambda x: x))
        elif part == "most of the copies":
            patches.enter_context(patch.object(plgpu, "copy_gmem_to_smem", fewer_rows))
        elif part == "products with values":
            patches.enter_context(patch.object(plgpu, "wgmma", without_values))
        elif part == "most products with keys":
            patches.enter_context(patch.object(plgpu, "wgmma", without_keys))
        yield


def measure(size: Size, part: str | None = None) -> dict[str, Any]:
    """TFLOP/s of all listed keys, of the kernel alone and of the operation; the kernel rested and in steady work."""
    blocks, free = jnp.asarray(blocks_of(size)), jnp.asarray(free_of(size))
    make = jax.jit(functools.partial(operands_of, size)).lower().compile()
    with left_out(part) if part else nullcontext():
        program = jax.jit(kernel_of(size)).lower(*make.out_info, blocks, free).compile()
    pairs = int(jnp.sum(blocks >= 0)) * BLOCK * size.queries * (size.heads // size.groups)
    flops = 2.0 * pairs * (2 * size.rank + ROPE)
    with alone(os.environ[LOCK], HELD_SECONDS):
        operands = *make(), blocks, free
        jax.block_until_ready(program(*operands))
        time.sleep(0.4)
        begin = time.perf_counter()
        jax.block_until_ready([program(*operands) for _ in range(2)])
        rested = (time.perf_counter() - begin) / 2
        timing = time_of(lambda _: program(*operands), jax.block_until_ready, REPEATS)
    of_kernel = sum(seconds for name, seconds in timing.kernels if "mla_blocks" in name) or timing.seconds
    said = (
        f"{flops / of_kernel / 1e12:4.0f} TFLOP/s, {of_kernel * 1e3:6.3f} ms by {timing.clock}; all of the operation "
        f"{timing.seconds * 1e3:6.3f} ms; rested, all of it {flops / rested / 1e12:4.0f} TFLOP/s"
    )
    if size.unit is not None:
        rest = sorted(((t, name) for name, t in timing.kernels if "mla_blocks" not in name), reverse=True)
        said += "; most of the rest " + ", ".join(f"{name[:26]} {t * 1e3:.3f}" for t, name in rest[:4])
    return {"said": said, "flops": flops, "rested": rested} | dataclasses.asdict(timing)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """Most important first."""
    checks = {f"check {name}": functools.partial(check, size) for name, size in CHECKED.items()}
    times = {f"time {keys}": functools.partial(measure, size) for keys, size in TIMED.items()}
    parts = {f"time 64K without {part}": functools.partial(measure, V3, part) for part in LEFT_OUT}
    first = {name: checks.pop(name) for name in ("check small", "check V3, 64K keys", "check odd lists")}
    return first | times | _cases_e4m3() | checks | parts


def _cases_e4m3() -> dict[str, Callable[[], dict[str, Any]]]:
    checked = {name: in_e4m3(CHECKED[name]) for name in CHECKED_E4M3}
    checked["V3, 64K keys, positive"] = in_e4m3(V3, positive=True)
    timed = {keys: in_e4m3(size) for keys, size in TIMED.items() if keys != "256K"}
    checks = {f"check e4m3, {name}": functools.partial(check, size) for name, size in checked.items()}
    times = {f"time e4m3, {name}": functools.partial(measure, size) for name, size in timed.items()}
    parts = {f"time e4m3, 64K without {part}": functools.partial(measure, in_e4m3(V3), part) for part in LEFT_OUT[1:]}
    return checks | times | parts


if __name__ == "__main__":
    sys.exit(workers.main(MODULE, __doc__, LOCK, case_seconds=CASE_SECONDS, seconds=40))
