"""Latents of multi-head latent attention as a cache holds them: one array, or quantised with scales beside."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.pages import copy_pages
from jaxinfer.kernels.reference.quantize import AMAX_FLOOR, cast, scale_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedLatents:
    """Latents in 8 bits, a pytree of three arrays with the same leading dimensions.

    `values [..., kv_rank]` of int8 or an 8-bit float, `scale [..., groups]` float32, each for `kv_rank / groups`
    successive values, and the rotated keys `rope [..., rope]`.  `jaxinfer.configs.kv_format` says which there are.
    """

    values: Any
    rope: Any
    scale: Any


Latents = Float[Array, "... latent"] | QuantizedLatents
"""Rows of `kv_rank` numbers of the latent and the rotated key, in one array or quantised."""


def quantize_latents(latent: Float[Array, "*rows kv_rank"], groups: int, dtype) -> tuple[jax.Array, jax.Array]:
    """`latent / scale` in 8 bits, and float32 scales `[..., groups]`; rounded as `quantize` rounds."""
    parts = latent.astype(jnp.float32).reshape(*latent.shape[:-1], groups, -1)
    scale = scale_of(jnp.maximum(jnp.max(jnp.abs(parts), axis=-1), AMAX_FLOOR), dtype, False)
    return cast(parts / scale[..., None], dtype).reshape(latent.shape), scale


def expand(latents: Latents, dtype) -> jax.Array:
    """Rows `[..., kv_rank + rope]`: quantised ones multiplied out and rounded to `dtype`, others as they are."""
    if not isinstance(latents, QuantizedLatents):
        return latents
    values, scale = latents.values, latents.scale
    parts = values.astype(jnp.float32).reshape(*scale.shape, -1) * scale[..., None]
    return jnp.concatenate((parts.reshape(values.shape).astype(dtype), latents.rope.astype(dtype)), axis=-1)


def take_pages(cache: Latents, layer: Int[Array, ""], pages: Int[Array, "*pages"]) -> Latents:
    """The latents `[*pages, page_size, ...]` of pages of a cache `[layers, pages, page_size, ...]`."""
    return jax.tree.map(lambda array: copy_pages(array, layer, pages), cache)


def page_size(cache: Latents) -> int:
    return jax.tree.leaves(cache)[0].shape[2]
