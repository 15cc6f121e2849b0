"""The weights of `retrieval-probe`: a transformer that looks up what followed the last tokens before, by construction.

Every token has a code, a unit vector of 64 numbers.  The residual stream is divided into slots of 64: the token's own
code, the codes of the one to three tokens before it, and the answer; one more number is 1 everywhere.

Layer 0 has a head for each distance 1 to 3.  Its query and key are rotary only: the rotation that the distance makes is
undone in the query, so that the score peaks at exactly that distance; the head copies the code found there into the
slot of its distance.  Layer 1 has one head, without rotary part: the query holds the codes of the last tokens, the key
those of the tokens before a place, and the score is `beta` for each that agrees.  It copies the code of the place,
which is the token that followed, into the answer's slot, and the vocabulary head reads that.  Feed-forward layers add
nothing; the router spreads the tokens over the experts all the same.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.mapping import TreePath
from jaxinfer.checkpoint.quantize import held_as
from jaxinfer.checkpoint.tree import flatten, unflatten
from jaxinfer.configs.model import ModelConfig
from jaxinfer.configs.probe import CLUSTERS, ProbeDials
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.model.rope import inverse_frequencies, softmax_scale

_SLOT = 64
_ANSWER = 4
_CONSTANT = 5 * _SLOT
"""Place in the residual stream of the number that is 1."""
_PAIRS = 10
"""Rotary pairs that find a distance: the fastest, which YaRN leaves as they are."""
_PEAK = 18.0
"""What each of these pairs adds to the score at the right distance."""
_HEAD_SCALE = 20.0
"""Logit of the right token when the answer's slot holds its code and nothing else."""


def probe_parameters(specs: dict[str, Any], config: ModelConfig, dials: ProbeDials, seed: int) -> dict[str, Any]:
    """The weights in the shapes, types and shardings of `specs` (see `model.transformer.parameter_specs`).

    `config` is the preset `retrieval-probe`, whose sizes this construction is made for; `seed` draws the codes.
    """
    rng = np.random.default_rng(seed)
    code = token_codes(config.vocab_size, dials.correlation, rng)
    made = _ends(config, dials, code)
    made |= {("dense", *path): value for path, value in _distance_layer(config, dials).items()}
    made |= {("moe", *path): value for path, value in _matching_layer(config, dials, rng).items()}
    flat = flatten(specs)

    def parameter(path: TreePath, spec: jax.ShapeDtypeStruct | Quantized) -> jax.Array | Quantized:
        value = np.zeros(spec.shape, np.float32)
        if path in made:
            value[:] = made[path]
        if isinstance(spec, Quantized):
            return held_as(value, spec)
        return jax.device_put(value.astype(spec.dtype), spec.sharding)

    return unflatten({path: parameter(path, spec) for path, spec in flat.items()})


def token_codes(vocabulary: int, correlation: float, rng: np.random.Generator) -> np.ndarray:
    """Unit codes, float32 `[vocabulary, 64]`; two of one cluster have a cosine of about `correlation`."""
    centres = np.linalg.qr(rng.standard_normal((_SLOT, _SLOT)))[0][np.arange(vocabulary) % CLUSTERS]
    own = rng.standard_normal((vocabulary, _SLOT))
    own -= np.sum(own * centres, axis=1, keepdims=True) * centres
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    return (math.sqrt(correlation) * centres + math.sqrt(1 - correlation) * own).astype(np.float32)


def _slot(number: int) -> slice:
    return slice(number * _SLOT, (number + 1) * _SLOT)


def _undo_norm(parts: int, size: int) -> float:
    """The scale that cancels a norm over `size` numbers which hold `parts` unit vectors."""
    return math.sqrt(parts / size)


def _ends(config: ModelConfig, dials: ProbeDials, code: np.ndarray) -> dict[TreePath, np.ndarray | float]:
    embed = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    embed[:, _slot(0)] = code
    embed[:, _CONSTANT] = 1
    head = np.zeros_like(embed)
    head[:, _slot(_ANSWER)] = _HEAD_SCALE * code
    # The stream then holds the token, those before it, the answer and the constant.
    return {
        ("embed",): embed,
        ("head",): head,
        ("final_norm",): _undo_norm(dials.key_tokens + 3, config.hidden_size),
    }


def _distance_layer(config: ModelConfig, dials: ProbeDials) -> dict[TreePath, np.ndarray | float]:
    """Layer 0: head `i` copies the code of the token `i + 1` places back."""
    d, heads, q_rank, kv_rank = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    assert q_rank is not None
    nope = config.qk_nope_head_dim
    q_a = np.zeros((q_rank, d), np.float32)
    q_a[0, _CONSTANT] = 1
    kv_a = np.zeros((config.latent_dim, d), np.float32)
    kv_a[_slot(0), _slot(0)] = np.eye(_SLOT)
    kv_a[kv_rank : kv_rank + 2 * _PAIRS : 2, _CONSTANT] = 1
    q_b = np.zeros((heads, config.qk_head_dim, q_rank), np.float32)
    v_b = np.zeros((heads, config.v_head_dim, kv_rank), np.float32)
    o = np.zeros((d, heads, config.v_head_dim), np.float32)
    angles = inverse_frequencies(config.rope, config.qk_rope_head_dim)[:_PAIRS]
    peak = _PEAK / softmax_scale(config)
    for head in range(dials.key_tokens):
        distance = head + 1
        q_b[head, nope : nope + 2 * _PAIRS : 2, 0] = peak * np.cos(distance * angles)
        q_b[head, nope + 1 : nope + 2 * _PAIRS : 2, 0] = -peak * np.sin(distance * angles)
        v_b[head, :, _slot(0)] = np.eye(_SLOT)
        o[_slot(distance), head] = np.eye(_SLOT)
    attention = {"q_a": q_a, "q_b": q_b, "kv_a": kv_a, "v_b": v_b, "o": o}
    return {
        ("attn_norm",): _undo_norm(2, d),
        ("mlp_norm",): 1.0,
        ("attention", "q_a_norm"): _undo_norm(1, q_rank),
        ("attention", "kv_a_norm"): _undo_norm(1, kv_rank),
        **{("attention", name): value for name, value in attention.items()},
    }


def _matching_layer(
    config: ModelConfig, dials: ProbeDials, rng: np.random.Generator
) -> dict[TreePath, np.ndarray | float]:
    """Layer 1: head 0 finds the place whose tokens before it are the last tokens, and copies its code."""
    d, heads, q_rank, kv_rank = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    assert q_rank is not None
    keys = dials.key_tokens
    q_a = np.zeros((q_rank, d), np.float32)
    kv_a = np.zeros((config.latent_dim, d), np.float32)
    q_b = np.zeros((heads, config.qk_head_dim, q_rank), np.float32)
    k_b = np.zeros((heads, config.qk_nope_head_dim, kv_rank), np.float32)
    v_b = np.zeros((heads, config.v_head_dim, kv_rank), np.float32)
    o = np.zeros((d, heads, config.v_head_dim), np.float32)
    strength = dials.beta / softmax_scale(config)
    for i, rows in enumerate(np.array_split(np.arange(config.qk_nope_head_dim), keys)):
        q_a[_slot(i), _slot(i)] = np.eye(_SLOT)
        kv_a[_slot(i), _slot(i + 1)] = np.eye(_SLOT)
        # With two tokens the code fits the head's share; with three a random projection of it has to do.
        project = np.linalg.qr(rng.standard_normal((_SLOT, _SLOT)))[0][: len(rows)]
        q_b[0, rows, _slot(i)] = project * (strength * _SLOT / len(rows))
        k_b[0, rows, _slot(i)] = project
    kv_a[_slot(3), _slot(0)] = np.eye(_SLOT)
    v_b[0, :, _slot(3)] = np.eye(_SLOT)
    o[_slot(_ANSWER), 0] = np.eye(_SLOT)
    attention = {"q_a": q_a, "q_b": q_b, "kv_a": kv_a, "k_b": k_b, "v_b": v_b, "o": o}
    return {
        ("attn_norm",): _undo_norm(keys + 2, d),
        ("mlp_norm",): 1.0,
        ("attention", "q_a_norm"): _undo_norm(keys, q_rank),
        ("attention", "kv_a_norm"): _undo_norm(keys + 1, kv_rank),
        **{("attention", name): value for name, value in attention.items()},
        ("moe", "router"): rng.standard_normal((config.num_experts, d)).astype(np.float32),
    }
