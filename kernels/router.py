"""Logits of a router: which experts a token goes to is decided in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mosaic import router as mosaic
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.kernels.tiles import device


def router_logits(
    x: Float[Array, "T d"],
    w: Float[Array, "E d"],
    norm: Float[Array, " d"],
    eps: float,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "T E"]:
    """`rms_norm(x, norm, eps) @ w.T` in float32.

    Of the reference every product and sum is rounded to float32.  Mosaic multiplies on tensor cores, three products of
    float16 for one: 2e-7 of the logits away from float64 at d = 2048, where float32 is 3e-7 away, also with numbers
    that float16 does not have.  Its norm becomes part of the weight, and a factor of each row.

    Args: `x [T, d]` and `w [E, d]` float32, `norm [d]` of any floating type; Mosaic wants d a multiple of 32.
    Returns: float32 `[T, E]`.
    Raises: ValueError if Mosaic is asked for and cannot take them.
    """
    if dispatch.choose("router_logits", implementation, mosaic.reason_against(x, w)) == "mosaic":
        return mosaic.router_logits(x, w, norm, eps, multiprocessors=device().multiprocessors)
    return jnp.einsum("td,ed->te", rms_norm(x, norm, eps), w, precision=lax.Precision.HIGHEST)
