"""Where each key of a query comes from: the selection as a picture, for the definition by a mask and for diagnosis."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

SOURCES = ("missed", "sinks", "window", "anchors", "hot", "retrieved")
"""What the numbers of `sources` mean."""


def sources(
    positions: Int[Array, " T"],
    first: Int[Array, " T"],
    anchor: Bool[Array, " S"],
    hot: Int[Array, "n hot"],
    blocks: Int[Array, "n G N"],
    *,
    sinks: int,
    block: int,
) -> Int[Array, "T G S"]:
    """The source from which each group of heads reads each key, as a place in `SOURCES`; -1 for later positions.

    A key of several sources counts for the first of: sinks, window, anchors, hot, retrieved.

    Args:
        positions: of the queries, int32, `T / n` successive ones in each of `n` query blocks; -1: no query.
        first: where their windows begin.
        anchor: whether a position is an anchor.
        hot: the hot blocks of each query block; -1: none.
        blocks: all blocks that each group of heads reads, the hot ones among them; -1: none.
    """
    keys = jnp.arange(anchor.shape[0])
    of_block = keys // block
    in_window = keys >= first[:, None]
    shared = jnp.where(in_window, 2, jnp.where(keys < sinks, 1, jnp.where(anchor, 3, 0)))
    queries = positions.shape[0] // blocks.shape[0]
    is_hot = jnp.any(hot[:, :, None] == of_block, axis=1)[:, None]
    listed = jnp.any(blocks[..., None] == of_block, axis=2)
    own = jnp.repeat(jnp.where(is_hot & listed, 4, jnp.where(listed, 5, 0)), queries, axis=0)
    found = jnp.where(shared[:, None] > 0, shared[:, None], own)
    return jnp.where(keys <= positions[:, None, None], found, -1)
