"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467).

    Args: `x [..., d]`, `weight [d]`.  Computed in float32 and rounded once, to the type of `x`.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
