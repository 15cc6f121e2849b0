"""Communication inside a sharded step.  Every function takes mesh axis names, and no axes mean no communication."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Concatenates the shards of `x` along dimension `dim`, outermost mesh axis first."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over the ranks of `axes`."""
    return lax.psum(x, axes) if axes else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The sum over the ranks of `axes`, of which each rank keeps its piece along `dim` (undoes `all_gather`)."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def own_piece(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This rank's piece of an array that all ranks of `axes` hold whole."""
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges attention over two disjoint sets of keys.

    Args: outputs `[..., v]` float32 and their log-sum-exps `[...]` float32.  A part that saw no key has output 0 and
    log-sum-exp -inf, the identity.  Returns the pair for the union of the keys.
    """
    top = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    scale = 1.0 / jnp.where(total == 0.0, 1.0, total)
    out = out_a * (weight_a * scale)[..., None] + out_b * (weight_b * scale)[..., None]
    return out, shift + jnp.log(total)


def merge_over(out: jax.Array, lse: jax.Array, axis: str, scatter: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Merges the attention of all ranks of `axis`, each over its own keys.

    Args: `out [rows, heads, v]` float32 and `lse [rows, heads]` float32 (0 and -inf where a rank saw no key).
    Returns the pair for all keys; with `scatter` (0 rows, 1 heads) each rank's piece along that dimension, else all of
    it on every rank.
    """
    if lax.axis_size(axis) == 1:
        return out, lse
    top = lax.pmax(lse, axis)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(lse - shift)
    total = lax.psum(weight, axis)
    weighted = out * (weight / jnp.where(total == 0.0, 1.0, total))[..., None]
    lse = shift + jnp.log(total)
    if scatter is None:
        return lax.psum(weighted, axis), lse
    return reduce_scatter(weighted, (axis,), scatter), own_piece(lse, (axis,), scatter)


def ring(visit: Callable, carry, block: Any, axis: str):
    """Sends every rank's `block` once around the ring: `carry = visit(carry, block, source_rank)` on each rank.

    A block is a pytree of arrays.  The next one is on its way while one is visited, since neither depends on the other.
    """
    ranks = lax.axis_size(axis)
    if ranks == 1:
        return visit(carry, block, jnp.int32(0))
    me = lax.axis_index(axis)
    onward = [(rank, (rank + 1) % ranks) for rank in range(ranks)]

    def hop(step, state):
        carry, block = state
        arriving = lax.ppermute(block, axis, onward)
        return visit(carry, block, (me - step) % ranks), arriving

    return lax.fori_loop(0, ranks, hop, (carry, block))[0]
