"""Sparse attention in jnp: the definition with a mask, and the forms that read what is selected only."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.kernels.latents import expand
from jaxinfer.kernels.reference.expansion import E4M3
from jaxinfer.kernels.reference.mla_prefill import mla_prefill
from jaxinfer.kernels.reference.quantize import cast, scale_of
from jaxinfer.kernels.reference.rows import map_active

_TILE = 512
"""Keys that the window expands at a time."""

_SCORE_BYTES = 256 * 2**20

_FLOOR = 2.0**-60
"""Of what units of queries are made for: rotary parts over them stay in range."""

_SAMPLED = 32
"""Query blocks whose lists the mean of latents is of."""

_QUERY_BLOCKS = 8
"""Query blocks whose blocks are gathered at a time, and as many as their scores have room for."""


def mla_masked(q, context, k_b, v_b, mask, *, scale):
    """The definition: dense attention with the selection as a mask.

    `q [T, H, qk]`, `context [S, latent]` (all of it written), `k_b` and `v_b` as in `jaxinfer.kernels.mla_prefill`, and
    `mask [T, H, S]`, which keys each query reads.  With the causal mask it is the reference of dense attention bit for
    bit.  Returns output `[T, H, v]` and log-sum-exp `[T, H]`, both float32.
    """
    k, v = _expand(context, k_b, v_b, q.dtype)
    scores = _scores("qhd,shd->hqs", q, k, scale, mask.swapaxes(0, 1))
    return _softmax("hqs,shv->qhv", scores, v)


def mla_window(q, context, k_b, v_b, first, limit, shared, before, *, scale):
    """See `jaxinfer.kernels.mla_sparse`: the shared keys, then tiles of the others, as many as the ranges span."""
    heads, tile = q.shape[1], min(_TILE, context.shape[0])
    context = jnp.pad(context, ((0, -context.shape[0] % tile), (0, 0)))
    seen = limit > first

    def visit(index, partial):
        start = index * tile
        keys = start + jnp.arange(tile)
        rows = lax.dynamic_slice_in_dim(context, start, tile)
        written = (keys >= jnp.min(jnp.where(seen, first, keys[-1] + 1))) & (keys < jnp.max(jnp.where(seen, limit, 0)))
        k, v = _expand(jnp.where(written[:, None], rows, 0), k_b, v_b, q.dtype)

        def attend(item):
            q, first, limit = item
            mask = (keys >= first[:, None]) & (keys < limit[:, None])
            scores = _scores("qhd,shd->hqs", q, k, scale, mask[None])
            return _softmax("hqs,shv->qhv", scores, v)

        def nothing(item):
            shape = item[0].shape[:2]
            return jnp.zeros((*shape, v.shape[-1]), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)

        def some(item):
            _, first, limit = item
            return lax.cond(jnp.any((first < start + tile) & (limit > start) & (limit > first)), attend, nothing, item)

        out, lse = _by_queries(some, (q, first, limit), heads * tile * 4)
        return _merge(partial[0], partial[1], out, lse)

    start = jnp.min(jnp.where(seen, first, context.shape[0])) // tile
    end = (jnp.max(jnp.where(seen, limit, 0)) + tile - 1) // tile
    return lax.fori_loop(start, end, visit, mla_prefill(q, shared, k_b, v_b, before, scale=scale))


def mla_blocks(q, context, blocks, free, unit=None, *, block, kv_rank, scale):
    """See `jaxinfer.kernels.mla_sparse`: the listed blocks are gathered, for some query blocks at a time.

    Of e4m3 the numbers are rounded first: with powers of two as units they are numbers of bfloat16 as well.
    """
    center = jnp.zeros((kv_rank,), jnp.float32)
    offset = jnp.zeros(q.shape[:3], jnp.float32)
    if unit is not None:
        center = center_of(context, blocks, block, kv_rank)
        offset = scale * jnp.einsum("nqhc,c->nqh", q[..., :kv_rank], center, precision=lax.Precision.HIGHEST)
        q, context = _rounded(q, context, center, unit)
    _, queries, heads, dim = q.shape
    groups, listed = blocks.shape[1:]
    keys, open_keys = context.reshape(-1, block, dim), free.reshape(-1, block)

    def of_query_block(item):
        q, blocks = item

        def of_group(q, blocks):
            seen = (open_keys.at[blocks].get(mode="clip") & (blocks >= 0)[:, None]).reshape(-1)
            rows = keys.at[blocks].get(mode="clip").reshape(-1, dim)
            rows = jnp.where(seen[:, None], rows, 0).astype(q.dtype)
            scores = _scores("qhd,sd->hqs", q, rows, scale, seen[None, None])
            return _softmax("hqs,sd->qhd", scores, rows[:, :kv_rank].astype(jnp.float32) + center)

        split = q.reshape(queries, groups, heads // groups, dim)
        out, lse = jax.vmap(of_group, in_axes=(1, 0), out_axes=1)(split, blocks)
        return out.reshape(queries, heads, kv_rank).astype(q.dtype), lse.reshape(queries, heads)

    each = listed * block * 4 * (queries * heads + groups * dim)
    batch = max(1, min(_QUERY_BLOCKS, _SCORE_BYTES // each))
    active = jnp.any(blocks >= 0, axis=(1, 2))
    out, lse = map_active(of_query_block, (q, blocks), active, batch, (0.0, -jnp.inf))
    return out, lse + offset


def unit_of_row(largest):
    """The power of two over which a query's latent part is rounded to e4m3, of the largest of its magnitudes."""
    return scale_of(jnp.maximum(largest, _FLOOR), E4M3, power_of_two=True)


def center_of(context, blocks, block, rank):
    """A mean of latents, float32 `[rank]`: those of a block of each list of some query blocks.

    Attention may leave any constant away from all latents: it comes back as a part of the output, and of all scores.
    Without their mean, latents are of both signs, and so are what e4m3 rounds of them, of the weights that multiply
    them, and of sums.
    """
    some = np.unique(np.linspace(0, len(blocks) - 1, _SAMPLED).astype(np.int32))
    chosen = blocks[some, :, np.arange(len(some)) % blocks.shape[2]]
    rows = context.reshape(-1, block, context.shape[1]).at[chosen].get(mode="clip")[..., :rank].astype(jnp.float32)
    counted = (chosen >= 0)[..., None, None] & jnp.isfinite(rows)
    total = jnp.sum(jnp.where(counted, rows, 0.0), axis=(0, 1, 2))
    return total / jnp.maximum(jnp.sum(counted, axis=(0, 1, 2)), 1)


def latents_to_e4m3(latents, center, unit):
    """Latents without their center, over `unit`, in e4m3, saturated."""
    return cast((latents.astype(jnp.float32) - center) / unit, E4M3)


def _rounded(q, context, center, unit):
    """Queries and context with latent parts as e4m3 has them."""
    rank = len(center)
    latent = q[..., :rank].astype(jnp.float32)
    row_unit = unit_of_row(jnp.max(jnp.abs(latent), axis=-1, keepdims=True))
    # Behind barriers: XLA leaves out a conversion there and back.
    latent, keys = lax.optimization_barrier(
        ((latent / row_unit).astype(E4M3), latents_to_e4m3(context[:, :rank], center, unit))
    )
    latent, keys = latent.astype(jnp.float32) * row_unit, keys.astype(jnp.float32) * unit
    return (
        jnp.concatenate((latent.astype(q.dtype), q[..., rank:]), axis=-1),
        jnp.concatenate((keys.astype(context.dtype), context[:, rank:]), axis=-1),
    )


def listed_keys(q, cache, layer, pages, offsets, *, scale):
    """See `jaxinfer.kernels.mla_sparse`: rows, weights and their shift."""
    seen = pages >= 0
    rows = jax.tree.map(lambda array: array.at[layer, jnp.maximum(pages, 0), offsets].get(mode="clip"), cache)
    rows = jnp.where(seen[..., None], expand(rows, q.dtype), 0).astype(q.dtype)
    scores = _scores("bhd,bkd->bhk", q, rows, scale, seen[:, None])
    top = jnp.max(scores, axis=-1)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    return rows, jnp.exp(scores - shift[..., None]), shift


def listed_values(rows, weights, shift, open_keys, *, kv_rank):
    """See `jaxinfer.kernels.mla_sparse`."""
    # The place after the values is 1 of every key that counts: one product adds up the weights as well.
    values = jnp.where(jnp.arange(rows.shape[-1]) < kv_rank, rows.astype(jnp.float32), 1.0)
    values = jnp.where(open_keys[..., None], values, 0.0)
    out = jnp.einsum("bhk,bkd->bhd", weights, values, precision=lax.Precision.HIGHEST)
    out, total = out[..., :kv_rank], out[..., kv_rank]
    return out / jnp.where(total == 0.0, 1.0, total)[..., None], shift + jnp.log(total)


def _expand(context, k_b, v_b, dtype):
    """Keys `[S, H, qk]` of type `dtype` and values `[S, H, v]` in float32, rounded to `dtype` before."""
    keys, rank = context.shape[0], k_b.shape[2]
    context = context.astype(dtype)
    nope = _dot("sc,hnc->shn", context[:, :rank], k_b).astype(dtype)
    rope = jnp.broadcast_to(context[:, None, rank:], (keys, k_b.shape[0], context.shape[1] - rank))
    v = _dot("sc,hvc->shv", context[:, :rank], v_b).astype(dtype).astype(jnp.float32)
    return jnp.concatenate((nope, rope), axis=-1), v


def _scores(equation, q, k, scale, mask):
    return jnp.where(mask, _dot(equation, q, k) * scale, -jnp.inf)


def _softmax(equation, scores, values):
    """Output and log-sum-exp of scores `[H, ..., S]`; both have the heads last but for the numbers of a value."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum(equation, weights, values, precision=lax.Precision.HIGHEST)
    out = out / jnp.where(total == 0.0, 1.0, total).T[..., None]
    return out, (top[..., 0] + jnp.log(total)).T


def _by_queries(function, arrays, bytes_per_query):
    """`function` over as many queries at a time as its scores have room for."""
    tokens = arrays[0].shape[0]
    size = tokens
    while size % 2 == 0 and size * bytes_per_query > _SCORE_BYTES:
        size //= 2
    split = [array.reshape(tokens // size, size, *array.shape[1:]) for array in arrays]
    out, lse = lax.map(function, tuple(split))
    return out.reshape(tokens, *out.shape[2:]), lse.reshape(tokens, -1)


def _merge(out_a, lse_a, out_b, lse_b):
    """See `jaxinfer.sharding.collectives.merge`."""
    top = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    # The weights add up to 1, however large the log-sum-exps are whose last bit is missing.
    scale = 1.0 / jnp.where(total == 0.0, 1.0, total)
    out = out_a * (weight_a * scale)[..., None] + out_b * (weight_b * scale)[..., None]
    return out, shift + jnp.log(total)


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
