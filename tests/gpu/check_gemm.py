"""Checks and times the matrix products on one Hopper GPU: `python -m tests.gpu.check_gemm [--out DIR]` from the root.

First every form against float64 (torch) at odd and at real sizes, then times beside torch's own kernels.  A case that
fails costs only itself; one that hangs ends the run after what is known has been printed.  Prints tables last, and
writes all figures and, in the form of `kernels/tiles.json`, the best tiles.  Exits with 1 if a bound is broken.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from jaxinfer.kernels.gemm import gemm
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.quantize import quantize, rms_norm_quantize, swiglu_quantize
from jaxinfer.kernels.tiles import Tiles
from tests.gpu.products import (
    FORMS,
    ROTATED,
    data,
    operands,
    random_bits,
    random_operands,
    seconds_jax,
    seconds_torch,
    shapes_of,
    wide,
)
from tests.oracles import FIXTURES

NORM_BOUND, BIAS_BOUND = 3e-3, 1e-3
SECONDS, HANG_SECONDS = 180.0, 50.0
QUANTIZED_ROWS = 32768

# DeepGEMM on an H200, TFLOP/s: docs of the project's design, measured 2026-11-29.
DENSE = {
    (8192, 7168, 2048): 1329,
    (4096, 4096, 7168): 1426,
    (8192, 4096, 7168): 1426,
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
WIDE, WIDE_16 = Tiles(m=128, n=192, stages=4), Tiles(m=128, n=192, stages=4, raster=16)
NARROW, PAIRED = Tiles(m=128, n=128, stages=5), Tiles(m=128, n=192, stages=4, cluster=2)
FIFTH = Tiles(m=128, n=160, stages=4)
EXACT, EXACT_192 = Tiles(m=128, n=256, stages=4), Tiles(m=128, n=192, stages=4)
SMALL = [Tiles(m=64, n=128, stages=7), Tiles(m=64, n=256, stages=4), Tiles(m=128, n=64, stages=7)]

started = time.monotonic()
progress = [started]
report: list[str] = []
broken: list[str] = []
table: dict[tuple, dict[str, float]] = {}
timed: dict[str, Tiles] = {}


def say(line: str) -> None:
    progress[0] = time.monotonic()
    print(f"[{progress[0] - started:5.1f}] {line}", flush=True)


def watch(out: Path | None) -> None:
    """Ends a run that hangs in a kernel."""
    while True:
        time.sleep(1)
        if time.monotonic() - progress[0] > HANG_SECONDS:
            broken.append("HANG: no progress; the case after the last line printed")
            finish(out)
            os._exit(1)


def guarded(name: str, function: Callable[[], Any]) -> Any:
    if time.monotonic() - started > SECONDS:
        report.append(f"{name}: left out, no time")
        return None
    try:
        return function()
    except Exception as error:
        broken.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        say(f"FAILED {name}\n{traceback.format_exc()[-1500:]}")
        return None


def compare(name: str, y: jax.Array, reference: torch.Tensor) -> None:
    got = torch.from_dlpack(y).double()
    error = float((got - reference).norm() / reference.norm())
    bias = float((got - reference).mean() / reference.abs().mean())
    good = error <= NORM_BOUND and abs(bias) <= BIAS_BOUND
    report.append(f"{'ok ' if good else 'BAD'} {name}: error {error:.2e}, bias {bias:+.1e}")
    say(report[-1])
    if not good:
        broken.append(report[-1])


# --- correctness -----------------------------------------------------------------------------------------------------


def check_dense(form: str, m: int, n: int, k: int, compiled: Future, kinds: tuple[str, ...], extra: bool) -> None:
    for kind in kinds:
        arrays = operands(form, kind, m, n, k)
        reference = wide(arrays[0], arrays[2], False) @ wide(arrays[1], arrays[3], True).T
        added = ()
        if extra:
            scale = float(reference.abs().mean())
            added = data("normal", (n,), 1) * scale, data("normal", (m, n), 2) * scale
            reference += sum(torch.from_dlpack(a).double() for a in added)
        y = compiled.result()(*arrays, *added)
        compare(f"gemm {form} {m}x{n}x{k} {kind}{' + bias + residual' if extra else ''}", y, reference)


def check_grouped(form: str, sizes: list[int], n: int, k: int, compiled: Future) -> None:
    m = 1000
    x, w, x_scale, w_scale = operands(form, "normal", m, n, k, len(sizes))
    y = compiled.result()(x, w, jnp.asarray(sizes, jnp.int32), x_scale, w_scale)
    rows, parts, start = wide(x, x_scale, False), [], 0
    for group, size in enumerate(sizes):
        weight = wide(w[group], None if w_scale is None else w_scale[group], True)
        parts.append(rows[start : start + size] @ weight.T)
        start += size
    compare(f"grouped {form} {sizes}", y[:start], torch.cat(parts))


def check_large_offsets(compiled: Future, m: int, n: int, k: int) -> None:
    x, w, x_scale, w_scale = operands("row", "normal", m, n, k)
    y = compiled.result()(x, w, x_scale, w_scale)
    reference = wide(x[-200:], x_scale[-200:], False) @ wide(w, w_scale, True).T
    compare(f"gemm row {m}x{n}x{k}, last rows (more than 2^31 elements)", y[-200:], reference)


def check_quantize() -> None:
    oracle = np.load(FIXTURES / "quant_oracle.npz")
    for name, power_of_two in (("f32", False), ("ue8m0", True)):
        quantise = jax.jit(functools.partial(quantize, scheme="block", power_of_two=power_of_two))
        q, scale = quantise(jnp.asarray(oracle["x"]))
        same = np.array_equal(np.asarray(q).view(np.uint8), oracle[f"fp8_b128_{name}_q"])
        same &= np.array_equal(np.asarray(scale).T, oracle[f"fp8_b128_{name}_s"])
        report.append(f"{'ok ' if same else 'BAD'} quantize 1x128 {name}: bits equal to the recorded ones: {same}")
        say(report[-1])
        if not same:
            broken.append(report[-1])


# --- time ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Timing:
    form: str
    m: int
    n: int
    k: int
    groups: int | None
    tiles: Tiles | None
    compiled: Future | None = None

    @property
    def key(self) -> tuple:
        return self.form, self.groups, self.m, self.n, self.k

    @property
    def name(self) -> str:
        t = self.tiles
        if t is None:
            return "chosen"
        return f"{t.m}x{t.n}/{t.stages}{f'/r{t.raster}' if t.raster != 8 else ''}{'/c2' if t.cluster == 2 else ''}"

    def shapes(self) -> list[tuple]:
        x, w, *scales = shapes_of(self.form, self.m, self.n, self.k, self.groups)
        sizes = () if self.groups is None else (jax.ShapeDtypeStruct((self.groups,), jnp.int32),)
        return [(x, w, *sizes, *scales)] * ROTATED

    def program(self) -> Callable:
        one = gemm if self.groups is None else grouped_gemm
        one = jax.jit(functools.partial(one, implementation="mosaic", tiles=self.tiles))
        return lambda *sets: [one(*operands) for operands in sets]


def timings() -> list[Timing]:
    found = []

    def add(form, shape, groups, *choices):
        found.extend(Timing(form, *shape, groups, tiles) for tiles in choices)

    for shape in DENSE:
        for form in ("row", "block"):
            if shape[0] == 128:
                add(form, shape, None, *SMALL)
            else:
                thorough = shape in ((8192, 7168, 2048), (8192, 4096, 7168))
                add(form, shape, None, WIDE, FIFTH, *((WIDE_16, NARROW) if thorough else ()))
        add("int8", shape, None, *((EXACT, EXACT_192) if shape[0] != 128 else SMALL[:1]))
    for (groups, *shape), _ in GROUPED.items():
        few = shape[0] // groups <= 64
        for form in ("row", "block"):
            add(form, shape, groups, *(SMALL if few else (WIDE, FIFTH)))
        add("int8", shape, groups, SMALL[0] if few else Tiles(m=128, n=256, stages=3))
    add("bf16", (8192, 4096, 7168), None, EXACT, EXACT_192)
    for shape in ((8192, 7168, 2048), (8192, 4096, 7168), (4096, 7168, 18432)):
        add("row", shape, None, PAIRED)
        add("block", shape, None, PAIRED)
    add("int8", (8192, 4096, 7168), None, dataclasses.replace(EXACT, cluster=2))
    add("row", (33792, 4096, 7168), 32, PAIRED)
    return found


def time_one(timing: Timing) -> None:
    assert timing.compiled is not None
    seconds = seconds_jax(timing.compiled.result(), random_operands(*timing.key))
    table.setdefault(timing.key, {})[timing.name] = seconds
    if timing.tiles is not None:
        timed[timing.name] = timing.tiles
    flops = 2 * timing.m * timing.n * timing.k
    say(f"{timing.key} {timing.name}: {seconds * 1e6:.1f} us, {flops / seconds / 1e12:.0f} TFLOP/s")


def time_quantize(name: str, compiled: Future, columns: int, out_columns: int) -> None:
    x = random_bits("bf16", QUANTIZED_ROWS, columns)
    seconds = seconds_jax(compiled.result(), [x])
    bandwidth = QUANTIZED_ROWS * (2 * columns + out_columns) / seconds / 1e12
    report.append(f"    {name} {QUANTIZED_ROWS} x {columns}: {seconds * 1e6:.0f} us, {bandwidth:.2f} TB/s")
    say(report[-1])


def time_torch(form: str, groups: int | None, m: int, n: int, k: int) -> None:
    """torch's kernel for the same work: row scales with the fast (single) accumulation, or bfloat16."""
    key = form, groups, m, n, k

    def numbers(*shape):
        values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        return values if form == "bf16" else values.to(torch.float8_e4m3fn)

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
    table.setdefault(key, {})["torch"] = seconds
    say(f"{key} torch: {seconds * 1e6:.1f} us")
    torch.cuda.empty_cache()


def finish(out: Path | None) -> None:
    print("\n".join(["", "== correctness", *report, "", "== TFLOP/s (decode: also TB/s of weights)"]))
    measured = []
    for (form, groups, m, n, k), row in table.items():
        flops = 2 * m * n * k
        peer = GROUPED.get((groups, m, n, k)) if groups else DENSE.get((m, n, k))
        cells = [f"{name} {flops / seconds / 1e12:.0f}" for name, seconds in row.items()]
        own = {name: seconds for name, seconds in row.items() if name != "torch"}
        line = f"{form:5} {f'{groups} x ' if groups else ''}{m}x{n}x{k}: " + ", ".join(cells)
        if own:
            name, seconds = min(own.items(), key=lambda item: item[1])
            ratio = "" if peer is None else f" = {flops / seconds / 1e12 / peer:.2f} of DeepGEMM {peer}"
            line += f" | best {name} {seconds * 1e6:.0f} us{ratio}"
            if m <= 1024:
                size = 2 if form == "bf16" else 1
                line += f", {(groups or 1) * n * k * size / seconds / 1e12:.2f} TB/s"
            if tiles := timed.get(name):
                dtype, scheme = FORMS[form]
                kind = {"dtype": jnp.dtype(dtype).name, "scheme": scheme, "groups": groups, "m": m, "n": n, "k": k}
                measured.append({**kind, "tiles": dataclasses.asdict(tiles)})
        print(line)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        times = [{"case": list(key), "seconds": row} for key, row in table.items()]
        (out / "check_gemm.json").write_text(
            json.dumps({"measured": measured, "times": times, "report": report}, indent=1)
        )
    for line in broken:
        print("BROKEN:", line)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the full figures")
    parser.add_argument("--only", choices=("correctness", "time"), help="half of the work")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, torch {torch.__version__}", flush=True)
    threading.Thread(target=watch, args=(arguments.out,), daemon=True).start()
    pool = ThreadPoolExecutor(12)

    def compile_later(function: Callable, *shapes) -> Future:
        lowered = jax.jit(function).lower(*shapes)
        progress[0] = time.monotonic()
        return pool.submit(lowered.compile)

    jobs: list[tuple[str, Callable]] = []
    # Last, because a mistake in the exchange between thread blocks would hang.
    risky: list[tuple[str, Callable]] = []

    def correctness() -> None:
        jobs.append(("quantize", check_quantize))
        for form in FORMS:
            for m, n, k, kinds in (
                (7, 320, 384, ("normal",)),
                (257, 512, 18432, ("normal", "positive", "heavy")),
                (1000, 2112, 7168, ("normal", "positive")),
            ):
                product = functools.partial(gemm, implementation="mosaic")
                arrays = shapes_of(form, m, n, k)
                compiled = compile_later(product, *arrays)
                jobs.append(
                    (f"{form} {m}x{n}x{k}", functools.partial(check_dense, form, m, n, k, compiled, kinds, False))
                )
            arrays = shapes_of(form, 1000, 320, 384, 6)
            sizes = jax.ShapeDtypeStruct((6,), jnp.int32)
            compiled = compile_later(
                functools.partial(grouped_gemm, implementation="mosaic"), *arrays[:2], sizes, *arrays[2:]
            )
            for histogram in ([170, 1, 0, 300, 65, 464], [0, 0, 1000, 0, 0, 0], [0, 3, 0, 0, 0, 0]):
                jobs.append((f"grouped {form}", functools.partial(check_grouped, form, histogram, 320, 384, compiled)))
        m, n, k = 300, 576, 1024
        arrays = shapes_of("block", m, n, k)
        added = jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((m, n), jnp.float32)

        def with_added(x, w, x_scale, w_scale, bias, residual):
            return gemm(
                x, w, x_scale, w_scale, bias=bias, residual=residual, out_dtype=jnp.float32, implementation="mosaic"
            )

        compiled = compile_later(with_added, *arrays, *added)
        jobs.append(("bias", functools.partial(check_dense, "block", m, n, k, compiled, ("normal",), True)))
        m, n, k = 65544, 36864, 128
        arrays = shapes_of("row", m, n, k)
        compiled = compile_later(functools.partial(gemm, implementation="mosaic"), *arrays)
        jobs.append(("large", functools.partial(check_large_offsets, compiled, m, n, k)))
        arrays = shapes_of("block", 257, 512, 18432)
        compiled = compile_later(functools.partial(gemm, implementation="mosaic", tiles=PAIRED), *arrays)
        job = functools.partial(check_dense, "block", 257, 512, 18432, compiled, ("normal", "positive"), False)
        risky.append(("cluster", job))

    def quantisation() -> None:
        weight = jnp.ones(7168, jnp.bfloat16)
        for form, (dtype, scheme) in list(FORMS.items())[:3]:
            kind = {"scheme": scheme, "dtype": dtype}
            for name, function, columns, out_columns in (
                ("quantize", functools.partial(quantize, **kind), 7168, 7168),
                ("rms_norm_quantize", lambda x, kind=kind: rms_norm_quantize(x, weight, 1e-6, **kind), 7168, 7168),
                ("swiglu_quantize", functools.partial(swiglu_quantize, **kind), 4096, 2048),
            ):
                compiled = compile_later(function, jax.ShapeDtypeStruct((QUANTIZED_ROWS, columns), jnp.bfloat16))
                name = f"{name} {form}"
                jobs.append((name, functools.partial(time_quantize, name, compiled, columns, out_columns)))

    def run_jobs() -> None:
        for name, job in jobs:
            guarded(name, job)
        jobs.clear()

    if arguments.only != "time":
        guarded("lowering of the checks", correctness)
        run_jobs()
    if arguments.only != "correctness":
        guarded("lowering of quantisation", quantisation)
        wanted = timings()

        def lower(timing: Timing) -> None:
            timing.compiled = compile_later(timing.program(), *timing.shapes())
            where = risky if timing.tiles is not None and timing.tiles.cluster > 1 else jobs
            where.append((f"{timing.key} {timing.name}", functools.partial(time_one, timing)))

        for timing in wanted:
            guarded(f"lowering {timing.key} {timing.name}", functools.partial(lower, timing))
        for timing in {t.key: t for t in wanted if t.form == "row" or t.form == "bf16"}.values():
            guarded(f"torch {timing.key}", functools.partial(time_torch, *timing.key))
        run_jobs()
    jobs.extend(risky)
    run_jobs()
    finish(arguments.out)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
