"""Checks and times the decode attention on one Hopper GPU: `python -m tests.gpu.check_mla_decode [--out DIR]`.

Every group of cases runs in a process of its own; one that hangs is stopped and is the last.  First the reference in
float32, then times of the whole operation and of its main kernel alone, beside the figures of FlashMLA.  Prints a
table last, and writes it as JSON.  Exits with 1 if a bound is broken.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.mosaic import mla_decode as mosaic
from jaxinfer.kernels.reference import mla_decode as reference

RANK, ROPE = 512, 64
DIM = RANK + ROPE
SCALE = 0.07
NORM_BOUND, LSE_BOUND = 4e-3, 2e-3
PROCESSORS = 132
SECONDS = 70

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


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_latents(key: jax.Array, pages: int, page_size: int) -> jax.Array:
    return jax.random.normal(key, (pages, page_size, DIM), jnp.bfloat16)


def check(name: str) -> dict:
    batch, tokens, heads, page_size, spec = CHECKED[name]
    lengths = lengths_of(spec, batch)
    table, pages = table_of(lengths, page_size)
    latents = random_latents(jax.random.key(0), pages, page_size)
    # What is beyond the lengths, and the other layer, is NaN.
    written = np.zeros((pages, page_size), bool)
    for row, length in enumerate(lengths):
        for page in range(-(-int(length) // page_size)):
            written[table[row, page]] = np.arange(page_size) + page * page_size < length
    latents = jnp.where(jnp.asarray(written)[..., None], latents, jnp.nan).astype(jnp.bfloat16)
    cache = jnp.stack((jnp.full_like(latents, jnp.nan), latents))
    q = jax.random.normal(jax.random.key(1), (batch, tokens, heads, DIM), jnp.float32).astype(jnp.bfloat16)
    arguments = cache, jnp.int32(1), jnp.asarray(table), jnp.asarray(lengths)
    kernel = jax.jit(functools.partial(mosaic.mla_decode, kv_rank=RANK, scale=SCALE, multiprocessors=PROCESSORS))
    runs = [jax.block_until_ready(kernel(q, *arguments)) for _ in range(3)]
    out, lse = (np.asarray(x) for x in runs[0])
    same = all(np.array_equal(run[0], out, equal_nan=True) and np.array_equal(run[1], lse) for run in runs[1:])
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(reference.mla_decode, kv_rank=RANK, scale=SCALE))
        wanted, wanted_lse = (np.asarray(x) for x in exact(q.astype(jnp.float32), *arguments))
    error = float(np.linalg.norm(out - wanted) / max(np.linalg.norm(wanted), 1e-30))
    empty = np.isneginf(wanted_lse)
    lse_error = float(np.max(np.abs(lse - wanted_lse)[~empty], initial=0.0))
    good = error <= NORM_BOUND and lse_error <= LSE_BOUND and same
    good &= bool(np.all(np.isneginf(lse[empty]))) and bool(np.all(out[empty] == 0))
    return {"name": name, "good": bool(good), "error": error, "lse": lse_error, "repeats": bool(same)}


def seconds(function: Callable, *arguments) -> float:
    jax.block_until_ready(function(*arguments))
    samples = []
    for _ in range(9):
        begin = time.perf_counter()
        outs = [function(*arguments) for _ in range(3)]
        jax.block_until_ready(outs)
        samples.append((time.perf_counter() - begin) / 3)
    return float(np.median(samples))


def measure(name: str) -> dict:
    """Time of the operation for several layers in one program: nothing of a layer is in the L2 when its turn comes."""
    batch, tokens, heads, page_size, spec, peer = TIMED[name]
    lengths = lengths_of(spec, batch)
    table, pages = table_of(lengths, page_size)
    layers = 2 if spec == "uneven" or batch == 1 else 3
    keys = jax.random.split(jax.random.key(0), layers)
    cache = jnp.stack([random_latents(key, pages, page_size) for key in keys])
    q = jax.random.normal(jax.random.key(1), (batch, tokens, heads, DIM), jnp.float32).astype(jnp.bfloat16)
    arguments = q, cache, jnp.asarray(table), jnp.asarray(lengths)

    def whole(q, cache, table, lengths):
        run = functools.partial(mosaic.mla_decode, kv_rank=RANK, scale=SCALE, multiprocessors=PROCESSORS)
        return [run(q, cache, jnp.int32(layer), table, lengths) for layer in range(layers)]

    took = seconds(jax.jit(whole), *arguments) / layers
    merge = mosaic._merge
    mosaic._merge = lambda shape, operands, out, lse: (out, lse)
    attend = seconds(jax.jit(lambda *a: whole(*a)), *arguments) / layers
    mosaic._merge = merge
    keys_seen = int(lengths.sum())
    flops = 2 * tokens * heads * keys_seen * (DIM + RANK)
    moved = keys_seen * DIM * 2
    return {
        "name": name,
        "peer": peer,
        "microseconds": took * 1e6,
        "without merge": attend * 1e6,
        "TFLOP/s": flops / took / 1e12,
        "TB/s": moved / took / 1e12,
        "TFLOP/s without merge": flops / attend / 1e12,
        "TB/s without merge": moved / attend / 1e12,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for decode.json")
    parser.add_argument("--case", nargs="*", help="run these cases in this process")
    arguments = parser.parse_args()
    if arguments.case is not None:
        for name in arguments.case:
            print("RESULT " + json.dumps(check(name) if name in CHECKED else measure(name)), flush=True)
        return 0
    started, results, failed = time.monotonic(), [], []
    checked, timed = list(CHECKED), list(TIMED)
    for group in checked[:3], checked[3:6], checked[6:], timed[:4], timed[4:]:
        command = [sys.executable, "-m", "tests.gpu.check_mla_decode", "--case", *group]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = ((error.stdout or b"") + (error.stderr or b"")).decode(errors="replace"), "hang"
        found = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
        results += found
        for result in found:
            print(f"[{time.monotonic() - started:5.0f}] {json.dumps(result)}", flush=True)
        failed += [result["name"] for result in found if not result.get("good", True)]
        if code != 0:
            failed += group[len(found) :]
            print(f"[{time.monotonic() - started:5.0f}] FAILED {group} ({code})\n{output[-2500:]}", flush=True)
        if code == "hang":
            break
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "decode.json").write_text(json.dumps(results, indent=1))
    print("\n| case | µs | without merge | TFLOP/s | TB/s | FlashMLA |\n|---|---|---|---|---|---|")
    for r in results:
        if "microseconds" in r:
            print(
                f"| {r['name']} | {r['microseconds']:.0f} | {r['without merge']:.0f} | {r['TFLOP/s']:.0f} "
                f"| {r['TB/s']:.2f} | {r['peer']} |"
            )
    print("broken: " + (", ".join(failed) or "none"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
