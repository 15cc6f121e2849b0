"""Checks and tunes the matrix products on one Hopper GPU: `python -m tests.gpu.check_gemm [--out DIR]` from the root.

First every form against float64 (torch) at odd and at real sizes, then the times of the products that `jaxinfer.bench`
measures with each choice of tiles that may be theirs.  Cases run in processes of their own (see `workers`): checks
several at a time, times one at a time while the next are compiled.  The first check that faults is run again under
compute-sanitizer.  Prints tables last, and writes all answers and the best tiles, for `adopt_tiles`.  Exits with 1 if a
bound is broken.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxinfer.bench.operation import Case, Operation
from jaxinfer.bench.products import FORMS, Gemm, GroupedGemm
from jaxinfer.bench.timing import alone, measure
from jaxinfer.kernels.gemm import gemm
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.tiles import Tiles
from tests.gpu import quantization, workers

MODULE = "tests.gpu.check_gemm"
NORM_BOUND, BIAS_BOUND = 3e-3, 1e-3
NOISE = 0.01

UNEVEN, ONE_GROUP, FEW = [170, 1, 0, 300, 65, 464], [0, 0, 1000, 0, 0, 0], [0, 3, 0, 0, 0, 0]
ALIGNED = [128, 256, 0, 384, 128, 104]
LOCK = "CHECK_GPU_LOCK"
"""Environment variable with the path of the lock that all workers share."""
HELD_SECONDS = 20
REPEATS = 24
SMALL = "64x128/7", "64x256/4", "128x64/7"
PROMOTED = "128x192/4", "128x192/4/r16", "192x128/4", "192x128/4/r16"
EXACT = "128x256/4", "128x256/4/r16", "128x192/4"
GROUPED_EXACT = "128x256/3", "128x192/4"
FEW_ROWS = "64x128/6", "64x256/4", "64x128/4"


def tiles_of(name: str) -> Tiles:
    """`128x192/4` and perhaps `/r16`, the raster."""
    shape, stages, *raster = name.split("/")
    m, n = shape.split("x")
    fields = {"raster": int(raster[0].removeprefix("r"))} if raster else {}
    return Tiles(m=int(m), n=int(n), stages=int(stages), **fields)


# --- correctness -----------------------------------------------------------------------------------------------------


def compare(y: jax.Array, reference) -> dict:
    import torch  # pyright: ignore[reportMissingImports]

    got = torch.from_dlpack(y).double()
    error = float((got - reference).norm() / reference.norm())
    bias = float((got - reference).mean() / reference.abs().mean())
    good = error <= NORM_BOUND and abs(bias) <= BIAS_BOUND
    answer = {"good": good, "said": f"{'ok' if good else 'BAD'} error {error:.2e}, bias {bias:+.1e}"}
    return answer if good else answer | {"failed": f"; bounds {NORM_BOUND}, {BIAS_BOUND}"}


def check_dense(form: str, m: int, n: int, k: int, kind: str, extra: bool, tiles: Tiles | None) -> dict:
    import torch  # pyright: ignore[reportMissingImports]

    from tests.gpu.products import data, operands, wide

    arrays = operands(form, kind, m, n, k)
    reference = wide(arrays[0], arrays[2], False) @ wide(arrays[1], arrays[3], True).T
    added = {}
    if extra:
        scale = float(reference.abs().mean())
        added = {"bias": data("normal", (n,), 1) * scale, "residual": data("normal", (m, n), 2) * scale}
        reference += sum(torch.from_dlpack(a).double() for a in added.values())
        added["out_dtype"] = jnp.float32
    return compare(gemm(*arrays, **added, implementation="mosaic", tiles=tiles), reference)


def check_grouped(form: str, sizes: list[int], n: int, k: int, out_dtype, tiles: Tiles | None) -> dict:
    import torch  # pyright: ignore[reportMissingImports]

    from tests.gpu.products import operands, wide

    x, w, x_scale, w_scale = operands(form, "normal", 1000, n, k, len(sizes))
    sizes_there = jnp.asarray(sizes, jnp.int32)
    y = grouped_gemm(x, w, sizes_there, x_scale, w_scale, out_dtype=out_dtype, implementation="mosaic", tiles=tiles)
    rows, parts, start = wide(x, x_scale, False), [], 0
    for group, size in enumerate(sizes):
        weight = wide(w[group], None if w_scale is None else w_scale[group], True)
        parts.append(rows[start : start + size] @ weight.T)
        start += size
    return compare(y[:start], torch.cat(parts))


def check_large_offsets(m: int, n: int, k: int) -> dict:
    """The last rows of an output of more than 2^31 elements."""
    from tests.gpu.products import operands, wide

    x, w, x_scale, w_scale = operands("row", "normal", m, n, k)
    y = gemm(x, w, x_scale, w_scale, implementation="mosaic")
    return compare(y[-200:], wide(x[-200:], x_scale[-200:], False) @ wide(w, w_scale, True).T)


def checks() -> dict[str, Callable[[], dict]]:
    found: dict[str, Callable[[], dict]] = {}

    def dense(form, m, n, k, kind, tiles=None, extra=False):
        name = f"check gemm {form} {m}x{n}x{k} {kind} {'bias+residual ' if extra else ''}{tiles or 'chosen'}"
        chosen = None if tiles is None else tiles_of(tiles)
        found[name] = functools.partial(check_dense, form, m, n, k, kind, extra, chosen)

    def grouped(form, sizes, tiles=None, out_dtype=jnp.bfloat16, n=320):
        name = f"check grouped {form} {sizes} N{n} {jnp.dtype(out_dtype).name} {tiles or 'chosen'}"
        chosen = None if tiles is None else tiles_of(tiles)
        found[name] = functools.partial(check_grouped, form, sizes, n, 384, out_dtype, chosen)

    # The smallest grouped cases first: whole tiles only, then parts of tiles at every width.
    grouped("bf16", ALIGNED, "128x128/4", n=256)
    grouped("row", FEW, "64x128/4", n=256)
    for tiles in ("128x128/4", "64x128/6", "64x256/4", "128x96/4", "128x192/4", "128x160/4"):
        grouped("row", UNEVEN, tiles)
    grouped("row", UNEVEN, "64x64/4", out_dtype=jnp.float32)
    for form in ("row", "block", "int8", "bf16"):
        for sizes in (UNEVEN, ONE_GROUP, FEW):
            grouped(form, sizes)
        dense(form, 7, 320, 384, "normal")
        for kind in ("normal", "positive", "heavy"):
            dense(form, 257, 512, 18432, kind)
        for kind in ("normal", "positive"):
            dense(form, 1000, 2112, 7168, kind)
        dense(form, 1000, 2112, 7168, "normal", "128x160/4")
    dense("block", 300, 576, 1024, "normal", extra=True)
    for form in ("row", "block"):
        dense(form, 1000, 2112, 7168, "normal", "192x128/4")
        # The tiles of the second wave are cut in parts.
        for tiles in ("128x192/4", "192x128/4"):
            dense(form, 1500, 2560, 1024, "normal", tiles)
        grouped(form, UNEVEN, "192x128/4")
    dense("int8", 1500, 2560, 1024, "normal", "128x192/4")
    found["check gemm row, more than 2^31 elements"] = functools.partial(check_large_offsets, 65544, 36864, 128)
    return found


# --- time ------------------------------------------------------------------------------------------------------------


def time_product(operation: Operation, case: Case, tiles: str) -> dict:
    """One choice of tiles."""
    from tests.gpu.products import random_operands, shapes_of

    *front, m, n, k = case.shape
    groups = front[0] if front else None
    x, w, *scales = shapes_of(case.form, m, n, k, groups)
    sizes = () if groups is None else (jax.ShapeDtypeStruct((groups,), jnp.int32),)
    one = functools.partial(gemm if groups is None else grouped_gemm, implementation="mosaic", tiles=tiles_of(tiles))
    compiled = jax.jit(one).lower(x, w, *sizes, *scales).compile()
    with alone(os.environ[LOCK], HELD_SECONDS):
        sets = random_operands(case.form, groups, m, n, k)
        timing = measure(lambda i: compiled(*sets[i % len(sets)]), jax.block_until_ready, REPEATS)
    seconds = sum(t for name, t in timing.kernels if "gemm" in name) if timing.kernels else timing.seconds
    rate = operation.work(case).flops / seconds / 1e12
    others = f"{timing.seconds * 1e6:.1f} with others, {timing.clock}"
    said = f"{seconds * 1e6:.1f} us ({others}), {rate:.0f} TFLOP/s"
    return {"case": dataclasses.asdict(case), "tiles": tiles, "seconds": seconds, "said": said}


def choices(case: Case) -> tuple[str, ...]:
    *groups, m, _, _ = case.shape
    rows = m // (groups[0] if groups else 1)
    if rows <= 128:
        return FEW_ROWS if groups else SMALL
    # Low tiles waste less of small groups, which begin and end anywhere.
    low = ("64x256/4",) if groups and rows <= 512 else ()
    if FORMS[case.form][0] == jnp.float8_e4m3fn:
        return PROMOTED + low
    return (GROUPED_EXACT + low) if groups else EXACT


def timings() -> dict[str, Callable[[], dict]]:
    return {
        f"time {case.name} {tiles}": functools.partial(time_product, operation, case, tiles)
        for operation in (GroupedGemm(), Gemm())
        for case in operation.table()
        for tiles in choices(case)
    }


def cases() -> dict[str, Callable[[], dict]]:
    return checks() | quantization.checks() | timings()


# --- report ----------------------------------------------------------------------------------------------------------


def table(answers: dict[str, dict]) -> list[dict]:
    """Prints the times of each product, best first, and returns the best tiles as `tiles.json` has them."""
    rows: dict[str, list[dict]] = {}
    for answer in answers.values():
        if "tiles" in answer:
            rows.setdefault(str(answer["case"]), []).append(answer)
    measured = []
    print("\n== us, best first")
    for found in rows.values():
        found.sort(key=lambda answer: answer["seconds"])
        case = Case(**found[0]["case"])
        print(f"{case.name}:", ", ".join(f"{answer['tiles']} {answer['seconds'] * 1e6:.1f}" for answer in found))
        *groups, m, n, k = case.shape
        dtype, scheme = FORMS[case.form]
        kind = {"dtype": jnp.dtype(dtype).name, "scheme": scheme, "groups": groups[0] if groups else None}
        measured.append({**kind, "m": m, "n": n, "k": k, "tiles": dataclasses.asdict(simplest(found))})
    return measured


def simplest(found: list[dict]) -> Tiles:
    """Of the choices that are as good as the best but for noise, one of the usual raster."""
    good = [tiles_of(a["tiles"]) for a in found if a["seconds"] <= found[0]["seconds"] * (1 + NOISE)]
    return min(good, key=lambda tiles: tiles.raster != Tiles.raster)


def sanitize(name: str, out: Path, seconds: float) -> None:
    """Runs a case under compute-sanitizer's memcheck and prints what it found."""
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: not there")
        return
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-m", MODULE, "--case", name]
    log = out / "sanitizer.txt"
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {seconds} s\n")
    found = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("=====")]
    print(f"\n== compute-sanitizer, {name}", *found[:40], sep="\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the full figures")
    parser.add_argument("--only", help="cases whose names have this in them")
    parser.add_argument("--seconds", type=float, default=420, help="no case begins after so long")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--case", help="run one case here and print its answer")
    arguments = parser.parse_args()
    found = cases()
    os.environ.setdefault(LOCK, str(Path(tempfile.mkdtemp()) / "lock"))
    if arguments.case:
        print(found[arguments.case]())
        return 0
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        # Several workers and torch share the memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.72 / arguments.workers:.3f}",
        # Every kernel launched for itself, so that each run has the same ones.
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    }
    answers: dict[str, dict] = {}
    names = [name for name in found if not arguments.only or arguments.only in name]
    for phase in ("check ", "time "):
        chosen = [name for name in names if name.startswith(phase)]
        left = arguments.seconds - (time.monotonic() - begin)
        if chosen:
            answers |= workers.run(MODULE, chosen, arguments.workers, 40, left, environment)
        faulty = [name for name in chosen if "good" not in answers.get(name, {"good": 1}) and phase == "check "]
        if faulty:
            sanitize(min(faulty, key=names.index), arguments.out, 60)
        (arguments.out / "check_gemm.json").write_text(json.dumps(answers, indent=1))
    measured = table(answers)
    (arguments.out / "check_gemm.json").write_text(json.dumps({"measured": measured, "answers": answers}, indent=1))
    failed = {name: answer for name, answer in answers.items() if "failed" in answer}
    for name, answer in failed.items():
        print(f"BROKEN {name}: {answer.get('said', '')}{answer['failed']}\n{answer.get('trace', '')[-600:]}")
    print(f"{len(answers)} of {len(names)} cases ran, {len(failed)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
