"""The decoder in numpy, float64, on one whole prompt, with activations rounded where the engine rounds them.

Written down from the papers (arXiv 2405.04434, 2412.19437) without the engine's model code, of which it uses the rotary
table and the choice of experts.  Rounded is what a product of 8-bit numbers is given: quantised and multiplied out
again ("fake quantisation"), activations here, weights in the parameters that are passed in; the products are exact.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.model.moe import select_experts
from jaxinfer.model.rope import rope_table, softmax_scale

BLOCK = 128


@dataclass(frozen=True)
class Casts:
    """What the 8-bit casts do to activations.  `kind` None: nothing."""

    kind: str | None = None
    """`fp8` or `int8`."""
    blocks: bool = False
    """1x128 blocks have a scale, instead of rows."""
    first_ffn: bool = True

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """`[..., K]`; a product over numbers that are no multiple of 128 is not quantised."""
        if self.kind is None or x.shape[-1] % BLOCK:
            return x
        count = x.shape[-1] // BLOCK if self.blocks else 1
        parts = x.reshape(*x.shape[:-1], count, x.shape[-1] // count)
        bound = 448 if self.kind == "fp8" else 127
        amax = np.max(np.abs(parts), axis=-1, keepdims=True)
        scale = np.maximum(amax, 1e-4).astype(np.float32) * np.float32(1 / bound)
        q = np.clip(parts.astype(np.float32) / scale, -bound, bound)
        q = q.astype(ml_dtypes.float8_e4m3fn) if self.kind == "fp8" else np.round(q)
        return (q.astype(np.float64) * scale).reshape(x.shape)


def multiplied_out(params: dict) -> dict:
    """Parameters in float64, quantised ones times their scales."""

    def one(weight) -> np.ndarray:
        if not isinstance(weight, Quantized):
            return np.asarray(weight, np.float64)
        values, scale = np.asarray(weight.values, np.float64), np.asarray(weight.scale, np.float64)
        lead = scale.ndim - 2 if weight.scheme == "block" else 0
        split = values.ndim - weight.columns
        if weight.scheme == "row":
            return values * scale.reshape(*scale.shape, *(1,) * weight.columns)
        matrices = values.reshape(*values.shape[:lead], math.prod(values.shape[lead:split]), -1)
        spread = scale.repeat(BLOCK, axis=-2)[..., : matrices.shape[-2], :].repeat(BLOCK, axis=-1)
        return (matrices * spread).reshape(values.shape)

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def logits(params: dict, config: ModelConfig, casts: Casts, ids: list[int]) -> np.ndarray:
    """Logits of every row, `[T, vocab]`; `params` as `multiplied_out` gives them, arranged as by `parameter_specs`."""
    x = params["embed"][np.asarray(ids)]
    for kind, layers in (("dense", config.num_dense_layers), ("moe", config.num_moe_layers)):
        for layer in range(layers):
            weights = _layer(params[kind], layer)
            x = x + _attention(weights["attention"], config, casts, _norm(x, weights["attn_norm"], config.rms_norm_eps))
            h = _norm(x, weights["mlp_norm"], config.rms_norm_eps)
            x = x + (_mlp(weights["mlp"], casts, h) if kind == "dense" else _moe(weights["moe"], config, casts, h))
    return _norm(x, params["final_norm"], config.rms_norm_eps) @ params["head"].T


def _layer(tree: dict, layer: int) -> dict:
    return {name: _layer(part, layer) if isinstance(part, dict) else part[layer] for name, part in tree.items()}


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1).reshape(x.shape)


def _attention(w: dict, config: ModelConfig, casts: Casts, h: np.ndarray) -> np.ndarray:
    tokens, heads, nope = len(h), config.num_heads, config.qk_nope_head_dim
    rank, eps = config.kv_lora_rank, config.latent_norm_eps
    cos, sin = (table.astype(np.float64) for table in rope_table(config.rope, config.qk_rope_head_dim, tokens))
    if config.q_lora_rank is None:
        q = casts(h) @ w["q"].reshape(-1, h.shape[1]).T
    else:
        latent = _norm(casts(h) @ w["q_a"].T, w["q_a_norm"], eps)
        q = casts(latent) @ w["q_b"].reshape(-1, latent.shape[1]).T
    q = q.reshape(tokens, heads, -1)
    kv = casts(h) @ w["kv_a"].T
    latent, k_rope = _norm(kv[:, :rank], w["kv_a_norm"], eps), _rotate(kv[:, rank:], cos, sin)
    k = np.einsum("sc,hnc->shn", latent, w["k_b"])
    v = np.einsum("sc,hvc->shv", latent, w["v_b"])
    scores = np.einsum("qhn,shn->hqs", q[..., :nope], k)
    scores += np.einsum("qhr,sr->hqs", _rotate(q[..., nope:], cos[:, None], sin[:, None]), k_rope)
    scores = np.where(np.tri(tokens, dtype=bool), scores * softmax_scale(config), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hqs,shv->qhv", weights / weights.sum(axis=-1, keepdims=True), v)
    return casts(out.reshape(tokens, -1)) @ w["o"].reshape(h.shape[1], -1).T


def _mlp(w: dict, casts: Casts, h: np.ndarray, factor: np.ndarray | float = 1.0) -> np.ndarray:
    """SwiGLU; its width is held in multiples of 128 where it is quantised, filled up with zeros."""
    h = casts(h) if casts.first_ffn else h
    gate, up = (h @ part.T for part in w["gate_up"])
    return casts(gate / (1 + np.exp(-gate)) * up) @ w["down"].T * factor


def _moe(w: dict, config: ModelConfig, casts: Casts, h: np.ndarray) -> np.ndarray:
    bias = jnp.asarray(w["router_bias"], jnp.float32) if "router_bias" in w else None
    chosen, factors = select_experts(jnp.asarray(h @ w["router"].T, jnp.float32), bias, config)
    chosen, factors = np.asarray(chosen), np.asarray(factors, np.float64)
    out = _mlp(w["shared"], casts, h) if config.num_shared_experts else np.zeros_like(h)
    for expert in range(config.num_experts):
        rows, place = np.nonzero(chosen == expert)
        weights = {name: w[name][expert] for name in ("gate_up", "down")}
        out[rows] += _mlp(weights, casts, h[rows], factors[rows, place][:, None])
    return out
