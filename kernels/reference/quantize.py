"""`quantize` and its fused and inverse forms in jnp, float32 inside.

On a GPU, XLA makes one or two fused kernels of each: the row forms read their input once when it fits the registers.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
AMAX_FLOOR = 1e-4
"""Smallest absolute maximum a scale is made for, as DeepSeek's published inference code has it for activations."""


def largest(dtype) -> float:
    """The largest magnitude that a quantised number takes: 448 of e4m3, 127 of int8 (symmetric, -128 is not used)."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def scale_of(amax: jax.Array, dtype, power_of_two: bool) -> jax.Array:
    """The scale of values up to `amax` (float32).

    The product with the rounded reciprocal, as the recorded patterns have it and as XLA computes a division by a
    constant anyway; half of all quotients differ from it in the last bit.  A power of two is the smallest that is not
    below, found from the bits of the float: exact where a logarithm rounds.
    """
    scale = amax * jnp.float32(1 / largest(dtype))
    if not power_of_two:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = (bits >> 23) & 0xFF
    exponent = jnp.where((bits & 0x7FFFFF) != 0, exponent + 1, exponent)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def cast(x: jax.Array, dtype) -> jax.Array:
    """Rounds to nearest, ties to even, and saturates; NaN stays NaN in e4m3 and becomes 0 in int8."""
    bound = largest(dtype)
    x = jnp.clip(x, -bound, bound)
    return jnp.round(x).astype(dtype) if jnp.dtype(dtype) == jnp.int8 else x.astype(dtype)


def quantize(x, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.quantize`."""
    x = x.astype(jnp.float32)
    if scheme == "row":
        amax = jnp.maximum(jnp.max(jnp.abs(x), axis=1), AMAX_FLOOR)
        scale = scale_of(amax, dtype, power_of_two)
        return cast(x / scale[:, None], dtype), scale
    blocks = x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=2), AMAX_FLOOR)
    scale = scale_of(amax, dtype, power_of_two)
    return cast(blocks / scale[..., None], dtype).reshape(x.shape), scale.T


def rms_norm_quantize(x, weight, eps, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.rms_norm_quantize`."""
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True) + eps) * weight.astype(jnp.float32)
    return quantize(x, scheme=scheme, dtype=dtype, power_of_two=power_of_two)


def swiglu_quantize(gate_up, count=None, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.swiglu_quantize`; rows beyond `count` are quantised like the others."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return quantize(jax.nn.silu(gate) * up, scheme=scheme, dtype=dtype, power_of_two=power_of_two)


def dequantize(q, scale, dtype):
    """See `jaxinfer.kernels.quantize.dequantize`."""
    q = q.astype(jnp.float32)
    if scale.ndim == 1:
        return (q * scale[:, None]).astype(dtype)
    blocks = q.reshape(q.shape[0], q.shape[1] // BLOCK, BLOCK)
    return (blocks * scale.T[..., None]).reshape(q.shape).astype(dtype)


def quantize_weight(w, *, scheme, dtype, power_of_two):
    """See `jaxinfer.kernels.quantize.quantize_weight`."""
    if scheme == "row":
        return quantize(w, scheme="row", dtype=dtype, power_of_two=power_of_two)
    rows, columns = w.shape
    padded = jnp.pad(w.astype(jnp.float32), ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=(1, 3)), AMAX_FLOOR)
    scale = scale_of(amax, dtype, power_of_two)
    q = cast(blocks / scale[:, None, :, None], dtype).reshape(padded.shape)
    return q[:rows, :columns], scale


def dequantize_weight(q, scale, dtype):
    """See `jaxinfer.kernels.quantize.dequantize_weight`."""
    if scale.ndim == 1:
        return dequantize(q, scale, dtype)
    rows, columns = q.shape
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, 0), BLOCK, 1)[:rows, :columns]
    return (q.astype(jnp.float32) * spread).astype(dtype)
