"""Operands on a GPU for checks and timings of matrix products, made and judged by torch; and clocks for both."""

import functools
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from jax._src.lib import mosaic_gpu

from jaxinfer.kernels.quantize import quantize, quantize_weight

E4M3 = jnp.float8_e4m3fn
FORMS = {"row": (E4M3, "row"), "block": (E4M3, "block"), "int8": (jnp.int8, "row"), "bf16": (jnp.bfloat16, None)}
ROTATED, SAMPLES = 4, 24
L2_BYTES = 60e6


def data(kind: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "positive":
        values = torch.rand(shape, device="cuda", generator=generator) * 0.9 + 0.1
    else:
        values = torch.randn(shape, device="cuda", generator=generator)
        values = values * values.abs() ** 3 if kind == "heavy" else values
    torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(values)


@functools.partial(jax.jit, static_argnums=0)
def prepare(form: str, x: jax.Array, w: jax.Array) -> tuple:
    """Float32 `x [m, k]` and `w [..., n, k]` as operands of a product."""
    dtype, scheme = FORMS[form]
    if scheme is None:
        return x.astype(dtype), w.astype(dtype), None, None
    x, x_scale = quantize(x, scheme=scheme, dtype=dtype)
    of_weight = functools.partial(quantize_weight, scheme=scheme, dtype=dtype)
    w, w_scale = of_weight(w) if w.ndim == 2 else jax.vmap(of_weight)(w)
    return x, w, x_scale, w_scale


def operands(form: str, kind: str, m: int, n: int, k: int, groups: int | None = None) -> tuple:
    front = () if groups is None else (groups,)
    return prepare(form, data(kind, (m, k), m + k), data(kind, (*front, n, k), n + k))


def shapes_of(form: str, m: int, n: int, k: int, groups: int | None = None) -> tuple:
    front = () if groups is None else (groups,)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, k), (*front, n, k)))
    return jax.eval_shape(functools.partial(prepare, form), x, w)


def wide(q: jax.Array, scale: jax.Array | None, weight: bool) -> torch.Tensor:
    """The dequantised operand in float64, on the GPU."""
    if scale is None:
        return torch.from_dlpack(q).double()
    values = torch.from_dlpack(q.astype(jnp.float32)).double()
    scales = torch.from_dlpack(scale).double()
    if scales.ndim == 1:
        return values * scales[:, None]
    if weight:
        spread = scales.repeat_interleave(128, 0)[: values.shape[0]]
        return values * spread.repeat_interleave(128, 1)
    return values * scales.T.repeat_interleave(128, 1)


def random_bits(form: str, *shape: int) -> jax.Array:
    """Numbers of a normal distribution in the type of a form, made by torch: nothing to compile."""
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if form == "int8":
        values = (values * 30).clamp(-127, 127).to(torch.int8)
    elif form != "bf16":
        values = values.to(torch.float8_e4m3fn).view(torch.int8)
    torch.cuda.synchronize()
    values = jax.dlpack.from_dlpack(values)
    return values if form in ("int8", "bf16") else jax.lax.bitcast_convert_type(values, E4M3)


@functools.lru_cache(maxsize=1)
def random_operands(form: str, groups: int | None, m: int, n: int, k: int, unit: int = 128) -> list[tuple]:
    """Several sets of operands for timing; a weight that fills the L2 is shared by all.

    Sizes of groups are multiples of `unit`, as DeepGEMM's are of 128.
    """
    front = () if groups is None else (groups,)
    w, found = None, []
    for _ in range(ROTATED):
        if w is None or w.nbytes < L2_BYTES:
            w = random_bits(form, *front, n, k)
        scales = [
            None if shape is None else jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape.shape), jnp.float32)
            for shape in shapes_of(form, m, n, k, groups)[2:]
        ]
        found.append((random_bits(form, m, k), w, *scales))
    torch.cuda.empty_cache()
    if groups is None:
        return found
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(unit * rng.multinomial(m // unit, rng.dirichlet(np.full(groups, 50.0))), jnp.int32)
    return [(x, w, sizes, *scales) for x, w, *scales in found]


def seconds_jax(function: Callable, sets: list, kernel: str) -> tuple[float, float]:
    """Median seconds of a product: of its kernel alone, and with the small kernels around it.

    The time of the kernels by CUPTI; by the host's clock, for both figures, where CUPTI is not to be had.

    Args:
        function: a compiled program of one product for every set of operands.
        kernel: part of the name of the kernel.
    """
    jax.block_until_ready(function(*sets))
    extension = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    try:
        extension._cupti_init()
    except RuntimeError as error:
        print("no CUPTI:", error)
        return (seconds := _seconds_of_host(function, sets)), seconds
    try:
        for _ in range(SAMPLES // 4):
            jax.block_until_ready([function(*sets) for _ in range(4)])
    finally:
        timings = extension._cupti_get_timings(True)
    if not timings or len(timings) % SAMPLES:
        print("CUPTI saw", len(timings), "kernels in", SAMPLES, "runs")
        return (seconds := _seconds_of_host(function, sets)), seconds
    size = len(timings) // SAMPLES
    samples = [timings[i * size : (i + 1) * size] for i in range(SAMPLES)]
    alone = [sum(t for name, t in sample if kernel in name) for sample in samples]
    both = [sum(t for _, t in sample) for sample in samples]
    alone, both = (float(np.median(times)) / 1e3 / len(sets) for times in (alone, both))
    return alone, both


def _seconds_of_host(function: Callable, sets: list) -> float:
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        outs = [function(*sets) for _ in range(4)]
        jax.block_until_ready(outs)
        samples.append((time.perf_counter() - begin) / (4 * len(sets)))
    return float(np.median(samples))


def seconds_torch(function: Callable, sets: list[tuple]) -> float:
    """Median seconds of a call, a graph of one call for every set replayed."""
    for arguments in sets:
        function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            function(*arguments)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(SAMPLES + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
    return float(np.median(times)) / 1e3 / len(sets)
