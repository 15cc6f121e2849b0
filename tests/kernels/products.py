"""Operands of matrix products for tests, and the float64 answer."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from jaxinfer.kernels import tiles
from jaxinfer.kernels.quantize import quantize, quantize_weight

E4M3 = jnp.float8_e4m3fn
FORMS = {
    "fp8 row": (E4M3, "row"),
    "fp8 block": (E4M3, "block"),
    "int8": (jnp.int8, "row"),
    "bf16": (jnp.bfloat16, None),
}
TWO_PROCESSORS = dataclasses.replace(tiles.device(), multiprocessors=2)
"""A small device for the interpreter, so that each thread block has several tiles."""


_quantize = jax.jit(quantize, static_argnames=("scheme", "dtype"))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize_weights(w, scheme, dtype):
    return jax.vmap(functools.partial(quantize_weight, scheme=scheme, dtype=dtype))(w)


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
        x, x_scale = _quantize(x, scheme=scheme, dtype=dtype)
        w, w_scale = _quantize_weights(weights, scheme, dtype)
    if groups is None:
        w, w_scale = w[0], None if w_scale is None else w_scale[0]
    return x, w, x_scale, w_scale


def expected(x, w, x_scale, w_scale) -> np.ndarray:
    """`x @ w.T` of the dequantised operands in float64."""
    return _wide(x, x_scale, 1) @ _wide(w, w_scale, 128).T


def _wide(q, scale, block_rows: int) -> np.ndarray:
    """The float64 numbers of a quantised array, its blocks `block_rows` rows high."""
    values = np.asarray(q.astype(jnp.float32), np.float64)
    if scale is None:
        return values
    scale = np.asarray(scale, np.float64)
    if scale.ndim == 1:
        return values * scale[:, None]
    scale = scale.T if block_rows == 1 else np.repeat(scale, block_rows, 0)[: len(values)]
    return values * np.repeat(scale, 128, 1)


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
