"""`mla_prefill` in jnp: blocked over the queries, so that the scores of a long chunk need not exist at once."""

import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.reference.expansion import expand

SCORE_BYTES = 256 * 2**20
"""Scores of one block of queries, unless one query has more."""


def mla_prefill(q, latents, k_b, v_b, key_limit, *, scale):
    """See `jaxinfer.kernels.mla_prefill`.

    Queries, keys and values are rounded to the type of `q`; the weights of the softmax are not: rounded relative to the
    largest score of a block, they would make the answer depend on how the keys are divided into blocks and ranks.
    """

    def expanded():
        rank, rope = k_b.shape[2], latents.shape[1] - k_b.shape[2]
        present = _written(latents, key_limit).astype(q.dtype)
        nope = _dot("sc,hnc->shn", present[:, :rank], k_b).astype(q.dtype)
        shared = jnp.broadcast_to(present[:, None, rank:], (*nope.shape[:2], rope))
        v = _dot("sc,hvc->shv", present[:, :rank], v_b).astype(q.dtype).astype(jnp.float32)
        return q, jnp.concatenate((nope, shared), axis=-1), v

    return _attend_visible(expanded, key_limit, (*q.shape[:2], v_b.shape[1]), scale)


def mla_prefill_e4m3(q, latents, k_b, v_b, key_limit, *, scale):
    """The same with queries, keys and values rounded to e4m3 by `expansion.expand`; their products are exact."""

    def expanded():
        made = expand(q, _written(latents, key_limit), k_b, v_b)
        queries = jnp.concatenate((made.q, made.q_rope), axis=-1).astype(jnp.float32) * made.q_scale.T[..., None]
        shared = jnp.broadcast_to(made.k_rope[:, None], (*made.k.shape[:2], made.k_rope.shape[1]))
        v = made.v.astype(jnp.float32) * made.v_scale[:, None, None]
        # bfloat16 holds e4m3 times a power of two.
        keys = jnp.concatenate((made.k, shared), axis=-1).astype(jnp.bfloat16)
        return queries.astype(jnp.bfloat16), keys, v.transpose(2, 0, 1)

    return _attend_visible(expanded, key_limit, (*q.shape[:2], v_b.shape[1]), scale)


def _attend_visible(expanded, key_limit, shape, scale):
    """Attention of `q, k, v = expanded()`; 0 and -inf where no query sees anything."""

    def visible():
        q, k, v = expanded()
        return _attend(q, k, v, key_limit, scale)

    def nothing():
        return jnp.zeros(shape, jnp.float32), jnp.full(shape[:2], -jnp.inf, jnp.float32)

    return lax.cond(jnp.any(key_limit > 0), visible, nothing)


def _written(latents, key_limit):
    """Memory that was never written may hold NaN, which a weight of zero does not silence."""
    written = jnp.arange(latents.shape[0]) < jnp.max(key_limit)
    return jnp.where(written[:, None], latents, 0)


def _attend(q, k, v, key_limit, scale):
    """Queries `[T, H, d]` and keys `[S, H, d]` of one type, values `[S, H, v]` float32."""
    tokens, heads, _ = q.shape
    keys = k.shape[0]

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
