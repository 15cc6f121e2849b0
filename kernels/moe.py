"""The routed experts that one device holds."""

import jax

from jaxinfer.kernels.reference import moe as reference


def moe_experts(x: jax.Array, experts: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Weighted sum of SwiGLU experts over the tokens routed to them; no token is ever dropped.

    Args:
        x: `[T, d]` tokens.
        experts: `[T, k]` int32, the experts of each token, distinct; values outside `0 .. E-1` belong to other devices
            and add nothing.
        weights: `[T, k]` float32 routing weights.
        gate_up: `[E, 2, I, d]`, the gate and up projections of each expert.
        down: `[E, d, I]`.

    Returns: `[T, d]` float32, `sum_k weights[t, k] * down(silu(gate x) * up x)`.
    """
    return reference.moe_experts(x, experts, weights, gate_up, down)
