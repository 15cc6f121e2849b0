"""The cached context of a sequence in the order of its positions, whole on every cp rank."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.pages import copy_pages
from jaxinfer.sharding.collectives import all_gather
from jaxinfer.sharding.layout import Layout


def in_order(
    array: jax.Array,
    layer: jax.Array,
    pages: jax.Array,
    tiles: jax.Array,
    home: jax.Array,
    layout: Layout,
    *,
    tile_pages: int,
    unit: int = 1,
) -> jax.Array:
    """One layer's rows of a sequence, gathered over cp a tile of pages at a time.

    Args:
        array: `[layers, pages, page_size / unit, ...]`, part of the cache; each row stands for `unit` tokens, and
            `unit` divides a stripe.
        layer: int32.
        pages: int32 `[N]`, the sequence's pages on this rank; `tile_pages` divides `N`.
        tiles: int32, how many tiles of pages are gathered, the same on all ranks of cp.
        home: int32, the rank of the sequence's first stripe.

    Returns: `[N page_size cp / unit, ...]`, row `i` for the positions from `i unit` on; anything after
    the last tile and after the end of the sequence.
    """
    if layout.cp == 1:
        return copy_pages(array, layer, pages, tiles * tile_pages).reshape(-1, *array.shape[3:])
    rows, cp, stripe = tile_pages * layout.page_size // unit, layout.cp, layout.stripe // unit
    rest = array.shape[3:]

    def tile(index, context):
        here = lax.dynamic_slice_in_dim(pages, index * tile_pages, tile_pages)
        own = copy_pages(array, layer, here).reshape(1, rows // stripe, stripe, *rest)
        # The ranks in the order in which they take turns.
        turns = jnp.roll(all_gather(own, ("cp",), 0), -home, axis=0)
        ordered = turns.swapaxes(0, 1).reshape(rows * cp, *rest)
        return lax.dynamic_update_slice_in_dim(context, ordered, index * rows * cp, 0)

    whole = jnp.zeros((pages.shape[0] // tile_pages * rows * cp, *rest), array.dtype)
    return lax.fori_loop(0, tiles, tile, whole)
