"""Operands of matrix products for tests, and the float64 answer."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from jaxinfer.kernels import tiles
from jaxinfer.kernels.quantize import dequantize, dequantize_weight, quantize, quantize_weight

E4M3 = jnp.float8_e4m3fn
FORMS = {
    "fp8 row": (E4M3, "row"),
    "fp8 block": (E4M3, "block"),
    "int8": (jnp.int8, "row"),
    "bf16": (jnp.bfloat16, None),
}
TWO_PROCESSORS = dataclasses.replace(tiles.device(), multiprocessors=2)
"""A small device for the interpreter, so that each thread block has several tiles."""


def operands(form: str, m: int, n: int, k: int, groups: int | None = None) -> tuple:
    """`x, w, x_scale, w_scale` of random numbers, rows and channels of different sizes."""
    rng = np.random.default_rng(m + n + k)
    dtype, scheme = FORMS[form]
    x = jnp.asarray(rng.normal(size=(m, k)) * rng.uniform(0.1, 10, size=(m, 1)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(groups or 1, n, k)) * rng.uniform(0.1, 10, size=(n, 1)), jnp.float32)
    if scheme is None:
        x_scale, w_scale = None, None
        x, w = x.astype(dtype), weights.astype(dtype)
    else:
        x, x_scale = quantize(x, scheme=scheme, dtype=dtype)
        pairs = [quantize_weight(w, scheme=scheme, dtype=dtype) for w in weights]
        w, w_scale = jnp.stack([q for q, _ in pairs]), jnp.stack([scale for _, scale in pairs])
    if groups is None:
        w, w_scale = w[0], None if w_scale is None else w_scale[0]
    return x, w, x_scale, w_scale


def expected(x, w, x_scale, w_scale) -> np.ndarray:
    """`x @ w.T` of the dequantised operands in float64."""
    x = x.astype(jnp.float32) if x_scale is None else dequantize(x, x_scale, jnp.float32)
    w = w.astype(jnp.float32) if w_scale is None else dequantize_weight(w, w_scale, jnp.float32)
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def error(y, reference: np.ndarray) -> float:
    """`||y - reference|| / ||reference||`; NaN if y has one."""
    return float(np.linalg.norm(np.asarray(y, np.float64) - reference) / np.linalg.norm(reference))


@contextmanager
def interpreted(capsys: pytest.CaptureFixture) -> Iterator[None]:
    """Runs Mosaic kernels on the CPU and fails if two of their threads race."""
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    out = capsys.readouterr().out
    assert "RACE" not in out, out


def lower_for_cuda(function: Callable, *shapes: jax.ShapeDtypeStruct | None) -> str:
    """Lowers for a GPU that need not be there: layouts, copies and shared memory are checked on the way."""
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def shapes(form: str, m: int, n: int, k: int, groups: int | None = None) -> tuple:
    """`x, w, x_scale, w_scale` as `operands` gives them, without memory."""
    dtype, scheme = FORMS[form]
    front = () if groups is None else (groups,)
    scales: dict = {
        "row": ((m,), (*front, n)),
        "block": ((k // 128, m), (*front, -(-n // 128), k // 128)),
    }
    x_scale, w_scale = (
        (None, None) if scheme is None else (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scales[scheme])
    )
    return jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((*front, n, k), dtype), x_scale, w_scale
