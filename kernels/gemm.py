"""Products of quantised or bfloat16 activations and weights."""

import jax
import jax.numpy as jnp

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mosaic import gemm as mosaic
from jaxinfer.kernels.reference import gemm as reference
from jaxinfer.kernels.tiles import Tiles

BLOCK = 128


def gemm(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype=jnp.bfloat16,
    implementation: dispatch.Implementation | None = None,
    tiles: Tiles | None = None,
) -> jax.Array:
    """`x @ w.T`, scaled, plus bias and residual, accumulated in float32 (int8: int32, exact) and rounded once.

    Every 128 numbers of K of an e4m3 product are accumulated apart and added up in float32: the tensor cores of Hopper
    keep too few bits of a long sum (see `mosaic.matmul`).

    Args:
        x: `[M, K]`, any M; `float8_e4m3fn`, `int8` or `bfloat16`.
        w: `[N, K]` of the same type.
        x_scale: float32, of rows `[M]` or of blocks `[K / 128, M]` (see `quantize`); None for bfloat16.
        w_scale: float32, of output channels `[N]` (with `[M]`) or of 128x128 blocks `[ceil(N / 128), K / 128]`.
        bias: `[N]`.
        residual: `[M, N]`.
        out_dtype: `bfloat16` or `float32`.
        implementation: None chooses (see `dispatch`).
        tiles: how Mosaic cuts the product; None chooses (see `tiles`).

    Returns: `[M, N]` of `out_dtype`.
    Raises: ValueError if shapes and types do not fit together, or Mosaic is asked for and cannot take them.
    """
    if w.ndim != 2:
        raise ValueError(f"expected w [N, K], got {w.shape}")
    check(x, w, x_scale, w_scale, out_dtype)
    m, n = x.shape[0], w.shape[0]
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"expected bias {(n,)}, got {bias.shape}")
    if residual is not None and residual.shape != (m, n):
        raise ValueError(f"expected residual {(m, n)}, got {residual.shape}")
    reason = mosaic.reason_against(x, w, residual, out_dtype)
    if dispatch.choose("gemm", implementation, reason) == "reference":
        return reference.gemm(x, w, x_scale, w_scale, bias=bias, residual=residual, out_dtype=out_dtype)
    return mosaic.gemm(x, w, x_scale, w_scale, bias=bias, residual=residual, out_dtype=out_dtype, tiles=tiles)


def check(x: jax.Array, w: jax.Array, x_scale: jax.Array | None, w_scale: jax.Array | None, out_dtype) -> None:
    """Raises ValueError unless the operands of a product fit together; `w [..., N, K]`."""
    if x.ndim != 2 or x.shape[1] != w.shape[-1]:
        raise ValueError(f"expected x [M, K] and w [..., N, K], got {x.shape} and {w.shape}")
    if x.dtype not in (jnp.float8_e4m3fn, jnp.int8, jnp.bfloat16) or x.dtype != w.dtype:
        raise ValueError(f"expected both operands float8_e4m3fn, int8 or bfloat16, got {x.dtype} and {w.dtype}")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"expected out_dtype bfloat16 or float32, got {jnp.dtype(out_dtype)}")
    (m, k), n, groups = x.shape, w.shape[-2], w.shape[:-2]
    given = (None if x_scale is None else x_scale.shape, None if w_scale is None else w_scale.shape)
    rows = (m,), (*groups, n)
    blocks = (k // BLOCK, m), (*groups, -(-n // BLOCK), k // BLOCK)
    if x.dtype == jnp.bfloat16:
        allowed = [(None, None)]
    elif x.dtype == jnp.float8_e4m3fn and k % BLOCK == 0:
        allowed = [rows, blocks]
    else:
        allowed = [rows]
    if given not in allowed:
        raise ValueError(f"expected shapes of x_scale and w_scale among {allowed}, got {given}")
    for scale in (x_scale, w_scale):
        if scale is not None and scale.dtype != jnp.float32:
            raise ValueError(f"expected float32 scales, got {scale.dtype}")
