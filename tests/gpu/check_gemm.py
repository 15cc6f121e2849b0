"""Checks and times the matrix products on one Hopper GPU: `python -m tests.gpu.check_gemm [--out DIR]` from the root.

First every form against float64 (torch) at odd and at real sizes, then times beside torch's own kernels.  Cases run in
processes of their own (see `workers`): checks several at a time, times one at a time while the next are compiled.  The
first check that faults is run again under compute-sanitizer.  Prints tables last, and writes all answers and, in the
form of `kernels/tiles.json`, the best tiles.  Exits with 1 if a bound is broken.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.gemm import gemm
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.tiles import Problem, Tiles
from tests.gpu import quantization, workers
from tests.gpu.clock import LOCK, alone

MODULE = "tests.gpu.check_gemm"
NORM_BOUND, BIAS_BOUND = 3e-3, 1e-3
NOISE = 0.01

# DeepGEMM on an H200, TFLOP/s: docs of the project's design, measured 2026-11-29.
DENSE = {
    (8192, 7168, 2048): 1329,
    (8192, 4096, 7168): 1426,
    (4096, 4096, 7168): 1426,
    (4096, 7168, 18432): 1478,
    (4096, 24576, 1536): 1320,
    (4096, 2112, 7168): 1285,
    (128, 7168, 2048): 312,
}
GROUPED = {
    (32, 33792, 4096, 7168): 1292,
    (8, 38912, 7168, 2048): 1334,
    (32, 8192, 4096, 7168): 963,
    (32, 1024, 4096, 7168): None,
}
UNEVEN, ONE_GROUP, FEW = [170, 1, 0, 300, 65, 464], [0, 0, 1000, 0, 0, 0], [0, 3, 0, 0, 0, 0]
ALIGNED = [128, 256, 0, 384, 128, 104]
SMALL = "64x128/7", "64x256/4", "128x64/7"
WIDE = (
    *("128x192/4", "128x192/4/c2w", "128x192/4/c2x", "128x192/5", "128x192/4/r16", "128x160/4", "128x128/5"),
    *("192x128/4", "192x128/4/c2w", "192x128/4/c2x", "128x192/5/c2w"),
)
EXACT = "128x256/4", "128x256/4/c2w", "128x256/4/r16", "128x192/4"
GROUPED_WIDE = "128x192/4", "128x192/4/c2x", "128x192/4/r16", "192x128/4", "192x128/4/c2x", "192x128/4/r16"
FEW_ROWS = "64x128/6", "64x256/4", "64x128/4"
SUSTAINED = {
    ("row", "block"): ("128x192/4", "128x192/4/c2w", "128x192/4/c2x", "192x128/4", "192x128/4/c2x"),
    ("int8",): ("128x192/4", "128x256/4"),
}
SUSTAINED_SECONDS = 0.8
FLOP_PER_CYCLE = 8192
"""Of the tensor cores of a multiprocessor of Hopper, 8-bit."""


def tiles_of(name: str) -> Tiles:
    """`128x192/4` and what follows: `/r16` raster, `/c2x` or `/c2w` a cluster and the operand that it shares."""
    shape, stages, *rest = name.split("/")
    m, n = shape.split("x")
    fields = {}
    for part in rest:
        if part[0] == "c":
            fields |= {"cluster": int(part[1]), "shared": part[2]}
        else:
            fields["raster"] = int(part.removeprefix("r"))
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
    grouped("row", UNEVEN, "128x192/4/c2x")
    grouped("row", UNEVEN, "64x64/4", out_dtype=jnp.float32)
    for form in ("row", "block", "int8", "bf16"):
        for sizes in (UNEVEN, ONE_GROUP, FEW):
            grouped(form, sizes)
        dense(form, 7, 320, 384, "normal")
        for kind in ("normal", "positive", "heavy"):
            dense(form, 257, 512, 18432, kind)
        for kind in ("normal", "positive"):
            dense(form, 1000, 2112, 7168, kind)
        for tiles in ("128x160/4", "128x192/4/c2x", "128x192/4/c2w"):
            dense(form, 1000, 2112, 7168, "normal", tiles)
    dense("block", 300, 576, 1024, "normal", extra=True)
    for form in ("row", "block"):
        for tiles in ("192x128/4", "192x128/4/c2w", "128x192/5"):
            dense(form, 1000, 2112, 7168, "normal", tiles)
        # The tiles of the second wave are cut in parts.
        for tiles in ("128x192/4", "192x128/4", "128x192/4/c2w", "128x192/4/c2x"):
            dense(form, 1500, 2560, 1024, "normal", tiles)
        grouped(form, UNEVEN, "192x128/4")
    dense("int8", 1500, 2560, 1024, "normal", "128x192/4")
    found["check gemm row, more than 2^31 elements"] = functools.partial(check_large_offsets, 65544, 36864, 128)
    return found


# --- time ------------------------------------------------------------------------------------------------------------


def time_product(form: str, groups: int | None, m: int, n: int, k: int, tiles: str, uneven: bool = False) -> dict:
    """One choice of tiles; groups of any size where `uneven` or few rows a group, else multiples of 128."""
    from tests.gpu.products import ROTATED, random_operands, seconds_jax, shapes_of

    x, w, *scales = shapes_of(form, m, n, k, groups)
    sizes = () if groups is None else (jax.ShapeDtypeStruct((groups,), jnp.int32),)
    one = functools.partial(
        gemm if groups is None else grouped_gemm,
        implementation="mosaic",
        tiles=tiles_of(tiles),
    )
    one = jax.jit(one)
    program = jax.jit(lambda *sets: [one(*operands) for operands in sets])
    compiled = program.lower(*[(x, w, *sizes, *scales)] * ROTATED).compile()
    with alone():
        unit = 1 if uneven or m // (groups or 1) < 128 else 128
        seconds, both = seconds_jax(compiled, random_operands(form, groups, m, n, k, unit), "gemm")
        random_operands.cache_clear()
    flops = 2 * m * n * k
    said = f"{seconds * 1e6:.1f} us ({both * 1e6:.1f} with others), {flops / seconds / 1e12:.0f} TFLOP/s"
    answer = {"tiles": tiles, "seconds": seconds, "both": both, "said": said}
    return answer if uneven else answer | {"key": [form, groups, m, n, k]}


def time_sustained(form: str, m: int, n: int, k: int, tiles: str, single: bool) -> dict:
    """One choice of tiles for long enough that the clock settles: rate, clock, power, share of the cycles.

    Args: `single` accumulates all of K in the tensor cores, which is wrong in e4m3 and says what promotion costs.
    """
    from tests.gpu.products import ROTATED, random_operands, shapes_of

    one = jax.jit(functools.partial(gemm, implementation="mosaic", tiles=tiles_of(tiles)))
    program = jax.jit(lambda *sets: [one(*operands) for operands in sets])
    promoted = mock.patch.object(Problem, "promoted", False) if single else contextlib.nullcontext()
    with promoted:
        compiled = program.lower(*[shapes_of(form, m, n, k)] * ROTATED).compile()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "20"]
    with alone():
        sets = random_operands(form, None, m, n, k)
        jax.block_until_ready(compiled(*sets))
        sampler = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        time.sleep(0.3)
        begin, runs = time.perf_counter(), 0
        while time.perf_counter() - begin < SUSTAINED_SECONDS:
            jax.block_until_ready([compiled(*sets) for _ in range(8)])
            runs += 8 * ROTATED
        seconds = (time.perf_counter() - begin) / runs
        sampler.terminate()
        lines = sampler.communicate()[0].splitlines()
        random_operands.cache_clear()
    found = (re.fullmatch(r"([\d.]+), ([\d.]+)", line) for line in lines)
    samples = [(float(match[1]), float(match[2])) for match in found if match]
    busy = [sample for sample in samples if sample[1] > 0.9 * max(watt for _, watt in samples)]
    clock, watt = (float(np.median(column)) for column in zip(*busy, strict=True)) if busy else (0.0, 0.0)
    rate = 2 * m * n * k / seconds
    share = rate / (jax.devices()[0].core_count * FLOP_PER_CYCLE * clock * 1e6) if clock else 0.0
    said = f"{rate / 1e12:.0f} TFLOP/s at {clock:.0f} MHz and {watt:.0f} W, {share:.3f} of the cycles"
    return {"said": said, "clocks": samples, "seconds": seconds}


def time_torch(form: str, groups: int | None, m: int, n: int, k: int) -> dict:
    """torch's kernel for the same work: row scales with the fast (single) accumulation, or bfloat16."""
    import torch  # pyright: ignore[reportMissingImports]

    from tests.gpu.products import ROTATED, seconds_torch

    def numbers(*shape):
        values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        return values if form == "bf16" else values.to(torch.float8_e4m3fn)

    with alone():
        if groups is None:
            sets = [(numbers(m, k), numbers(n, k)) for _ in range(ROTATED)]
            if form == "bf16":
                seconds = seconds_torch(lambda x, w: x @ w.T, sets)
            else:
                scales = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
                seconds = seconds_torch(
                    lambda x, w: torch._scaled_mm(x, w.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True), sets
                )
        else:
            w = torch.stack([numbers(n, k) for _ in range(groups)])
            sets = [(numbers(m, k),) for _ in range(ROTATED)]
            ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (m // groups)
            scales = torch.rand(m, device="cuda"), torch.rand(groups, n, device="cuda")
            seconds = seconds_torch(
                lambda x: torch._scaled_grouped_mm(
                    x, w.transpose(-2, -1), *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
                sets,
            )
        del sets
        torch.cuda.empty_cache()
    said = f"{seconds * 1e6:.1f} us, {2 * m * n * k / seconds / 1e12:.0f} TFLOP/s"
    return {"key": [form, groups, m, n, k], "tiles": "torch", "seconds": seconds, "said": said}


def timings() -> dict[str, Callable[[], dict]]:
    found: dict[str, Callable[[], dict]] = {}

    def add(form, shape, groups, *choices):
        for tiles in choices:
            name = f"time {form} {f'{groups} x ' if groups else ''}{'x'.join(map(str, shape))} {tiles}"
            if tiles == "torch":
                found[name] = functools.partial(time_torch, form, groups, *shape)
            else:
                found[name] = functools.partial(time_product, form, groups, *shape, tiles)

    for groups, *shape in GROUPED:
        few = shape[0] // groups <= 64
        add("row", shape, groups, "torch")
        if not few:
            name = f"time row {groups} x {'x'.join(map(str, shape))} 128x192/4, uneven groups"
            found[name] = functools.partial(time_product, "row", groups, *shape, "128x192/4", uneven=True)
        for form in ("row", "block"):
            add(form, shape, groups, *(FEW_ROWS if few else GROUPED_WIDE))
        for form in ("int8", "bf16"):
            add(form, shape, groups, *(("64x256/4",) if few else ("128x256/3", "128x192/4")))
    for shape in DENSE:
        add("int8", shape, None, *(SMALL if shape[0] == 128 else EXACT))
        add("row", shape, None, "torch")
        for form in ("row", "block"):
            add(form, shape, None, *(SMALL if shape[0] == 128 else WIDE))
        if shape[0] > 128:
            add("row", shape, None, "192x128/5", "192x128/5/c2x")
    add("bf16", (8192, 4096, 7168), None, "torch", *EXACT)
    for forms, choices in SUSTAINED.items():
        for shape in ((8192, 4096, 7168), (4096, 7168, 18432)):
            for form in forms:
                for tiles in choices:
                    name = f"time sustained {form} {'x'.join(map(str, shape))} {tiles}"
                    found[name] = functools.partial(time_sustained, form, *shape, tiles, False)
    for tiles in ("128x192/4", "128x256/4"):
        name = f"time sustained row 8192x4096x7168 {tiles} not promoted"
        found[name] = functools.partial(time_sustained, "row", 8192, 4096, 7168, tiles, True)
    return found


# --- report ----------------------------------------------------------------------------------------------------------


def table(answers: dict[str, dict]) -> list[dict]:
    """Prints the times of each product, best first, and returns the best tiles as `tiles.json` has them."""
    from tests.gpu.products import FORMS

    rows: dict[tuple, list[dict]] = {}
    for answer in answers.values():
        if "key" in answer:
            rows.setdefault(tuple(answer["key"]), []).append(answer)
    measured = []
    print("\n== TFLOP/s by kernel time (decode: also TB/s of weights)")
    for (form, groups, m, n, k), found in rows.items():
        flops = 2 * m * n * k / 1e12
        peer = GROUPED.get((groups, m, n, k)) if groups else DENSE.get((m, n, k))
        found.sort(key=lambda answer: answer["seconds"])
        cells = ", ".join(f"{answer['tiles']} {flops / answer['seconds']:.0f}" for answer in found)
        line = f"{form:5} {f'{groups} x ' if groups else ''}{m}x{n}x{k}: {cells}"
        own = next((answer for answer in found if answer["tiles"] != "torch"), None)
        if own is not None:
            seconds = own["seconds"]
            ratio = "" if peer is None else f" = {flops / seconds / peer:.2f} of DeepGEMM {peer}"
            line += f" | {seconds * 1e6:.0f} us{ratio}"
            if m <= 1024:
                size = 2 if form == "bf16" else 1
                line += f", {(groups or 1) * n * k * size / seconds / 1e12:.2f} TB/s"
            dtype, scheme = FORMS[form]
            kind = {"dtype": jnp.dtype(dtype).name, "scheme": scheme, "groups": groups, "m": m, "n": n, "k": k}
            measured.append({**kind, "tiles": dataclasses.asdict(simplest(found))})
        print(line)
    return measured


def simplest(found: list[dict]) -> Tiles:
    """Of the choices that are as good as the best but for noise, the one with the fewest departures from the usual."""
    good = [answer for answer in found if answer["tiles"] != "torch"]
    good = [tiles_of(a["tiles"]) for a in good if a["seconds"] <= good[0]["seconds"] * (1 + NOISE)]
    return min(good, key=lambda tiles: (tiles.cluster, tiles.raster != Tiles.raster))


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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", help="run one case here and print its answer")
    arguments = parser.parse_args()
    cases = checks() | quantization.checks() | quantization.timings() | timings()
    os.environ.setdefault(LOCK, str(Path(tempfile.mkdtemp()) / "lock"))
    if arguments.case:
        print(cases[arguments.case]())
        return 0
    if arguments.worker:
        workers.work(cases)
        return 0
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        # Several workers and torch share the memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.09",
        # Every kernel launched for itself, so that each run has the same ones.
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    }
    answers: dict[str, dict] = {}
    names = [name for name in cases if not arguments.only or arguments.only in name]
    for phase in ("check ", "time "):
        chosen = [name for name in names if name.startswith(phase)]
        left = arguments.seconds - (time.monotonic() - begin)
        if chosen:
            answers |= workers.run(MODULE, chosen, arguments.workers, 40, left, environment)
        faulty = [name for name in chosen if "good" not in answers.get(name, {"good": 1}) and phase == "check "]
        if faulty:
            sanitize(min(faulty, key=list(cases).index), arguments.out, 60)
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
