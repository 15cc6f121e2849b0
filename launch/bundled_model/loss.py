"""The training loss: cross-entropy by source in chunks, of the next token and of the one after, and the z-loss."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.configs.model import ModelConfig
from launch.bundled_model import model
from launch.bundled_model.data import SOURCES

SOURCE_WEIGHTS = (0.34, 0.19, 0.12, 0.03, 0.06, 0.11, 0.07, 0.04, 0.04)
"""What the mean cross-entropy of each of SOURCES counts in the loss.

By source, not by token: a sequence of a task has few answers, and the longer it is the smaller is their share.
"""
Z_LOSS = 1e-4
BALANCE_LOSS = 3e-2
"""On every sequence (arXiv 2412.19437, equation 17).  At V3's 1e-4 the experts of so small a model divide the kinds of
text among them: balanced over a batch, and 2.2 to 3.3 times the mean for the busiest within one kind."""
CHUNK = 16384
"""Tokens whose logits exist at a time."""


class Scores(NamedTuple):
    """Sums over the scored tokens of each source, float32 `[sources]` each."""

    nll: jax.Array
    correct: jax.Array
    count: jax.Array


@jax.custom_vjp
def cross_entropy(
    hidden: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, source: jax.Array
) -> tuple[jax.Array, Scores]:
    """`sum weights * (nll + Z_LOSS * logsumexp^2)`, and plain sums by source over tokens of positive weight.

    Args: `hidden [N, d]`, `table [V, d]` float32, `targets`, `source` int32 `[N]`, `weights` float32 `[N]`.
    The gradient is made along with the value, so that logits are computed once and never kept.
    """
    return _forward(hidden, table, targets, weights, source)[0]


def _forward(hidden, table, targets, weights, source):
    tokens, dim = hidden.shape
    chunk = min(CHUNK, tokens)
    if tokens % chunk:
        raise ValueError(f"expected a multiple of {chunk} tokens, got {tokens}")
    low = table.astype(hidden.dtype)

    def step(gradient, piece):
        h, target, weight, source = piece
        logits = jnp.einsum("nd,vd->nv", h, low, preferred_element_type=jnp.float32)
        top = jnp.max(logits, axis=-1)
        lse = top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1))
        at = jnp.arange(logits.shape[1]) == target[:, None]
        aimed = jnp.sum(jnp.where(at, logits, 0.0), axis=-1)
        nll = lse - aimed
        slope = (weight * (1 + 2 * Z_LOSS * lse))[:, None] * jnp.exp(logits - lse[:, None])
        slope = (slope - jnp.where(at, weight[:, None], 0.0)).astype(h.dtype)
        gradient += jnp.einsum("nv,nd->vd", slope, h, preferred_element_type=jnp.float32)
        of = (weight > 0)[:, None] & (source[:, None] == jnp.arange(len(SOURCES)))
        sums = Scores(*(jnp.sum(of * value[:, None], axis=0) for value in (nll, aimed >= top, jnp.ones_like(nll))))
        return gradient, (jnp.sum(weight * (nll + Z_LOSS * lse**2)), sums, jnp.einsum("nv,vd->nd", slope, low))

    pieces = jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), (hidden, targets, weights, source))
    gradient, (loss, sums, slopes) = lax.scan(step, jnp.zeros(table.shape, jnp.float32), pieces)
    value = jnp.sum(loss), jax.tree.map(lambda a: jnp.sum(a, axis=0), sums)
    return value, (slopes.reshape(tokens, dim), gradient)


def _backward(residuals, cotangents):
    slopes, gradient = residuals
    scale = cotangents[0]
    return (slopes * scale.astype(slopes.dtype), gradient * scale, None, None, None)


cross_entropy.defvjp(_forward, _backward)


def token_weights(answer: jax.Array, source: jax.Array) -> jax.Array:
    """The weight of each target, float32 `[B, T]`, so that each source present counts as SOURCE_WEIGHTS says.

    Args: `answer [B, T]`, 0 where a token is no target; `source` int32 `[B]`.
    """
    scored = answer > 0
    of = source[:, None] == jnp.arange(len(SOURCES))
    counts = jnp.sum(jnp.sum(scored, axis=1, dtype=jnp.float32)[:, None] * of, axis=0)
    share = jnp.where(counts > 0, jnp.array(SOURCE_WEIGHTS), 0.0)
    per_token = share / jnp.sum(share) / jnp.maximum(counts, 1.0)
    return scored * per_token[source][:, None]


class Report(NamedTuple):
    """What a step says of itself."""

    scores: Scores
    mtp_scores: Scores
    load: jax.Array
    """Float32 `[layers, E]`, the multi-token-prediction layer last."""
    loss: jax.Array


def training_loss(
    params: model.Tree,
    batch: Any,
    mtp_weight: jax.Array,
    *,
    config: ModelConfig,
    dtype: Any,
    attention: model.Attention,
) -> tuple[jax.Array, Report]:
    """The loss of a batch (see `data.Batch`), of float32 parameters computed in `dtype`."""
    low = model.cast(params, dtype)
    tokens = batch.tokens.astype(jnp.int32)
    length = tokens.shape[1] - 2

    def entropy(hidden, ahead):
        at = slice(ahead, ahead + length)
        weights = token_weights(batch.answer[:, at], batch.source)
        source = jnp.broadcast_to(batch.source[:, None], weights.shape)
        flat = [a.reshape(-1) for a in (tokens[:, at], weights, source)]
        return cross_entropy(hidden.reshape(-1, hidden.shape[-1]), low["embed"], *flat)

    now, after = slice(0, length), slice(1, length + 1)
    hidden, routing = model.hidden_states(config, low, tokens[:, now], batch.positions[:, now], attention)
    loss, scores = entropy(hidden, 1)
    further, mtp_routing = model.mtp_hidden_states(
        config, low, hidden, tokens[:, after], batch.positions[:, after], attention
    )
    mtp_loss, mtp_scores = entropy(further, 2)
    loss += mtp_weight * mtp_loss + BALANCE_LOSS * (routing.balance + mtp_routing.balance)
    return loss, Report(scores, mtp_scores, jnp.concatenate((routing.load, mtp_routing.load)), loss)


def correct_tokens(
    params: model.Tree, batch: Any, *, config: ModelConfig, dtype: Any, attention: model.Attention
) -> tuple[jax.Array, jax.Array]:
    """Whether each target is the likeliest token, bool `[B, T]`, and its negative log-likelihood in nats, float32."""
    low = model.cast(params, dtype)
    tokens = batch.tokens.astype(jnp.int32)
    length = tokens.shape[1] - 2
    hidden, _ = model.hidden_states(config, low, tokens[:, :length], batch.positions[:, :length], attention)
    chunk = min(CHUNK, hidden.shape[0] * length)

    def step(piece):
        h, target = piece
        logits = model.logits(low, h)
        aimed = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return aimed >= jnp.max(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1) - aimed

    pieces = hidden.reshape(-1, chunk, hidden.shape[-1]), tokens[:, 1 : length + 1].reshape(-1, chunk)
    return jax.tree.map(lambda a: a.reshape(-1, length), lax.map(step, pieces))
