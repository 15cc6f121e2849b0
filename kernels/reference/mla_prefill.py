"""`mla_prefill` in jnp: blocked over the queries, so that the scores of a long chunk need not exist at once."""

import jax.numpy as jnp
from jax import lax

SCORE_BYTES = 256 * 2**20
"""Scores of one block of queries, unless one query has more."""


def mla_prefill(q, latents, k_b, v_b, key_limit, *, scale):
    """See `jaxinfer.kernels.mla_prefill`.

    Queries, keys and values are rounded to the type of `q`; the weights of the softmax are not: rounded relative to the
    largest score of a block, they would make the answer depend on how the keys are divided into blocks and ranks.
    """
    tokens, heads, _ = q.shape
    v_dim = v_b.shape[1]

    def visible():
        return _attend(q, latents, k_b, v_b, key_limit, scale)

    def nothing():
        return jnp.zeros((tokens, heads, v_dim), jnp.float32), jnp.full((tokens, heads), -jnp.inf, jnp.float32)

    return lax.cond(jnp.any(key_limit > 0), visible, nothing)


def _attend(q, latents, k_b, v_b, key_limit, scale):
    tokens, heads, _ = q.shape
    keys, rank = latents.shape[0], k_b.shape[2]
    # Memory that was never written may hold NaN, which a weight of zero does not silence.
    written = jnp.arange(keys) < jnp.max(key_limit)
    latents = jnp.where(written[:, None], latents, 0).astype(q.dtype)
    nope = _dot("sc,hnc->shn", latents[:, :rank], k_b).astype(q.dtype)
    rope = jnp.broadcast_to(latents[:, None, rank:], (keys, heads, latents.shape[1] - rank))
    k = jnp.concatenate((nope, rope), axis=-1)
    v = _dot("sc,hvc->shv", latents[:, :rank], v_b).astype(q.dtype).astype(jnp.float32)

    def rows(block):
        q, limit = block

        def attend():
            scores = _dot("qhd,shd->hqs", q, k) * scale
            scores = jnp.where(jnp.arange(keys) < limit[None, :, None], scores, -jnp.inf)
            top = jnp.max(scores, axis=-1, keepdims=True)
            top = jnp.where(jnp.isneginf(top), 0.0, top)
            weights = jnp.exp(scores - top)
            total = jnp.sum(weights, axis=-1)
            out = jnp.einsum("hqs,shv->qhv", weights, v, precision=lax.Precision.HIGHEST)
            out = out / jnp.where(total == 0.0, 1.0, total).T[..., None]
            return out, (top[..., 0] + jnp.log(total)).T

        def skip():
            shape = (q.shape[0], heads)
            return jnp.zeros((*shape, v.shape[-1]), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)

        return lax.cond(jnp.any(limit > 0), attend, skip)

    block = _query_block(tokens, heads * keys * 4)
    split = tokens // block
    out, lse = lax.map(rows, (q.reshape(split, block, *q.shape[1:]), key_limit.reshape(split, block)))
    return out.reshape(tokens, heads, -1), lse.reshape(tokens, heads)


def _query_block(tokens: int, bytes_per_query: int) -> int:
    """The largest block of queries, the tokens halved as often as it takes, whose scores fit the budget."""
    block = tokens
    while block % 2 == 0 and block * bytes_per_query > SCORE_BYTES:
        block //= 2
    return block


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
