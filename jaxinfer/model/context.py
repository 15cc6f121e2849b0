"""The cached context of a sequence in the order of its positions, whole on every cp rank."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.pages import copy_pages
from jaxinfer.sharding.collectives import all_gather
from jaxinfer.sharding.layout import Layout


class Part(NamedTuple):
    """One layer of a part of the cache."""

    array: jax.Array
    """`[layers, pages, page_size / unit, ...]`."""
    layer: jax.Array
    """int32."""
    unit: int = 1
    """Tokens that a row stands for; it divides a stripe."""


def in_order(
    parts: Sequence[Part],
    pages: jax.Array,
    tiles: jax.Array,
    home: jax.Array,
    layout: Layout,
    *,
    tile_pages: int,
) -> list[jax.Array]:
    """The rows of a sequence in some parts of the cache, gathered over cp a tile of pages at a time.

    All parts in one loop: loops that do not depend on each other may run in another order on another device, which
    then wait for each other for ever (XLA:CPU orders collectives by when they start, not loops that hold them).

    Args:
        pages: int32 `[N]`, the sequence's pages on this rank; `tile_pages` divides `N`.
        tiles: int32, how many tiles of pages are gathered, the same on all ranks of cp.
        home: int32, the rank of the sequence's first stripe.

    Returns: of each part `[N page_size cp / unit, ...]`, row `i` for the positions from `i unit` on; anything after
    the last tile and after the end of the sequence.
    """
    if layout.cp == 1:
        return [
            copy_pages(array, layer, pages, tiles * tile_pages).reshape(-1, *array.shape[3:])
            for array, layer, _ in parts
        ]
    cp = layout.cp

    def of_part(part, here):
        rows, stripe = tile_pages * layout.page_size // part.unit, layout.stripe // part.unit
        rest = part.array.shape[3:]
        own = copy_pages(part.array, part.layer, here).reshape(1, rows // stripe, stripe, *rest)
        # The ranks in the order in which they take turns.
        turns = jnp.roll(all_gather(own, ("cp",), 0), -home, axis=0)
        return turns.swapaxes(0, 1).reshape(rows * cp, *rest)

    def tile(index, contexts):
        here = lax.dynamic_slice_in_dim(pages, index * tile_pages, tile_pages)
        found = [of_part(part, here) for part in parts]
        return [
            lax.dynamic_update_slice_in_dim(context, rows, index * rows.shape[0], 0)
            for context, rows in zip(contexts, found, strict=True)
        ]

    def empty(part):
        return jnp.zeros((pages.shape[0] * layout.page_size * cp // part.unit, *part.array.shape[3:]), part.array.dtype)

    return lax.fori_loop(0, tiles, tile, [empty(part) for part in parts])
