"""`mla_decode` in jnp: an online softmax over tiles of pages, as many as the longest sequence has."""

import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels import latents

_TILE_TOKENS = 1024
_TILE_BYTES = 128 * 2**20


def mla_decode(q, cache, layer, page_table, lengths, *, kv_rank, scale):
    """See `jaxinfer.kernels.mla_decode`.

    Keys are rounded to the type of `q`; the weights of the softmax are not (see the reference of `mla_prefill`).
    """
    batch, tokens, heads, dim = q.shape
    page_size, num_pages = latents.page_size(cache), page_table.shape[1]
    rows = tokens * heads
    fitting = _TILE_BYTES // (batch * page_size * (dim + 2 * rows) * 4)
    tile_pages = max(1, min(num_pages, fitting, _TILE_TOKENS // page_size))
    tile = tile_pages * page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -num_pages % tile_pages)))
    # How many keys each row may see: its own token's is the last.
    limits = jnp.repeat(lengths[:, None] - jnp.arange(tokens - 1, -1, -1), heads, axis=1)
    q = q.reshape(batch, rows, dim)
    if isinstance(cache, latents.QuantizedLatents) and cache.values.dtype == jnp.int8:
        q = _rounded(q, kv_rank)

    def step(index, state):
        out, top, total = state
        pages = lax.dynamic_slice_in_dim(page_table, index * tile_pages, tile_pages, 1)
        keys = latents.expand(latents.take_pages(cache, layer, pages), q.dtype).reshape(batch, tile, dim)
        position = index * tile + jnp.arange(tile)
        # Memory that was never written may hold NaN, which a weight of zero does not silence.
        keys = jnp.where(position[:, None] < lengths[:, None, None], keys, 0).astype(q.dtype)
        scores = jnp.einsum(
            "brd,bsd->brs", q, keys, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
        )
        scores = scores * scale
        scores = jnp.where(position < limits[..., None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(top - shift)
        values = keys[..., :kv_rank].astype(jnp.float32)
        part = jnp.einsum("brs,bsd->brd", weights, values, precision=lax.Precision.HIGHEST)
        return out * rescale[..., None] + part, new_top, total * rescale + jnp.sum(weights, axis=-1)

    start = (
        jnp.zeros((batch, rows, kv_rank), jnp.float32),
        jnp.full((batch, rows), -jnp.inf, jnp.float32),
        jnp.zeros((batch, rows), jnp.float32),
    )
    tiles = (jnp.max(lengths) + tile - 1) // tile
    out, top, total = lax.fori_loop(0, tiles, step, start)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    return out.reshape(batch, tokens, heads, kv_rank), lse.reshape(batch, tokens, heads)


def _rounded(q, kv_rank):
    """Queries in float32, their latent part rounded to int8: products with int8 keys are exact in float32."""
    latent, rope = jnp.split(q.astype(jnp.float32), (kv_rank,), axis=-1)
    values, scale = latents.quantize_latents(latent, 1, jnp.int8)
    return jnp.concatenate((values.astype(jnp.float32) * scale, rope), axis=-1)
