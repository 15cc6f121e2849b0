"""The routed experts that one device holds."""

from jaxtyping import Array, Float, Int

from jaxinfer.kernels.reference import moe as reference


def moe_experts(
    x: Float[Array, "T d"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E 2 I d"],
    down: Float[Array, "E d I"],
) -> Float[Array, "T d"]:
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
