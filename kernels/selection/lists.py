"""Lists of block numbers: ascending, with -1 at the end where there are fewer than the list has places."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def ascending(blocks: Int[Array, "... N"]) -> Int[Array, "... N"]:
    """Block numbers in order, those that are negative as -1 at the end."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(blocks < 0, last, blocks).astype(jnp.int32), axis=-1)
    return jnp.where(ordered == last, -1, ordered)


def top_blocks(order: Float[Array, " NB"] | Int[Array, " NB"], count: int) -> Int[Array, " count"]:
    """The `count` blocks of the largest order that is not negative; of equal ones the earlier is taken."""
    values, blocks = lax.top_k(order, min(count, order.shape[0]))
    blocks = jnp.pad(jnp.where(values >= 0, blocks, -1), (0, count - blocks.shape[0]), constant_values=-1)
    return ascending(blocks)


def join(hot: Int[Array, " hot"], retrieved: Int[Array, "G R"]) -> Int[Array, "G N"]:
    """The list that each group of heads reads: `N = hot + R`."""
    shared = jnp.broadcast_to(hot, (retrieved.shape[0], hot.shape[0]))
    return ascending(jnp.concatenate((shared, retrieved), axis=-1))
