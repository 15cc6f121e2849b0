"""The routed experts that one device holds."""

import jax
import jax.numpy as jnp

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.grouped_moe import grouped_moe_experts
from jaxinfer.kernels.mosaic.gemm import reason_against
from jaxinfer.kernels.quantized import Activation, Quantized, Weight
from jaxinfer.kernels.reference import moe as reference


def moe_experts(
    x: Activation,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
    *,
    dtype=jnp.float32,
) -> jax.Array:
    """Weighted sum of SwiGLU experts over the tokens routed to them; no token is ever dropped.

    Args:
        x: `[T, d]` tokens, in the form that `gate_up` is multiplied with.
        experts: `[T, k]` int32, the experts of each token, distinct; values outside `0 .. E-1` belong to other devices
            and add nothing.
        weights: `[T, k]` float32 routing weights.
        gate_up: `[L, E, 2, I, d]`, the gate and up projections of each expert of each layer.
        down: `[L, E, d, I]`.
        layer: int32, the layer whose experts these are: they are read where they lie in the weights of all.
        dtype: of what lies between two quantised products.

    Experts that are not quantised go through the grouped product where it has a kernel for them, else through a loop.

    Returns: `[T, d]` float32, `sum_k weights[t, k] * down(silu(gate x) * up x)`.
    """
    if isinstance(down, Quantized):
        return grouped_moe_experts(x, experts, weights, gate_up, down, layer, dtype)
    assert not isinstance(x, Quantized) and not isinstance(gate_up, Quantized)
    if _has_kernel(x, gate_up, down):
        return grouped_moe_experts(x, experts, weights, gate_up, down, layer, dtype)
    return reference.moe_experts(x, experts, weights, gate_up, down, layer)


def _has_kernel(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> bool:
    """Whether both products of experts that are not quantised have a kernel here."""
    width = gate_up.shape[-2] * gate_up.shape[-3]
    first = reason_against(x, jax.ShapeDtypeStruct((width, x.shape[1]), gate_up.dtype), None, jnp.float32)
    hidden = jax.ShapeDtypeStruct((x.shape[0], down.shape[-1]), down.dtype)
    second = reason_against(hidden, down, None, jnp.float32)
    other = None if x.dtype == jnp.bfloat16 else f"the experts are {x.dtype}, not bfloat16"
    return dispatch.choose("moe_experts", None, other or first or second) == "mosaic"
