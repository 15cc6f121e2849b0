"""Lists of block numbers: ascending, with -1 at the end where there are fewer than the list has places."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def ascending(blocks: Int[Array, "... N"]) -> Int[Array, "... N"]:
    """Block numbers in order, those that are negative as -1 at the end."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(blocks < 0, last, blocks).astype(jnp.int32), axis=-1)
    return jnp.where(ordered == last, -1, ordered)


_WIDE, _SHORT = 4, 128
"""Rows up to so many times as long as the list that is wanted of them are sorted whole, and all up to so long: there
it is the number of kernels that takes time.  With fewer than two times there might be fewer pieces than places."""


def sorted_whole(k: int) -> int:
    """How long a row may be for `top_k` to sort it whole."""
    return max(_WIDE * k, _SHORT)


def top_k(values: Float[Array, "... N"] | Int[Array, "... N"], k: int) -> tuple[jax.Array, jax.Array]:
    """The same as `lax.top_k` (largest first, of equal ones the earlier), which on a GPU sorts whole rows.

    The `k` largest lie in the `k` pieces of a row whose largest are the largest (of equal ones the earlier): only the
    largest of each piece are sorted, and then what these pieces hold.

    Returns: values `[..., k]` and their places in the row, int32.
    """
    size = values.shape[-1]
    if k == 0 or size <= sorted_whole(k):
        found, places = lax.top_k(values, k)
        return found, places
    piece = 2
    while size > piece * sorted_whole(k):
        piece *= 2
    # What is added at the end is no larger than anything, and there are k before it.
    least = -jnp.inf if jnp.issubdtype(values.dtype, jnp.floating) else jnp.iinfo(values.dtype).min
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -size % piece)]
    pieces = jnp.pad(values, padding, constant_values=least).reshape(*values.shape[:-1], -1, piece)
    _, best = lax.top_k(jnp.max(pieces, axis=-1), k)
    best = jnp.sort(best, axis=-1)
    rest = jnp.take_along_axis(pieces, best[..., None], axis=-2).reshape(*values.shape[:-1], k * piece)
    found, places = top_k(rest, k)
    return found, jnp.take_along_axis(best, places // piece, axis=-1) * piece + places % piece


def ranks(order: Float[Array, " N"] | Int[Array, " N"], blocks: Int[Array, " N"]) -> Int[Array, " N"]:
    """How many come before each: those of larger order, of equal ones those of a lower block.

    All pairs are compared: for some hundreds of blocks one small kernel, where sorting them is several.
    """
    before = (order > order[:, None]) | ((order == order[:, None]) & (blocks < blocks[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def by_rank(ranks: Int[Array, " N"], values: Int[Array, " N"], count: int) -> Int[Array, " count"]:
    """The values at ranks below `count`, of which none is there twice; 0 where none is."""
    return jnp.sum(jnp.where(ranks == jnp.arange(count)[:, None], values, 0), axis=1, dtype=jnp.int32)


def top_blocks(order: Float[Array, " NB"] | Int[Array, " NB"], count: int) -> Int[Array, " count"]:
    """The `count` blocks of the largest order that is not negative; of equal ones the earlier is taken."""
    values, blocks = top_k(order, min(count, order.shape[0]))
    blocks = jnp.pad(jnp.where(values >= 0, blocks, -1), (0, count - blocks.shape[0]), constant_values=-1)
    return ascending(blocks)


def join(hot: Int[Array, " hot"], retrieved: Int[Array, "G R"]) -> Int[Array, "G N"]:
    """The list that each group of heads reads: `N = hot + R`."""
    shared = jnp.broadcast_to(hot, (retrieved.shape[0], hot.shape[0]))
    return ascending(jnp.concatenate((shared, retrieved), axis=-1))
