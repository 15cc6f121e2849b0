"""Quantisation of activations and weights to e4m3 or int8, alone and fused with what stands before it.

Two schemes.  `row`: one float32 scale for each row (of activations: a token; of a weight `[N, K]`: an output channel).
`block`: one for 128 numbers of a row (activations) or for 128x128 numbers (weights), as released checkpoints have them.
The scales of activation blocks are `[K / 128, M]`, rows last, so that a matrix product reads those of a tile at once.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mosaic import quantize as mosaic
from jaxinfer.kernels.reference import quantize as reference

Scheme = Literal["row", "block"]
BLOCK = reference.BLOCK
_MOST_OF_TRITON = 32768
"""Numbers of a row that the registers of a program hold."""


def quantize(
    x: jax.Array,
    *,
    scheme: Scheme = "row",
    dtype=jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x / scale`, rounded to nearest even and saturated; `scale = max(|x|, 1e-4) * (1 / largest)`.

    The recipe of DeepSeek's published inference code (arXiv 2412.19437, section 3.3.2): 448 is the largest e4m3, and
    with `power_of_two` the scale is rounded up to a power of two (the ue8m0 of V3.1 and later).

    Args:
        x: `[M, K]`; K a multiple of 128 for blocks.
        scheme: `row` or `block`.
        dtype: `float8_e4m3fn`, or `int8` (rows only).
        implementation: None chooses (see `dispatch`).

    Returns: `q [M, K]` of `dtype` and float32 scales, `[M]` for rows and `[K / 128, M]` for blocks.
    Raises: ValueError if shape, scheme and dtype do not fit together, or a kernel is asked for that cannot take them or
        needs what is not installed.
    """
    check(x.shape, scheme, dtype)
    return _implementation("quantize", implementation, x, x.shape[1]).quantize(
        x, scheme=scheme, dtype=dtype, power_of_two=power_of_two
    )


def rms_norm_quantize(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    scheme: Scheme = "row",
    dtype=jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`quantize(rms_norm(x, weight, eps))` with the norm kept in float32: one rounding fewer than the two steps.

    Args: `x [M, K]`, `weight [K]`.  Returns and raises what `quantize` does.
    """
    check(x.shape, scheme, dtype)
    chosen = _implementation("rms_norm_quantize", implementation, x, x.shape[1])
    return chosen.rms_norm_quantize(x, weight, eps, scheme=scheme, dtype=dtype, power_of_two=power_of_two)


def swiglu_quantize(
    gate_up: jax.Array,
    count: jax.Array | None = None,
    *,
    scheme: Scheme = "row",
    dtype=jnp.float8_e4m3fn,
    power_of_two: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`quantize(silu(gate) * up)` in float32 (arXiv 2002.05202).

    Args: `gate_up [M, 2 I]`, gate first; `count`, int32: only so many rows are wanted, the others may become anything.
    Returns `q [M, I]` and the scales that `quantize` gives; raises what it does.
    """
    check((gate_up.shape[0], gate_up.shape[1] // 2), scheme, dtype)
    chosen = _implementation("swiglu_quantize", implementation, gate_up, gate_up.shape[1] // 2)
    return chosen.swiglu_quantize(gate_up, count, scheme=scheme, dtype=dtype, power_of_two=power_of_two)


def _implementation(op: str, implementation: dispatch.Implementation | None, x: jax.Array, columns: int):
    """The module that quantises rows of `columns` numbers made of those of `x`."""
    against: dict[dispatch.Kernel, str | None] = {
        "mosaic": mosaic.reason_against(x.shape[0], columns, x.dtype),
        "triton": _reason_against_triton(x.shape[0], columns, x.dtype),
    }
    chosen = dispatch.choose(op, implementation, against)
    if chosen == "triton":
        from jaxinfer.kernels.triton import quantize as triton  # imports what need not be installed

        return triton
    return mosaic if chosen == "mosaic" else reference


def _reason_against_triton(rows: int, columns: int, dtype) -> str | None:
    """Why the Triton kernel cannot quantise `[rows, columns]`, None if it can."""
    if rows == 0:
        return "there are no rows"
    if not 0 < columns <= _MOST_OF_TRITON:
        return f"K = {columns} is not between 1 and {_MOST_OF_TRITON}"
    return None if dtype in (jnp.bfloat16, jnp.float32) else f"the numbers are {dtype}"


def dequantize(q: jax.Array, scale: jax.Array, dtype=jnp.bfloat16) -> jax.Array:
    """`q * scale`, rounded once.  Args: `q [M, K]`, scales as `quantize` gives them."""
    return reference.dequantize(q, scale, dtype)


def quantize_weight(
    w: jax.Array, *, scheme: Scheme = "row", dtype=jnp.float8_e4m3fn, power_of_two: bool = False
) -> tuple[jax.Array, jax.Array]:
    """A weight `[N, K]` for `gemm`: scales `[N]` for rows, `[ceil(N / 128), ceil(K / 128)]` for blocks.

    Raises: ValueError for int8 blocks, which no kernel takes.
    """
    check((w.shape[0], BLOCK), scheme, dtype)
    return reference.quantize_weight(w, scheme=scheme, dtype=dtype, power_of_two=power_of_two)


def dequantize_weight(q: jax.Array, scale: jax.Array, dtype=jnp.bfloat16) -> jax.Array:
    """`q * scale` of a weight `[N, K]` with scales as `quantize_weight` or a checkpoint gives them, rounded once."""
    return reference.dequantize_weight(q, scale, dtype)


def check(shape: tuple[int, ...], scheme: str, dtype) -> None:
    """Raises ValueError unless numbers of this shape can be quantised so."""
    if scheme not in ("row", "block"):
        raise ValueError(f"expected scheme 'row' or 'block', got {scheme!r}")
    if jnp.dtype(dtype) not in (jnp.float8_e4m3fn, jnp.int8):
        raise ValueError(f"expected dtype float8_e4m3fn or int8, got {jnp.dtype(dtype)}")
    if scheme == "block" and jnp.dtype(dtype) == jnp.int8:
        raise ValueError("expected scheme 'row' for int8, got 'block'")
    if len(shape) != 2 or (scheme == "block" and shape[1] % BLOCK):
        raise ValueError(f"expected [M, K]{' with K a multiple of 128' if scheme == 'block' else ''}, got {shape}")
