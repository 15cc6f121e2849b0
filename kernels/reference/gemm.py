"""`gemm` in jnp, float32 inside; int8 exact in int32."""

import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.reference.quantize import dequantize, dequantize_weight


def gemm(x, w, x_scale, w_scale, *, bias, residual, out_dtype):
    """See `jaxinfer.kernels.gemm.gemm`."""
    if x.dtype == jnp.int8:
        out = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)
        out = out * x_scale[:, None] * w_scale
    else:
        wide = [operand.astype(jnp.float32) for operand in (x, w)]
        if x_scale is not None:
            wide = [dequantize(x, x_scale, jnp.float32), dequantize_weight(w, w_scale, jnp.float32)]
        out = jnp.einsum("mk,nk->mn", *wide, precision=lax.Precision.HIGHEST)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(out_dtype)
