"""From the masses of the candidates to the blocks that are read."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.selection.lists import ascending


def retrieved_blocks(
    masses: Float[Array, " C"],
    candidates: Int[Array, " C"],
    hot: Int[Array, " hot"],
    *,
    least: int,
    most: int,
    mass: float | None,
) -> Int[Array, " most"]:
    """The candidates that are read besides the hot blocks.

    Args:
        masses: softmax mass of each candidate.
        candidates: block numbers, ascending; -1: none.
        hot: blocks that are read anyhow; -1: none.
        least: blocks kept, whatever their mass.
        most: blocks kept at most.
        mass: the share of the masses of all candidates that are not hot at which the list ends; None keeps `most`.

    Returns: `[most]` int32, ascending, -1 at the end.  Of equal masses the earlier block goes first.
    """
    free = (candidates >= 0) & ~jnp.any(candidates[:, None] == hot, axis=1)
    order = jnp.where(free, masses, -1.0)
    values, places = lax.top_k(order, most)
    keep = values >= 0
    if mass is not None:
        values = jnp.where(keep, values, 0.0)
        before = jnp.cumsum(values) - values
        enough = before >= mass * jnp.sum(jnp.where(free, masses, 0.0))
        keep &= (jnp.arange(most) < least) | ~enough
    return ascending(jnp.where(keep, candidates[places], -1))
