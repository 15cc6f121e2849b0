"""`gemm` for Hopper through Pallas Mosaic GPU: fits the operands to the kernel of `matmul`."""

import jax
import jax.numpy as jnp

from jaxinfer.kernels.mosaic.matmul import ALIGNMENT, SCALE_COLUMNS, matmul
from jaxinfer.kernels.tiles import Device, Problem, Tiles, choose, device

Array = jax.Array | jax.ShapeDtypeStruct


def reason_against(x: Array, w: Array, residual: jax.Array | None, out_dtype) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can; `w [..., N, K]`."""
    step = 128 // x.dtype.itemsize
    if x.shape[0] == 0:
        return "there are no rows"
    if x.shape[1] == 0 or x.shape[1] % step:
        return f"K = {x.shape[1]} is no multiple of {step}"
    if w.shape[-2] == 0 or w.shape[-2] % 64:
        return f"N = {w.shape[-2]} is no multiple of 64"
    if residual is not None and residual.dtype != jnp.dtype(out_dtype):
        return f"the residual is {residual.dtype}, the output {jnp.dtype(out_dtype)}"
    return None


def prepare(
    x: jax.Array, w: jax.Array, x_scale: jax.Array | None, w_scale: jax.Array | None
) -> tuple[str | None, dict[str, jax.Array]]:
    """The scheme of the scales, and the operands as `matmul` takes them, `x [M rounded up to 8, K]`."""
    operands = {"x": pad_rows(x), "w": w}
    if x_scale is None or w_scale is None:
        return None, operands
    # Rows of `x` are the last dimension of its scales.
    operands["x_scale"] = pad_rows(x_scale.T).T
    if x_scale.ndim == 1:
        return "row", operands | {"w_scale": w_scale}
    padding = [(0, 0)] * (w_scale.ndim - 1) + [(0, -w_scale.shape[-1] % SCALE_COLUMNS)]
    return "block", operands | {"w_scale": jnp.pad(w_scale, padding)}


def pad_rows(x: jax.Array) -> jax.Array:
    """Swizzled copies want whole tiles of 8 rows; only odd, hence small, batches are padded."""
    return jnp.pad(x, ((0, -x.shape[0] % ALIGNMENT),) + ((0, 0),) * (x.ndim - 1))


def gemm(x, w, x_scale, w_scale, *, bias, residual, out_dtype, tiles: Tiles | None, on: Device | None = None):
    """See `jaxinfer.kernels.gemm.gemm`; `on` is the device whose table and count are used, None for the present one."""
    scheme, operands = prepare(x, w, x_scale, w_scale)
    if bias is not None:
        operands["bias"] = bias.astype(jnp.float32)
    if residual is not None:
        operands["residual"] = pad_rows(residual)
    problem = Problem(
        m=operands["x"].shape[0],
        n=w.shape[0],
        k=x.shape[1],
        dtype=x.dtype,
        out_dtype=jnp.dtype(out_dtype),
        scheme=scheme,
        bias=bias is not None,
        residual=residual is not None,
    )
    on = on or device()
    return matmul(problem, tiles or choose(problem, on), operands, on.multiprocessors)[: x.shape[0]]
