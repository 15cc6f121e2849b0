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

    The reference multiplies and adds in float32.  Mosaic multiplies on tensor cores, three products of float16 for one,
    and takes numbers of any size that float32 has.  Away from float64, relative, in the interpreter: 1.5e-7 at d = 256,
    2.0e-7 at 2,048, 3.0e-7 at 7,168; the reference on a CPU 2.9e-7, 3.8e-7 and 3.7e-7.

    Args: `x [T, d]` and `w [E, d]` float32, `norm [d]` of any floating type; Mosaic wants d a multiple of 32 and
    256 rows or more.
    Returns: float32 `[T, E]`.
    Raises: ValueError if Mosaic is asked for and cannot take them.
    """
    if dispatch.choose("router_logits", implementation, mosaic.reason_against(x, w)) == "mosaic":
        return mosaic.router_logits(x, w, norm, eps, multiprocessors=device().multiprocessors)
    return jnp.einsum("td,ed->te", rms_norm(x, norm, eps), w, precision=lax.Precision.HIGHEST)
