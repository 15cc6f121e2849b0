"""What a step is given: plain arrays, made on the host, and the logical axes that place them on the mesh.

`R` replica groups (dp x ep) have `cp` ranks each.  Inside a sharded step each rank sees its own part without the
leading axes.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxinfer.sharding.rules import Rules

Array = Any
"""numpy on the host, jax inside a step; a partition in the batch of partitions."""


def _array(*axes: str | None) -> Any:
    return field(metadata={"axes": axes})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """A chunk: up to `T` tokens on each rank, of up to `S` sequences ("segments") of the group, in any order."""

    tokens: Array = _array("replica", "context", None)
    """int32 `[R, cp, T]`."""
    positions: Array = _array("replica", "context", None)
    """int32 `[R, cp, T]`, the position in the sequence; -1: no token."""
    segments: Array = _array("replica", "context", None)
    """int32 `[R, cp, T]`, which of the S sequences; -1: no token."""
    write_page: Array = _array("replica", "context", None)
    """int32 `[R, cp, T]`, the rank's page that takes the token's latent; out of range: none."""
    write_offset: Array = _array("replica", "context", None)
    """int32 `[R, cp, T]`, the place in that page."""
    tile_pages: Array = _array("replica", "context", None, None)
    """int32 `[R, cp, N, pages of a tile]`, the cached context of the segments in tiles of one sequence each."""
    tile_segment: Array = _array("replica", None)
    """int32 `[R, N]`, whose sequence a tile is; -1: nobody's."""
    tile_start: Array = _array("replica", None)
    """int32 `[R, N]`, local index of a tile's first key on each rank."""
    homes: Array = _array("replica", None)
    """int32 `[R, S]`, the rank of each segment's first stripe."""
    num_tiles: Array = _array()
    """int32, tiles in use; the same on all ranks, because each tile travels around the ring."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of up to `B` sequences of a group."""

    tokens: Array = _array("replica", None)
    """int32 `[R, B]`."""
    positions: Array = _array("replica", None)
    """int32 `[R, B]`, the position of the token in its sequence; -1: no sequence."""
    homes: Array = _array("replica", None)
    """int32 `[R, B]`, the rank of each sequence's first stripe."""
    page_table: Array = _array("replica", "context", None, None)
    """int32 `[R, cp, B, pages]`, the pages of each sequence on each rank."""
    write_page: Array = _array("replica", "context", None)
    """int32 `[R, cp, B]`, the page that takes the token's latent; out of range on the ranks that do not keep it."""
    write_offset: Array = _array("replica", "context", None)
    """int32 `[R, cp, B]`."""


def batch_specs[Batch: (PrefillBatch, DecodeBatch)](batch: Batch, rules: Rules) -> Batch:
    """The partition of each array of a batch."""
    specs: dict[str, PartitionSpec] = {
        item.name: rules.spec(item.metadata["axes"], getattr(batch, item.name).shape) for item in fields(batch)
    }
    return type(batch)(**specs)


def local[Batch: (PrefillBatch, DecodeBatch)](batch: Batch) -> Batch:
    """The part that one rank sees inside a sharded step, without the leading axes of replica and rank."""

    def squeeze(item) -> Array:
        lead = sum(axis in ("replica", "context") for axis in item.metadata["axes"])
        array = getattr(batch, item.name)
        return array.reshape(array.shape[lead:])

    return type(batch)(**{item.name: squeeze(item) for item in fields(batch)})
