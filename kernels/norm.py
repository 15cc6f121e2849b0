"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*rows d"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467).

    Args: `x [..., d]`, `weight [d]`.  Computed in float32 and rounded once, to the type of `x`.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
