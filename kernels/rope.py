"""Rotary position embedding from tables."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mosaic import rope as mosaic


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


def rope(
    x: Float[Array, "T H dim"],
    cos: Float[Array, "T pairs"],
    sin: Float[Array, "T pairs"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "T H dim"]:
    """Queries whose last `2 pairs` numbers are rotated (see `apply_rope`), the others as they are.

    The Mosaic kernel works in place where nothing else reads `x`: it moves a third of what writing all queries of
    128 + 64 numbers anew does.

    Args:
        x: `[T, H, dim]`, of any float type.
        cos, sin: float32, of each token's position.
        implementation: None chooses (see `dispatch`).

    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    if dispatch.choose("rope", implementation, mosaic.reason_against(x, cos.shape[1])) == "mosaic":
        return mosaic.rope(x, cos, sin)
    start = x.shape[2] - 2 * cos.shape[1]
    rotated = apply_rope(x[..., start:], cos[:, None], sin[:, None])
    return lax.concatenate((x[..., :start], rotated), dimension=2)
