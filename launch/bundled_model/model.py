"""The bundled model's training forward pass: whole sequences at once, no cache, in plain JAX.

Parameters are a nested dict in the layout of `jaxinfer.model.transformer.parameter_specs` (orientation `[out, in]`,
layers of one kind stacked), without `head` (it is the embedding) and with one more entry, `mtp`: `enorm`, `hnorm`
`[d]`, `proj [d, 2d]`, `norm [d]` and `block`, a mixture-of-experts layer stacked over one.  All are float32; `cast`
makes the copy that is computed with, which is also what is exported.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.kernels.rope import apply_rope
from jaxinfer.model.rope import inverse_frequencies, softmax_scale

Tree = dict[str, Any]
Attention = Literal["cudnn", "blocked"]

QUERY_BLOCK = 512
"""Queries at a time where attention is computed by XLA."""
INITIAL_SCALE = 0.02


class Routing(NamedTuple):
    """What the routers of one or more layers did."""

    load: jax.Array
    """Float32 `[layers, E]`: tokens that chose each expert."""
    balance: jax.Array
    """Float32: the balance loss over sequences, summed over the layers (arXiv 2412.19437, equations 17 to 20)."""


def parameter_shapes(config: ModelConfig) -> Tree:
    """Shape of every parameter."""
    d, heads, q, kv = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    if q is None or config.num_shared_experts != 1:
        raise ValueError(f"expected a q_lora_rank and one shared expert, got {q} and {config.num_shared_experts}")
    width, experts = config.moe_intermediate_size, config.num_experts

    def block(layers: int, feed_forward: Tree) -> Tree:
        attention = {
            "q_a": (layers, q, d),
            "q_a_norm": (layers, q),
            "q_b": (layers, heads, config.qk_head_dim, q),
            "kv_a": (layers, config.latent_dim, d),
            "kv_a_norm": (layers, kv),
            "k_b": (layers, heads, config.qk_nope_head_dim, kv),
            "v_b": (layers, heads, config.v_head_dim, kv),
            "o": (layers, d, heads, config.v_head_dim),
        }
        return {"attn_norm": (layers, d), "attention": attention, "mlp_norm": (layers, d), **feed_forward}

    def mlp(layers: int, width: int) -> Tree:
        return {"gate_up": (layers, 2, width, d), "down": (layers, d, width)}

    def moe(layers: int) -> Tree:
        routed = {
            "router": (layers, experts, d),
            "router_bias": (layers, experts),
            "gate_up": (layers, experts, 2, width, d),
            "down": (layers, experts, d, width),
            "shared": mlp(layers, width),
        }
        return block(layers, {"moe": routed})

    shapes: Tree = {
        "embed": (config.vocab_size, d),
        "final_norm": (d,),
        "dense": block(config.num_dense_layers, {"mlp": mlp(config.num_dense_layers, config.intermediate_size)}),
        "moe": moe(config.num_moe_layers),
    }
    if config.num_mtp_layers:
        shapes["mtp"] = {"enorm": (d,), "hnorm": (d,), "proj": (d, 2 * d), "norm": (d,), "block": moe(1)}
    return shapes


def initial_parameters(config: ModelConfig, key: jax.Array) -> Tree:
    """Random float32 parameters: norms 1, router bias and every output projection of a layer 0, others normal."""
    shapes = parameter_shapes(config)
    leaves, structure = jax.tree.flatten_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    made = []
    for (path, shape), subkey in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        name = path[-1].key
        if name.endswith("norm"):
            made.append(jnp.ones(shape, jnp.float32))
        elif name in ("o", "down", "router_bias"):
            made.append(jnp.zeros(shape, jnp.float32))
        else:
            made.append(INITIAL_SCALE * jax.random.normal(subkey, shape, jnp.float32))
    return jax.tree.unflatten(structure, made)


def cast(params: Tree, dtype: jnp.dtype) -> Tree:
    """The parameters in the type of computation.

    The router's bias, which only steers the selection, stays float32, and so does the embedding: it is converted where
    it is used, for its gradient is a sum over all tokens, which bfloat16 would not hold.
    """

    def convert(path, leaf):
        return leaf if path[-1].key in ("router_bias", "embed") else leaf.astype(dtype)

    return jax.tree.map_with_path(convert, params)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, attention: Attention) -> jax.Array:
    """Causal attention: `q`, `k` `[B, T, H, qk]`, `v [B, T, H, v]` to `[B, T, H, v]`."""
    if attention == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation="cudnn")
    tokens = q.shape[1]
    block = min(QUERY_BLOCK, tokens)
    if tokens % block:
        raise ValueError(f"expected a multiple of {block} tokens, got {tokens}")

    @jax.checkpoint
    def rows(piece):
        q, start = piece
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
        visible = jnp.arange(tokens) <= (start + jnp.arange(block))[:, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("bhqk,bkhv->bqhv", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)

    pieces = jnp.moveaxis(q.reshape(q.shape[0], -1, block, *q.shape[2:]), 1, 0)
    out = lax.map(rows, (pieces, jnp.arange(0, tokens, block)))
    return jnp.moveaxis(out, 0, 1).reshape(v.shape)


def queries_and_keys(config: ModelConfig, weights: Tree, x: jax.Array, rope) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of normed inputs `x [B, T, d]`, each `[B, T, H, dim]`."""
    q = _norm(_linear("btd,rd->btr", x, weights["q_a"]), weights["q_a_norm"], config.latent_norm_eps)
    q = _linear("btr,hqr->bthq", q, weights["q_b"])
    q_nope, q_rope = jnp.split(q, (config.qk_nope_head_dim,), axis=-1)
    latent = _linear("btd,rd->btr", x, weights["kv_a"])
    latent, k_rope = jnp.split(latent, (config.kv_lora_rank,), axis=-1)
    latent = _norm(latent, weights["kv_a_norm"], config.latent_norm_eps)
    cos, sin = rope
    q_rope = apply_rope(q_rope, cos[:, :, None], sin[:, :, None])
    k_rope = apply_rope(k_rope, cos, sin)[:, :, None]
    k_nope = _linear("btr,hnr->bthn", latent, weights["k_b"])
    k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], k_rope.shape[-1]))
    v = _linear("btr,hvr->bthv", latent, weights["v_b"])
    return jnp.concatenate((q_nope, q_rope), -1), jnp.concatenate((k_nope, k_rope), -1), v


def gates(config: ModelConfig, weights: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The router of V3 (arXiv 2412.19437, section 2.1.2), dense: each token's weight of every expert, 0 if not chosen.

    Args: `x [B, T, d]`.  Returns float32 `[B, T, E]` gates and sigmoid scores, and bool `[B, T, E]`: chosen or not.
    """
    logits = jnp.einsum(
        "btd,ed->bte", x.astype(jnp.float32), weights["router"].astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    choice = scores + weights["router_bias"]
    if config.num_groups > 1:
        grouped = choice.reshape(*choice.shape[:-1], config.num_groups, -1)
        best = jnp.sum(jnp.where(_largest(grouped, 2), grouped, 0.0), axis=-1)
        allowed = _largest(best, config.groups_per_token)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    chosen = _largest(choice, config.experts_per_token)
    picked = jnp.where(chosen, scores, 0.0)
    if config.norm_topk_prob:
        picked = picked / (jnp.sum(picked, axis=-1, keepdims=True) + 1e-20)
    return picked * config.routed_scaling_factor, scores, chosen


def _largest(values: jax.Array, count: int) -> jax.Array:
    """Which of the last dimension's few values are the `count` largest, bool; of equal ones the earlier.

    Comparing all with all is one elementwise kernel, where sorting would be many.
    """
    one, other = values[..., :, None], values[..., None, :]
    earlier = jnp.tri(values.shape[-1], k=-1, dtype=bool)
    before = (other > one) | ((other == one) & earlier)
    return jnp.sum(before, axis=-1) < count


def mixture(config: ModelConfig, weights: Tree, x: jax.Array) -> tuple[jax.Array, Routing]:
    """All experts as one wide SwiGLU whose hidden units are multiplied by their expert's gate: exact and dropless.

    Args: `x [B, T, d]`.  The shared expert is the last of them, with gate 1.
    """
    gate, scores, chosen = gates(config, weights, x)
    experts, width = config.num_experts, config.moe_intermediate_size
    gate_up = jnp.concatenate((weights["gate_up"], weights["shared"]["gate_up"][None]))
    down = jnp.concatenate((weights["down"], weights["shared"]["down"][None]))
    flat = jnp.moveaxis(gate_up, 1, 0).reshape(2 * (experts + 1) * width, -1)
    both = _linear("btd,wd->btw", x, flat).reshape(*x.shape[:2], 2, experts + 1, width)
    full_gate = jnp.concatenate((gate, jnp.ones_like(gate[..., :1])), axis=-1)
    hidden = _activate(both[:, :, 0], both[:, :, 1], full_gate[..., None])
    flat_down = jnp.moveaxis(down, 0, 1).reshape(x.shape[-1], -1)
    out = _linear("btw,dw->btd", hidden.reshape(*x.shape[:2], -1), flat_down)
    share = jnp.mean(scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20), axis=1)
    frequency = jnp.mean(chosen, axis=1) * (experts / config.experts_per_token)
    balance = jnp.mean(jnp.sum(lax.stop_gradient(frequency) * share, axis=-1))
    return out, Routing(jnp.sum(chosen, axis=(0, 1), dtype=jnp.float32)[None], balance)


def layer(
    config: ModelConfig, weights: Tree, x: jax.Array, rope, attention: Attention
) -> tuple[jax.Array, Routing | None]:
    """One decoder layer on `x [B, T, d]`; the routing is None for a dense layer."""
    h = _norm(x, weights["attn_norm"], config.rms_norm_eps)
    q, k, v = queries_and_keys(config, weights["attention"], h, rope)
    out = attend(q, k, v, softmax_scale(config), attention)
    x = x + _linear("bthv,dhv->btd", out, weights["attention"]["o"])
    h = _norm(x, weights["mlp_norm"], config.rms_norm_eps)
    if "mlp" in weights:
        gate, up = jnp.moveaxis(_linear("btd,gid->btgi", h, weights["mlp"]["gate_up"]), 2, 0)
        hidden = _activate(gate, up, jnp.float32(1))
        return x + _linear("bti,di->btd", hidden, weights["mlp"]["down"]), None
    out, routing = mixture(config, weights["moe"], h)
    return x + out, routing


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 `[B, T, rope/2]`, of int32 positions `[B, T]`."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config.rope, config.qk_rope_head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def layers_of(params: Tree) -> list[Tree]:
    """The weights of each layer of the main model in order."""
    found = []
    for kind in ("dense", "moe"):
        count = params[kind]["attn_norm"].shape[0]
        found += [jax.tree.map(lambda leaf, at=at: leaf[at], params[kind]) for at in range(count)]
    return found


def hidden_states(
    config: ModelConfig, params: Tree, tokens: jax.Array, positions: jax.Array, attention: Attention
) -> tuple[jax.Array, Routing]:
    """The main model up to the final norm: `tokens`, `positions` int32 `[B, T]` to `[B, T, d]`."""
    rope = rope_angles(config, positions)
    x = _embed(params, tokens)
    routings = []
    for weights in layers_of(params):
        x, routing = layer(config, weights, x, rope, attention)
        routings += [] if routing is None else [routing]
    x = _norm(x, params["final_norm"], config.rms_norm_eps)
    return x, _join(routings)


def mtp_hidden_states(
    config: ModelConfig, params: Tree, hidden: jax.Array, tokens: jax.Array, positions: jax.Array, attention: Attention
) -> tuple[jax.Array, Routing]:
    """The multi-token-prediction layer (arXiv 2412.19437, section 2.2), normed for the shared head.

    Args: `hidden [B, T, d]` after the final norm at t; `tokens` and `positions` `[B, T]` of t + 1.
    Returns `[B, T, d]`, whose logits predict the token at t + 2.
    """
    mtp = params["mtp"]
    embedded = _norm(_embed(params, tokens), mtp["enorm"], config.rms_norm_eps)
    before = _norm(hidden, mtp["hnorm"], config.rms_norm_eps)
    x = _linear("bte,de->btd", jnp.concatenate((embedded, before), axis=-1), mtp["proj"])
    weights = jax.tree.map(lambda leaf: leaf[0], mtp["block"])
    x, routing = layer(config, weights, x, rope_angles(config, positions), attention)
    return _norm(x, mtp["norm"], config.rms_norm_eps), _join([routing])


def logits(params: Tree, hidden: jax.Array) -> jax.Array:
    """Float32 logits `[..., V]` of normed states `[..., d]`."""
    table = params["embed"].astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)


def largest_scores(config: ModelConfig, params: Tree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """The largest attention score of each layer and head, float32 `[layers, H]`, over sequences `[B, T]`.

    Computed outside of fused attention, which does not show its scores; for short sequences.
    """
    rope = rope_angles(config, positions)
    x = _embed(params, tokens)
    found = []
    for weights in layers_of(params):
        h = _norm(x, weights["attn_norm"], config.rms_norm_eps)
        q, k, _ = queries_and_keys(config, weights["attention"], h, rope)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * softmax_scale(config)
        scores = jnp.where(jnp.tri(tokens.shape[1], dtype=bool), scores, -jnp.inf)
        found.append(jnp.max(scores, axis=(0, 2, 3)))
        x, _ = layer(config, weights, x, rope, "blocked")
    return jnp.stack(found)


def clip_queries_and_keys(config: ModelConfig, params: Tree, largest: jax.Array, limit: float) -> Tree:
    """QK-clip (Kimi K2, arXiv 2507.20534): scales the heads whose largest score is above `limit` down to it.

    With gamma = min(1, limit / score): rows of `q_b` and `k_b` without position by sqrt(gamma), the rotary rows of
    `q_b` by gamma, the rotary key not at all, as all heads share it.  Args: `largest [layers, H]`.
    """
    gamma = jnp.minimum(1.0, limit / jnp.maximum(largest, limit))
    first, nope = 0, config.qk_nope_head_dim
    clipped = dict(params)
    for kind in ("dense", "moe"):
        attention = dict(params[kind]["attention"])
        count = attention["q_b"].shape[0]
        factor = gamma[first : first + count, :, None, None]
        root = jnp.sqrt(factor)
        q_b = attention["q_b"]
        attention["q_b"] = jnp.concatenate((q_b[:, :, :nope] * root, q_b[:, :, nope:] * factor), axis=2)
        attention["k_b"] = attention["k_b"] * root
        clipped[kind] = {**params[kind], "attention": attention}
        first += count
    return clipped


def _join(routings: list[Routing]) -> Routing:
    return Routing(jnp.concatenate([r.load for r in routings]), sum(r.balance for r in routings))


def _embed(params: Tree, tokens: jax.Array) -> jax.Array:
    return params["embed"][tokens].astype(params["final_norm"].dtype)


def _linear(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    # Matrix units accumulate in float32 whatever the type of the result; asking for a float32 result would make the
    # backward pass multiply in float32.
    return jnp.einsum(equation, x, weight)


# Computed again in the backward pass: the float32 intermediates cost more to store than to make.
_norm = jax.checkpoint(rms_norm, static_argnums=(2,))


@jax.checkpoint
def _activate(gate: jax.Array, up: jax.Array, factor: jax.Array) -> jax.Array:
    return (jax.nn.silu(gate.astype(jnp.float32)) * up * factor).astype(gate.dtype)
