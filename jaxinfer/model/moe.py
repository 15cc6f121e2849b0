"""Feed-forward layers: dense SwiGLU, and mixture of experts with the routers of DeepSeek V2 and V3."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.moe import moe_experts
from jaxinfer.kernels.quantized import Activation
from jaxinfer.kernels.router import router_logits
from jaxinfer.model.linear import linear, swiglu
from jaxinfer.model.params import weight
from jaxinfer.model.precision import Precision
from jaxinfer.sharding.collectives import all_gather, all_reduce, reduce_scatter
from jaxinfer.sharding.rules import Plan

EXCHANGE_TOKENS = 8192
"""Tokens of all expert ranks together that are exchanged at a time: bounds the memory of the exchange."""


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): `down(silu(gate x) * up x)`, the width divided where the rules say."""

    def __init__(self, hidden: int, width: int, precision: Precision):
        self.dtype = precision.dtype
        self.width, self.axis = precision.width(width), precision.pieces("mlp")
        self.gate_up = precision.matrix(
            (2, self.width, hidden), (None, self.axis, None), lead=1, quantize=precision.first_ffn
        )
        self.down = precision.matrix((hidden, self.width), (None, self.axis))

    def __call__(self, x: Activation, plan: Plan) -> jax.Array:
        """`x [T, d]` to float32 `[T, d]`."""
        hidden = swiglu(x, self.gate_up, self.down, dtype=self.dtype)
        return all_reduce(linear(hidden, self.down, jnp.float32), plan.axes(self.axis, self.width))


class MoE(nnx.Module):
    """Routed experts, divided over the ranks, plus the shared experts that every token passes."""

    def __init__(self, config: ModelConfig, precision: Precision):
        self.config, self.dtype = config, precision.dtype
        experts, d = config.num_experts, config.hidden_size
        self.router = weight((experts, d), (None, None), jnp.dtype(jnp.float32))
        if config.router == "sigmoid_noaux_tc":
            self.router_bias = weight((experts,), (None,), jnp.dtype(jnp.float32))
        self.width, self.axis = precision.width(config.moe_intermediate_size), precision.pieces("expert_mlp")
        self.gate_up = precision.matrix(
            (experts, 2, self.width, d),
            ("experts", None, self.axis, None),
            lead=2,
            quantize=precision.first_ffn,
            in_place=True,
        )
        self.down = precision.matrix((experts, d, self.width), ("experts", None, self.axis), lead=1, in_place=True)
        if config.num_shared_experts:
            self.shared = MLP(d, config.num_shared_experts * config.moe_intermediate_size, precision)

    def __call__(
        self, x: jax.Array, norm: jax.Array, rows: Activation, occupied: jax.Array, layer: jax.Array, plan: Plan
    ) -> jax.Array:
        """The stream, float32 `x [T, d]`, and the same behind its `norm [d]`, as the experts see it: `rows`.

        The router sees what is behind the norm before it is rounded.  The result is float32 `[T, d]`.  Rows that are
        not `occupied` (bool `[T]`) hold no token and reach no expert.  `layer` counts the mixture-of-experts layers.
        """
        experts, weights = self.route(x, norm)
        experts = jnp.where(occupied[:, None], experts, self.config.num_experts)
        out = self._routed(rows, experts, weights, layer, plan)
        return out + self.shared(rows, plan) if self.config.num_shared_experts else out

    def route(self, x: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of each token of float32 `x [T, d]` behind its norm: int32 `[T, k]`, float32 weights `[T, k]`."""
        # A model in float32 is what the others are compared with: every product of it is one in float32.
        implementation = "reference" if self.dtype == jnp.float32 else None
        logits = router_logits(x, self.router, norm, self.config.rms_norm_eps, implementation=implementation)
        bias = self.router_bias if self.config.router == "sigmoid_noaux_tc" else None
        return select_experts(logits, bias, self.config)

    def _routed(self, x, experts, weights, layer, plan):
        """Sends tokens to the ranks that hold their experts and sums what comes back, a tile of tokens at a time.

        Every rank receives all tokens of a tile and computes those of its own experts, so memory does not depend on
        the routing: a tile of inputs, of float32 outputs, and one block of the expert kernel.
        """
        config = self.config
        expert_axes = plan.axes("experts", config.num_experts)
        exchange = tuple(axis for axis in expert_axes if axis in plan.token_axes)
        replicated = tuple(axis for axis in expert_axes if axis not in plan.token_axes)
        reduce = replicated + plan.axes(self.axis, self.width)
        first = lax.axis_index(expert_axes) * self.gate_up.shape[1] if expert_axes else 0

        def tile(piece):
            x, experts, weights = jax.tree.map(lambda rows: all_gather(rows, exchange, 0), piece)
            out = moe_experts(x, experts - first, weights, self.gate_up, self.down, layer, dtype=self.dtype)
            return reduce_scatter(all_reduce(out, reduce), exchange, 0)

        tokens, d = x.shape
        size = exchange_tokens(tokens, math.prod(lax.axis_size(axis) for axis in exchange))
        pieces = jax.tree.map(lambda a: a.reshape(tokens // size, size, *a.shape[1:]), (x, experts, weights))
        return lax.map(tile, pieces).reshape(tokens, d)


def exchange_tokens(tokens: int, ranks: int) -> int:
    """Of `tokens` of each of `ranks` expert ranks, how many are exchanged at a time."""
    size = max(1, EXCHANGE_TOKENS // ranks)
    return size if tokens % size == 0 else tokens


def select_experts(logits: jax.Array, bias: jax.Array | None, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """The routers of DeepSeek V2 (arXiv 2405.04434, section 2.2) and V3 (arXiv 2412.19437, section 2.1.2).

    Args: `logits [T, E]` float32; `bias [E]` float32, which takes part in the selection only (V3).
    Returns int32 `[T, k]` and float32 weights `[T, k]`; equal scores go to the lower index.
    """
    sigmoid = config.router == "sigmoid_noaux_tc"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias
    if config.router != "softmax_greedy" and config.num_groups > 1:
        grouped = choice.reshape(choice.shape[0], config.num_groups, -1)
        # V3 ranks a group by its two best biased scores, V2 by its best.
        best = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1) if sigmoid else jnp.max(grouped, axis=-1)
        _, groups = lax.top_k(best, config.groups_per_token)
        allowed = jnp.any(jnp.arange(config.num_groups) == groups[..., None], axis=1)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf if sigmoid else 0.0).reshape(choice.shape)
    _, experts = lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * config.routed_scaling_factor
