"""Products of activations and weights, quantised or not, and what makes activations for the product that reads them."""

import jax
import jax.numpy as jnp

from jaxinfer.kernels.norm import rms_norm
from jaxinfer.kernels.quantized import Activation, Quantized, Weight, product, quantize_for, rms_norm_for, swiglu_for


def einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, x, weight)`, accumulated in float32 and rounded once, to the type of `x`."""
    return jnp.einsum(equation, x, weight, preferred_element_type=x.dtype)


def linear(x: Activation, weight: Weight, out_dtype) -> jax.Array:
    """`x [T, K]` times a weight `[..., K]` (its columns taken together): `[T, N]`.

    Accumulated in float32 and rounded once, to `out_dtype`: float32 for what is added to the residual stream.  The
    product itself rounds: on a GPU, a float32 result would go through memory before XLA rounds it.
    """
    if isinstance(x, Quantized) and isinstance(weight, Quantized):
        return product(x, weight, out_dtype)
    assert not isinstance(x, Quantized) and not isinstance(weight, Quantized)
    matrix = weight.reshape(-1, x.shape[1])
    return jnp.einsum("tk,nk->tn", x, matrix, preferred_element_type=out_dtype)


def read_by(reader: Weight, x: jax.Array, dtype: jnp.dtype) -> Activation:
    """`x [T, K]` in the form that `reader` is multiplied with; `dtype` if it is not quantised."""
    return quantize_for(reader, x) if isinstance(reader, Quantized) else x.astype(dtype)


def normalised(reader: Weight, x: jax.Array, norm: jax.Array, eps: float, dtype: jnp.dtype) -> Activation:
    """The normalised rows of `x [T, K]` for `reader`, and all weights of as many columns."""
    return rms_norm_for(reader, x, norm, eps) if isinstance(reader, Quantized) else rms_norm(x, norm, eps).astype(dtype)


def swiglu(x: Activation, gate_up: Weight, reader: Weight, dtype: jnp.dtype) -> Activation:
    """`silu(gate x) * up x` (arXiv 2002.05202) for `reader`.

    `gate_up` has the gate's rows first.  Where the result is quantised, the two projections are rounded to `dtype`
    before; else the result is rounded alone.
    """
    if isinstance(reader, Quantized):
        return swiglu_for(reader, linear(x, gate_up, dtype))
    gate, up = jnp.split(linear(x, gate_up, jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(dtype)
