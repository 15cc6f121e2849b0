"""Blocks that queries of earlier epochs retrieved: what query blocks leave behind, and what follows from it.

A query block remembers its best blocks beside its own tokens, and what is hot in an epoch follows from the query
blocks of the epochs before it alone.  So a prefix that is read again, by whatever steps, brings its hot blocks along.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.selection.lists import top_blocks, top_k

EPOCHS = 4
"""Epochs that make a block hot, each with half the weight of the one after it."""

_FIXED_POINT = 1 << 14
"""Masses are remembered as integers: their sums do not depend on the order in which ranks and steps add them."""


def amounts(masses: Float[Array, "G C"], candidates: Int[Array, "G C"], num_blocks: int) -> Int[Array, " NB"]:
    """The mass of every block for one query block, summed over the groups of heads: int32, in units of 2^-14."""
    counts = fixed_point(masses)
    places = jnp.where(candidates < 0, num_blocks, candidates)
    return jnp.zeros(num_blocks, jnp.int32).at[places.ravel()].add(counts.ravel(), mode="drop")


def fixed_point(masses: jax.Array) -> jax.Array:
    """Masses as they are remembered, int32."""
    return jnp.round(masses * _FIXED_POINT).astype(jnp.int32)


def record(amounts: Int[Array, " NB"], count: int) -> Int[Array, "count 2"]:
    """What a query block leaves behind: the `count` blocks of most mass as (block, amount), largest first.

    Of equal amounts the earlier block goes first; (-1, 0) where fewer blocks have any.
    """
    values, blocks = top_k(amounts, min(count, amounts.shape[0]))
    pairs = jnp.stack((jnp.where(values > 0, blocks, -1), values), axis=-1)
    nothing = jnp.tile(jnp.array([[-1, 0]], jnp.int32), (count - pairs.shape[0], 1))
    return jnp.concatenate((pairs, nothing))


def epoch_masses(records: Int[Array, "E N 2"], num_blocks: int) -> Int[Array, "E NB"]:
    """The mass of each block in each of `E` epochs: what the `N` entries of its query blocks say, added.

    Entries of no block are skipped, also block numbers that do not exist.
    """
    epochs = records.shape[0]
    named = (records[..., 0] >= 0) & (records[..., 0] < num_blocks)
    blocks = jnp.where(named, records[..., 0], num_blocks)
    sums = jnp.zeros((epochs, num_blocks), jnp.int32)
    return sums.at[jnp.arange(epochs)[:, None], blocks].add(records[..., 1], mode="drop")


def hot_weights(masses: Int[Array, "E NB"]) -> Int[Array, "E NB"]:
    """How hot each block is in each of successive epochs: `sum over a = 1 .. 4 of masses[e - a] >> (a - 1)`."""
    weights = jnp.zeros_like(masses)
    for age in range(1, min(EPOCHS, masses.shape[0] - 1) + 1):
        weights = weights.at[age:].add(masses[:-age] >> (age - 1))
    return weights


def hot_blocks(weights: Int[Array, " NB"], first, end, count: int) -> Int[Array, " count"]:
    """The hottest of the blocks `first .. end - 1`, ascending, -1 at the end where fewer are hot.

    Of equal ones the earlier block is taken.
    """
    blocks = jnp.arange(weights.shape[0])
    return top_blocks(jnp.where((blocks >= first) & (blocks < end) & (weights > 0), weights, -1), count)


def hottest(weights: Int[Array, " NB"], first, end, count: int) -> Int[Array, "count 2"]:
    """The blocks of `hot_blocks` as (block, weight), the hottest first; (-1, 0) where fewer are hot."""
    blocks = jnp.arange(weights.shape[0])
    return record(jnp.where((blocks >= first) & (blocks < end), weights, 0), count)
