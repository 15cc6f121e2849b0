"""What is written to the latent cache: normalised, rotated, quantised if the cache is, and put into its place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.latents import Latents, QuantizedLatents, quantize_latents
from jaxinfer.kernels.mosaic import cache_write as mosaic
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.kernels.rope import apply_rope


def cache_write(
    cache: Latents,
    layer: Int[Array, ""],
    page: Int[Array, " T"],
    offset: Int[Array, " T"],
    latents: Float[Array, "T latent"],
    norm: Float[Array, " kv_rank"],
    eps: float,
    cos: Float[Array, "T pairs"],
    sin: Float[Array, "T pairs"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Latents:
    """The cache with the latents of T tokens, in float32 up to the one rounding to what the cache holds.

    Args:
        cache: `[layers, pages, page_size, ...]`.
        layer: int32, the layer written.
        page: `[T]` int32, the page of each token; one beyond the last is not written.
        offset: `[T]` int32, its place in the page.
        latents: `[T, kv_rank + rope]` as projected: neither normalised nor rotated.
        norm: `[kv_rank]`, weight of the latent's norm (see `rms_norm`).
        cos: `[T, rope / 2]` float32, and `sin`: of each token's position (see `apply_rope`).
        implementation: None chooses (see `dispatch`).

    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    reason = mosaic.reason_against(cache, latents, norm.shape[0])
    if dispatch.choose("cache_write", implementation, reason) == "mosaic":
        return mosaic.cache_write(cache, layer, page, offset, latents, norm, eps, cos, sin)
    latent, key = jnp.split(latents.astype(jnp.float32), (norm.shape[0],), axis=-1)
    latent, key = rms_norm(latent, norm, eps), apply_rope(key, cos, sin)
    if isinstance(cache, QuantizedLatents):
        values, scale = quantize_latents(latent, cache.scale.shape[-1], cache.values.dtype)
        rows = QuantizedLatents(values, key, scale)
    else:
        rows = jnp.concatenate((latent, key), axis=-1)

    def put(array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.at[layer, page, offset].set(rows.astype(array.dtype), mode="drop")

    return jax.tree.map(put, cache, rows)
