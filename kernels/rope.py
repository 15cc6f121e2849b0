"""Rotary position embedding from tables."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def apply_rope(
    x: Float[Array, "*rows dim"], cos: Float[Array, "*#rows pairs"], sin: Float[Array, "*#rows pairs"]
) -> Float[Array, "*rows dim"]:
    """Rotates the pairs `(x[2i], x[2i+1])` of the last dimension (arXiv 2104.09864, interleaved as DeepSeek stores it).

    Args: `x [..., 2n]`; `cos`, `sin` float32, broadcastable to `[..., n]`.  Computed in float32, returned in the type
    of `x`.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)
