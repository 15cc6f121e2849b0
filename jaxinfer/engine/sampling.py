"""From logits to tokens, on the device, each row by the rules of its own request."""

from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.request import MAX_LOGPROBS

Array = Any
"""numpy on the host, jax on the device."""


def _row(default: Any, dtype: Any) -> Any:
    """A field whose array has `dtype`; rows that hold no request have `default`."""
    return field(metadata={"default": default, "dtype": dtype})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """How to choose the next token of each row: arrays `[R, N]`."""

    temperature: Array = _row(0.0, np.float32)
    """0: the most likely token."""
    top_k: Array = _row(0, np.int32)
    """0: off."""
    top_p: Array = _row(1.0, np.float32)
    min_p: Array = _row(0.0, np.float32)
    seed: Array = _row(0, np.uint32)
    index: Array = _row(0, np.int32)
    """How many tokens the request has generated: with `seed`, it decides the draw."""


def pack_rows(rows: SamplingRows) -> np.ndarray:
    """The bits of all arrays of the host in one, int32 `[R, 6, N]`: one transfer in the place of six."""
    return np.stack([getattr(rows, item.name).view(np.int32) for item in fields(rows)], axis=1)


def unpack_rows(packed: jax.Array) -> SamplingRows:
    """What `pack_rows` has packed, on the device."""
    return SamplingRows(
        **{
            item.name: jax.lax.bitcast_convert_type(packed[:, number], item.metadata["dtype"])
            for number, item in enumerate(fields(SamplingRows))
        }
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRules:
    """Changes to the logits that depend on the history: `[R, N]`, and `[R, N, vocab]` where said."""

    presence: Array = _row(0.0, np.float32)
    frequency: Array = _row(0.0, np.float32)
    repetition: Array = _row(1.0, np.float32)
    bias: Array = _row(0.0, np.float32)
    """`[R, N, vocab]`, added; -inf forbids a token."""
    history: Array = _row(0, np.int32)
    """`[R, N, vocab]`, twice the number of times the token was generated, plus 1 if it is in the prompt."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """What was sampled, arrays `[R, N]`; the last four only where logprobs were asked for."""

    token: jax.Array
    finite: jax.Array
    """False: the logits of the row held NaN or infinity, and the token means nothing."""
    logprob: jax.Array | None = None
    rank: jax.Array | None = None
    """1: the most likely token."""
    top_token: jax.Array | None = None
    """`[R, N, MAX_LOGPROBS]`, most likely first."""
    top_logprob: jax.Array | None = None


def sample(logits: jax.Array, rows: SamplingRows, rules: LogitRules | None) -> Choice:
    """Chooses a token for each row of `logits [R, N, vocab]` float32.

    With `rules` the logits are changed by them first, and log-probabilities (of the unchanged logits) are reported.
    """
    changed = logits if rules is None else apply_rules(logits, rules)
    greedy = jnp.argmax(changed, axis=-1).astype(jnp.int32)

    def draw():
        return jax.vmap(jax.vmap(_draw))(changed, rows)

    token = jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy)
    token = jnp.where(rows.temperature > 0, token, greedy)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    if rules is None:
        return Choice(token, finite)
    return Choice(token, finite, *score(logits, token))


def apply_rules(logits: jax.Array, rules: LogitRules) -> jax.Array:
    """Bias, then repetition (arXiv 1909.05858), frequency and presence penalties as OpenAI defines them."""
    logits = logits + rules.bias
    generated = (rules.history // 2).astype(jnp.float32)
    repetition = rules.repetition[..., None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(rules.history > 0, penalised, logits)
    return logits - rules.frequency[..., None] * generated - rules.presence[..., None] * (generated > 0)


def score(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probability and rank of `token [R, N]`, and the `MAX_LOGPROBS` most likely tokens with theirs."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token[..., None], axis=-1)
    rank = jnp.sum(logprobs > chosen, axis=-1) + 1
    top_logprob, top_token = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return chosen[..., 0], rank, top_token, top_logprob


def _draw(logits: jax.Array, row: SamplingRows) -> jax.Array:
    """One token of `logits [vocab]`: min-p, then top-k, then top-p (arXiv 1904.09751), then a Gumbel draw."""
    scaled = logits / jnp.where(row.temperature > 0, row.temperature, 1.0)
    order = jnp.argsort(-scaled, stable=True)
    logprobs = jax.nn.log_softmax(scaled[order])
    place = jnp.arange(logits.shape[0])
    keep = (place < jnp.where(row.top_k > 0, row.top_k, logits.shape[0])) & (
        logprobs >= logprobs[0] + jnp.log(row.min_p)
    )
    logprobs = jax.nn.log_softmax(jnp.where(keep, logprobs, -jnp.inf))
    before = jnp.cumsum(jnp.exp(logprobs)) - jnp.exp(logprobs)
    logprobs = jnp.where((before < row.top_p) | (place == 0), logprobs, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(row.seed), row.index)
    return order[jnp.argmax(logprobs + jax.random.gumbel(key, logprobs.shape))].astype(jnp.int32)
