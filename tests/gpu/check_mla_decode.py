"""Checks and times the decode attention on one Hopper GPU: `python -m tests.gpu.check_mla_decode [--out DIR]`.

Cases run in processes of their own (see `workers`), which compile side by side and take turns on the GPU: those that
compare with the reference in float32, and times of the kernels for several layers, beside the figures of FlashMLA.
Prints a table last, and writes all answers as JSON.  Exits with 1 if a bound is broken.
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
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench import workers
from jaxinfer.bench.timing import alone
from jaxinfer.bench.timing import measure as time_of
from jaxinfer.configs.kv_format import FORMATS
from jaxinfer.kernels.latents import Latents, QuantizedLatents, quantize_latents
from jaxinfer.kernels.mosaic import decode_parts
from jaxinfer.kernels.mosaic import mla_decode as mosaic
from jaxinfer.kernels.mosaic import mla_decode_8bit as mosaic_8bit
from jaxinfer.kernels.reference import mla_decode as reference

MODULE = "tests.gpu.check_mla_decode"
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share; they are told by it from their parent."""
HELD_SECONDS, CASE_SECONDS = 6, 60
REPEATS = 16
RANK, ROPE = 512, 64
DIM = RANK + ROPE
SCALE = 0.07
NORM_BOUND, LSE_BOUND = 4e-3, 2e-3
PROCESSORS = 132
KINDS = "bf16", "int8", "fp8_e4m3", "fp8_e5m2"

# name: batch, tokens, heads, page size, lengths (a number or "uneven"), FlashMLA on an H200.
TIMED = {
    "b128 h128 4K": (128, 1, 128, 64, 4096, "576 TFLOP/s"),
    "b128 h16 8K": (128, 1, 16, 64, 8192, "3.84 TB/s"),
    "b64 h128 512K + 63 short": (64, 1, 128, 64, "uneven", ""),
    "b64 h16 512K + 63 short": (64, 1, 16, 64, "uneven", ""),
    "b1 h128 512K": (1, 1, 128, 64, 524288, ""),
    "b128 h64 4K": (128, 1, 64, 128, 4096, ""),
    "b64 h16 8K, 4 tokens": (64, 4, 16, 64, 8192, ""),
    "b128 h128 4090": (128, 1, 128, 64, 4090, ""),
    "b16 h16 128K": (16, 1, 16, 64, 131072, ""),
}
CHECKED = {
    "one tile": (1, 1, 64, 64, [64]),
    "one page": (2, 1, 64, 128, [1, 128]),
    "a few tiles": (2, 1, 128, 64, [700, 700]),
    "odd lengths": (9, 1, 16, 64, [0, 1, 63, 64, 65, 127, 128, 129, 5000]),
    "odd lengths, pages of 128": (9, 1, 128, 128, [0, 1, 63, 64, 65, 127, 128, 129, 5000]),
    "one long": (5, 1, 128, 64, [200000, 3, 0, 70, 1000]),
    "tokens": (6, 4, 16, 64, [0, 1, 3, 4, 66, 3000]),
    "tokens, blocks": (3, 3, 64, 64, [1, 65, 3000]),
    "20 heads": (3, 2, 20, 64, [64, 129, 1000]),
    "8 heads, 3 tokens": (4, 3, 8, 64, [2, 65, 130, 1000]),
}


def lengths_of(spec, batch: int) -> np.ndarray:
    if spec == "uneven":
        return np.concatenate(([524288], np.random.default_rng(1).integers(1, 4096, batch - 1))).astype(np.int32)
    return np.broadcast_to(np.asarray(spec, np.int32), (batch,)).copy()


def table_of(lengths: np.ndarray, page_size: int) -> tuple[np.ndarray, int]:
    """A page table with pages in random order and garbage beyond the lengths, and the number of pages."""
    rng = np.random.default_rng(0)
    counts = -(-lengths // page_size)
    order = rng.permutation(int(counts.sum()) + 3)
    table = np.full((len(lengths), max(1, int(counts.max()))), 10**9, np.int32)
    first = np.cumsum(counts) - counts
    for row, (start, count) in enumerate(zip(first, counts, strict=True)):
        table[row, :count] = order[start : start + count]
    return table, len(order)


def kernel_of(kv: str, processors: int = PROCESSORS) -> Callable:
    module = mosaic if kv == "bf16" else mosaic_8bit
    return functools.partial(module.mla_decode, kv_rank=RANK, scale=SCALE, multiprocessors=processors)


def numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Even numbers of variance 1 from a hash of the index: XLA needs no memory beside the result."""
    index = functools.reduce(lambda s, d: s * jnp.uint32(shape[d]) + _along(shape, d), range(len(shape)), jnp.uint32(0))
    bits = (index + jnp.uint32(seed)) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    return ((bits >> 8).astype(jnp.float32) / 2**24 - 0.5) * 12**0.5


def _along(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)


def groups_of(kv: str) -> int:
    return FORMATS[kv].parts(RANK, ROPE)["scale"][0]


def as_format(latents: jax.Array, kv: str) -> Latents:
    if kv == "bf16":
        return latents
    values, scale = quantize_latents(latents[..., :RANK], groups_of(kv), jnp.dtype(FORMATS[kv].dtype))
    return QuantizedLatents(values, latents[..., RANK:], scale)


def check(name: str, kv: str = "bf16") -> dict:
    batch, tokens, heads, page_size, spec = CHECKED[name]
    lengths = lengths_of(spec, batch)
    table, pages = table_of(lengths, page_size)
    written = np.zeros((pages, page_size), bool)
    for row, length in enumerate(lengths):
        for page in range(-(-int(length) // page_size)):
            written[table[row, page]] = np.arange(page_size) + page * page_size < length

    def operands(written):
        """What is beyond the lengths, and the other layer, is NaN."""
        latents = jax.random.normal(jax.random.key(0), (pages, page_size, DIM), jnp.bfloat16)
        latents = jnp.where(written[..., None], latents, jnp.nan).astype(jnp.bfloat16)
        q = jax.random.normal(jax.random.key(1), (batch, tokens, heads, DIM), jnp.float32).astype(jnp.bfloat16)
        return q, as_format(jnp.stack((jnp.full_like(latents, jnp.nan), latents)), kv), jnp.int32(1)

    def exact(q, *rest):
        with jax.default_matmul_precision("highest"):
            return reference.mla_decode(q.astype(jnp.float32), *rest, kv_rank=RANK, scale=SCALE)

    places = table, lengths
    make = jax.jit(operands).lower(written).compile()
    kernel, exact = (jax.jit(f).lower(*make.out_info, *places).compile() for f in (kernel_of(kv), exact))
    with alone(os.environ[LOCK], HELD_SECONDS):
        arguments = *make(written), *places
        runs = [jax.device_get(kernel(*arguments)) for _ in range(3)]
        wanted, wanted_lse = jax.device_get(exact(*arguments))
    out, lse = runs[0]
    same = all(np.array_equal(run[0], out, equal_nan=True) and np.array_equal(run[1], lse) for run in runs[1:])
    error = float(np.linalg.norm(out - wanted) / max(np.linalg.norm(wanted), 1e-30))
    empty = np.isneginf(wanted_lse)
    lse_error = float(np.max(np.abs(lse - wanted_lse)[~empty], initial=0.0))
    good = error <= NORM_BOUND and lse_error <= LSE_BOUND and same
    good &= bool(np.all(np.isneginf(lse[empty]))) and bool(np.all(out[empty] == 0))
    said = f"{'ok' if good else 'BAD'} error {error:.1e}, log-sum-exp {lse_error:.1e}, repeats {same}"
    return {"said": said} if good else {"said": said, "failed": f"; bounds {NORM_BOUND}, {LSE_BOUND}"}


def measure(name: str, kv: str = "bf16", processors: int = PROCESSORS) -> dict:
    """Time of the operation for several layers in one program: nothing of a layer is in the L2 when its turn comes."""
    batch, tokens, heads, page_size, spec, peer = TIMED[name]
    lengths = lengths_of(spec, batch)
    table, pages = table_of(lengths, page_size)
    layers = 2 if spec == "uneven" or batch == 1 else 3
    whole = layers_of(kernel_of(kv, processors), layers, decode_parts.count(tokens * heads, processors))

    def operands():
        rows = layers, pages, page_size
        q = numbers((batch, tokens, heads, DIM), 1).astype(jnp.bfloat16)
        if kv == "bf16":
            return q, numbers((*rows, DIM), 2).astype(jnp.bfloat16)
        values = jnp.round(numbers((*rows, RANK), 2) * 73).astype(FORMATS[kv].dtype)
        rope = numbers((*rows, ROPE), 3).astype(jnp.bfloat16)
        scale = (numbers((*rows, groups_of(kv)), 4) + 4) / 300
        return q, QuantizedLatents(values, rope, scale)

    make = jax.jit(operands).lower().compile()
    program = jax.jit(whole).lower(*make.out_info, table, lengths).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        arguments = *make(), jnp.asarray(table), jnp.asarray(lengths)
        timing = time_of(lambda _: program(*arguments), jax.block_until_ready, REPEATS)
    attending, merging, others = (sum(found) / layers for found in parts_of(timing.kernels))
    if not timing.kernels:
        attending = timing.seconds / layers
    keys_seen = int(lengths.sum())
    flops, moved = 2 * tokens * heads * keys_seen * (DIM + RANK), keys_seen * FORMATS[kv].token_bytes(RANK, ROPE)
    said = (
        f"{timing.clock}: {attending * 1e6:.1f} us + merge {merging * 1e6:.1f} + others {others * 1e6:.1f}; "
        f"{flops / attending / 1e12:.0f} TFLOP/s, {moved / attending / 1e12:.2f} TB/s; with all of it "
        f"{flops * layers / timing.seconds / 1e12:.0f}, {moved * layers / timing.seconds / 1e12:.2f}"
    )
    return {"said": said, "peer": peer, "flops": flops, "bytes": moved, "layers": layers} | dataclasses.asdict(timing)


def layers_of(run: Callable, layers: int, parts: int) -> Callable:
    """The layers of a step, which share a schedule."""

    def whole(q, cache, table, lengths):
        schedule = decode_parts.schedule(lengths, parts)
        return [run(q, cache, jnp.int32(layer), table, lengths, schedule=schedule) for layer in range(layers)]

    return whole


def parts_of(kernels: list[tuple[str, float]]) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the kernels that attend, that merge, and of others."""
    merging = [seconds for name, seconds in kernels if "mla_decode_merge" in name]
    attending = [seconds for name, seconds in kernels if "mla_decode" in name and "mla_decode_merge" not in name]
    return attending, merging, [seconds for name, seconds in kernels if "mla_decode" not in name]


FIRST = "b128 h16 8K", "b128 h128 4K", "b16 h16 128K", "b64 h16 512K + 63 short"


def cases() -> dict[str, Callable[[], dict]]:
    """The most important first."""

    def checks(names, kinds=KINDS):
        return {f"check {kv} {name}": functools.partial(check, name, kv) for name in names for kv in kinds}

    def times(names, kinds=KINDS):
        return {f"time {kv} {name}": functools.partial(measure, name, kv) for name in names for kv in kinds}

    small = ["one tile", "odd lengths", "a few tiles", "one long"]
    found = checks(small, ("int8", "fp8_e4m3")) | checks(("tokens", "20 heads", "8 heads, 3 tokens"), ("int8",))
    found |= times(FIRST, ("bf16", "int8", "fp8_e4m3"))
    found |= checks(CHECKED, ("fp8_e5m2",)) | checks(CHECKED, ("int8", "bf16")) | times(TIMED, ("bf16", "int8"))
    return found | checks(CHECKED) | times(TIMED)


def run(module: str, cases: dict[str, Callable[[], dict]], description: str | None) -> int:
    """The command line of a check, and its worker."""
    if LOCK in os.environ:
        workers.work(lambda case: cases[case]())
        return 0
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the answers as JSON")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=120, help="cases without an answer by then are left out")
    parser.add_argument("--workers", type=int, default=12)
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in cases if arguments.only in name]
    environment = os.environ | {
        LOCK: str(Path(tempfile.mkdtemp()) / "lock"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    answers: dict[str, dict] = {}
    served = workers.serve(module, [{"case": name} for name in names], arguments.workers, CASE_SECONDS, environment)
    with closing(served):
        for index, answer in served:
            answers[names[index]] = answer
            took = time.monotonic() - begin
            print(f"[{took:5.1f}] {names[index]}: {answer.get('said', '')}{answer.get('failed', '')}", flush=True)
            if took > arguments.seconds:
                break
    (arguments.out / f"{module.split('.')[-1]}.json").write_text(json.dumps(answers, indent=1))
    print()
    for name in names:
        if name in answers:
            answer = answers[name]
            peer = f" (FlashMLA {answer['peer']})" if answer.get("peer") else ""
            print(f"{name}: {answer.get('said', '')}{peer} {answer.get('failed', '')}")
    failed = [name for name, answer in answers.items() if "failed" in answer]
    for name in failed:
        print(f"BROKEN {name}: {answers[name]['failed']}\n{answers[name].get('trace', '')[-800:]}")
    print(f"{len(answers)} of {len(names)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(MODULE, cases(), __doc__))
