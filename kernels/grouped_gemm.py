"""Products of rows that are grouped by expert with the weights of their experts."""

import jax
import jax.numpy as jnp

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.gemm import check
from jaxinfer.kernels.mosaic import grouped_gemm as mosaic
from jaxinfer.kernels.reference import grouped_gemm as reference
from jaxinfer.kernels.tiles import Tiles


def grouped_gemm(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    *,
    first_group: jax.Array | int = 0,
    out_dtype=jnp.bfloat16,
    implementation: dispatch.Implementation | None = None,
    tiles: Tiles | None = None,
) -> jax.Array:
    """`x[rows of g] @ w[g].T` for every group g, with the types, scales and accumulation of `gemm`.

    The sizes are data: another histogram runs the same program, and the host never sees it.  A group may be empty or
    have all rows.  A routing weight is a factor on a row, so it can be multiplied into `x_scale` at no cost.

    Args:
        x: `[M, K]`, the rows of group 0 first, then those of group 1, ...
        w: `[W, N, K]`, W at least G.
        group_sizes: int32 `[G]`, whose sum is at most M.
        x_scale: float32, `[M]` or `[K / 128, M]`.
        w_scale: float32, `[W, N]` (with `[M]`) or `[W, ceil(N / 128), K / 128]`.
        first_group: which of the W weights is that of group 0, those of the other groups follow it: the experts of all
            layers are read where they lie, and none are copied to be read.

    Returns: `[M, N]` of `out_dtype`; rows after those of the last group may hold anything.
    Raises: ValueError if shapes and types do not fit together, or Mosaic is asked for and cannot take them.
    """
    if w.ndim != 3:
        raise ValueError(f"expected w [G, N, K], got {w.shape}")
    check(x, w, x_scale, w_scale, out_dtype)
    if group_sizes.ndim != 1 or group_sizes.shape[0] > w.shape[0] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"expected group_sizes int32 [G] with G at most {w.shape[0]}, got {group_sizes.dtype} {group_sizes.shape}"
        )
    if dispatch.choose("grouped_gemm", implementation, mosaic.reason_against(x, w, None, out_dtype)) == "reference":
        return reference.grouped_gemm(x, w, group_sizes, x_scale, w_scale, first_group=first_group, out_dtype=out_dtype)
    return mosaic.grouped_gemm(
        x, w, group_sizes, x_scale, w_scale, first_group=first_group, out_dtype=out_dtype, tiles=tiles
    )
