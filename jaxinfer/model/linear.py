"""The one product of activations and weights."""

import jax
import jax.numpy as jnp


def linear(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, x, weight)`, accumulated in float32 and rounded once, to the type of `x`."""
    return linear_f32(equation, x, weight).astype(x.dtype)


def linear_f32(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(equation, x, weight)`, accumulated in float32 and not rounded: what is added to the residual stream."""
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)
