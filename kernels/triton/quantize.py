"""Quantisation through jax-triton: one pass over memory, a program for each row.

A row lies in the registers as `[groups, width]` with a scale for each group: the row as a whole, or each block of it.
Both sizes are powers of two, so the tail of most rows is masked.

Imported only where the kernels are asked for, see `jaxinfer.kernels.quantize`: it needs jax_triton and triton.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import numpy as np
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton import jit, next_power_of_2  # pyright: ignore[reportAttributeAccessIssue]

from jaxinfer.kernels.reference.quantize import AMAX_FLOOR, BLOCK, largest

_THREAD = 32
"""Numbers of a row in the registers of a thread, four loads of 16 bytes in bfloat16; more in very long rows."""
_MOST_WARPS = 16


def quantize(x, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.quantize`."""
    return _rows(_quantize, (x,), x.shape, scheme, dtype, power_of_two)


def rms_norm_quantize(x, weight, eps, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.rms_norm_quantize`."""
    return _rows(_rms_norm_quantize, (x, weight), x.shape, scheme, dtype, power_of_two, EPS=float(eps))


def swiglu_quantize(gate_up, count=None, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.swiglu_quantize`."""
    rows, columns = gate_up.shape
    # On the device, where it may have been computed: a scalar argument would have to be known to the host.
    count = np.full(1, rows, np.int32) if count is None else count[None]
    return _rows(_swiglu_quantize, (gate_up, count), (rows, columns // 2), scheme, dtype, power_of_two)


def _rows(kernel, operands, shape, scheme, dtype, power_of_two, **constants):
    rows, columns = shape
    groups, width = (columns // BLOCK, BLOCK) if scheme == "block" else (1, columns)
    groups, padded = next_power_of_2(groups), next_power_of_2(width)
    warps = min(max(groups * padded // (32 * _THREAD), 1), _MOST_WARPS)
    return jax_triton.triton_call(
        *operands,
        rows,
        kernel=kernel,
        out_shape=(
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct((columns // BLOCK, rows) if scheme == "block" else (rows,), jnp.float32),
        ),
        grid=(rows,),
        name=kernel.__name__.removeprefix("_"),
        num_warps=warps,
        COLUMNS=columns,
        GROUPS=groups,
        WIDTH=padded,
        LARGEST=largest(dtype),
        FLOOR=AMAX_FLOOR,
        POWER_OF_TWO=power_of_two,
        **constants,
    )


# Triton reads the source of its functions; `no_type_check` keeps run-time type checkers from wrapping them.


@jit
@no_type_check
def _larger(a, b):
    """NaN if one is, as `jnp.max` has it."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
@no_type_check
def _offsets(GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@jit
@no_type_check
def _divide(x, scale, INTEGER: tl.constexpr):
    """`x / scale` rounded as a division is, for the price of three products; see `kernels/mosaic/quantize.py`.

    Where the scale is not finite, or 0, the product with the reciprocal is what a division gives; for integers 0.
    """
    finite = (scale > 0) & (scale < float("inf"))
    reciprocal = tl.broadcast_to(tl.div_rn(1.0, scale)[:, None], x.shape)
    quotient = x * reciprocal
    # In this order -0 stays -0.  Triton's -x is 0 - x, which makes a positive zero of both.
    remainder = tl.fma(quotient, tl.broadcast_to(scale[:, None], x.shape), x * -1.0)
    exact = tl.fma(remainder, reciprocal * -1.0, quotient)
    return tl.where(finite[:, None], exact, 0.0 if INTEGER else quotient)


@jit
@no_type_check
def _sigmoid(x):
    """`1 / (1 + exp(-x))` of the approximate instructions, without the steps that keep subnormal numbers."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        ex2.approx.ftz.f32 t, $1;
        add.ftz.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=r,r",
        [x * -1.4426950408889634],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
@no_type_check
def _write(
    x,
    row,
    rows,
    q_ptr,
    scale_ptr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Quantises the row `x [GROUPS, WIDTH]` (float32, 0 beyond its end)."""
    amax = tl.maximum(tl.reduce(tl.abs(x), 1, _larger), FLOOR, propagate_nan=tl.PropagateNan.ALL)
    scale = amax * (1 / LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    group = tl.arange(0, GROUPS)
    tl.store(scale_ptr + group.to(tl.int64) * rows + row, scale, mask=group * WIDTH < COLUMNS)

    if q_ptr.dtype.element_ty == tl.int8:
        # In the sum with 1.5 * 2^23 nothing is left below the point: it is rounded to nearest, ties to even, and its
        # last byte is the integer.  No quotient is beyond the largest by more than its own rounding.
        q = (_divide(x, scale, True) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        # cvt.rn.satfinite.e4m3x2.f32: to nearest even, saturated, NaN stays NaN.
        q = _divide(x, scale, False).to(q_ptr.dtype.element_ty)
    offsets = _offsets(GROUPS, WIDTH)
    tl.store(q_ptr + row * COLUMNS + offsets, q, mask=offsets < COLUMNS)


@jit
@no_type_check
def _quantize(
    x_ptr,
    rows,
    q_ptr,
    scale_ptr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = _offsets(GROUPS, WIDTH)
    x = tl.load(x_ptr + row * COLUMNS + offsets, mask=offsets < COLUMNS, other=0.0).to(tl.float32)
    _write(x, row, rows, q_ptr, scale_ptr, COLUMNS, GROUPS, WIDTH, LARGEST, FLOOR, POWER_OF_TWO)


@jit
@no_type_check
def _rms_norm_quantize(
    x_ptr,
    weight_ptr,
    rows,
    q_ptr,
    scale_ptr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The order of the sum and the reciprocal root are not XLA's: the norm may differ in its last bits."""
    row = tl.program_id(0).to(tl.int64)
    offsets = _offsets(GROUPS, WIDTH)
    x = tl.load(x_ptr + row * COLUMNS + offsets, mask=offsets < COLUMNS, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offsets, mask=offsets < COLUMNS, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, 1), 0) * (1 / COLUMNS)
    x = x * tl.rsqrt(mean + EPS) * weight
    _write(x, row, rows, q_ptr, scale_ptr, COLUMNS, GROUPS, WIDTH, LARGEST, FLOOR, POWER_OF_TWO)


@jit
@no_type_check
def _swiglu_quantize(
    gate_up_ptr,
    count_ptr,
    rows,
    q_ptr,
    scale_ptr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The sigmoid may differ from the reference's in its last bits."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count_ptr):
        offsets = _offsets(GROUPS, WIDTH)
        gate_ptr = gate_up_ptr + row * (2 * COLUMNS) + offsets
        gate = tl.load(gate_ptr, mask=offsets < COLUMNS, other=0.0).to(tl.float32)
        up = tl.load(gate_ptr + COLUMNS, mask=offsets < COLUMNS, other=0.0).to(tl.float32)
        x = gate * _sigmoid(gate) * up
        _write(x, row, rows, q_ptr, scale_ptr, COLUMNS, GROUPS, WIDTH, LARGEST, FLOOR, POWER_OF_TWO)
