"""`grouped_gemm` in jnp: one group's product after the other, float32 inside; int8 exact in int32."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.reference.gemm import gemm


def grouped_gemm(x, w, group_sizes, x_scale, w_scale, *, first_group: jax.Array | int = 0, out_dtype):
    """See `jaxinfer.kernels.grouped_gemm.grouped_gemm`.  A group that is not empty costs a product of all rows."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])

    def group(index, out):
        def product():
            scale = None if w_scale is None else w_scale[first_group + index]
            y = gemm(x, w[first_group + index], x_scale, scale, bias=None, residual=None, out_dtype=out_dtype)
            mine = (row >= ends[index] - group_sizes[index]) & (row < ends[index])
            return jnp.where(mine[:, None], y, out)

        return lax.cond(group_sizes[index] > 0, product, lambda: out)

    return lax.fori_loop(0, group_sizes.shape[0], group, jnp.zeros((x.shape[0], w.shape[1]), out_dtype))
