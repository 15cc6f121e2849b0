"""What a step is given: plain arrays, made on the host, and the logical axes that place them on the mesh.

`R` replica groups (dp x ep) have `cp` ranks each.  Inside a sharded step each rank sees its own part without the
leading axes.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.sharding.rules import Rules

Array = Any
"""numpy on the host, jax inside a step; a partition in the batch of partitions."""


def _array(*axes: str | None) -> Any:
    return field(metadata={"axes": axes})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparsePrefill:
    """What hybrid attention needs to know of a chunk: the `C` segments with queries that select what they read."""

    query_blocks: Array = _array("replica", "context", None)
    """int32 `[R, cp, n]`, the first token of each query block on the rank, of all segments; -1: none."""
    segments: Array = _array("replica", None)
    """int32 `[R, C]`, which of the S sequences each is; -1: none."""
    pages: Array = _array("replica", "context", None, None)
    """int32 `[R, cp, C, N]`, the pages of each; entries past its context may hold anything."""
    shared: Array = _array("replica", None, None)
    """int32 `[R, C, A]`, the positions of sinks and anchors, ascending; then the largest int32."""
    tiles: Array = _array(None)
    """int32 `[C]`, tiles of pages in use, the same on all ranks, because each is gathered over cp."""
    count: Array = _array()
    """int32, the segments in use; the same on all ranks."""
    index: Any = None
    """`kernels.selection.index.Projections` of all layers, which each rank adds inside of a step."""
    voters: Any = None
    """`model.voters.Voters` of each of the distinct policies, likewise."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseDecode:
    """What hybrid attention needs to know of the sequences that decode."""

    shared: Array = _array("replica", None, None)
    """int32 `[R, B, A]`, the positions of sinks and anchors, ascending; then the largest int32."""
    index: Any = None
    """As in `SparsePrefill`, and so are `voters`."""
    voters: Any = None
    plans: Any = None
    """`sparse_plan.decode_plans`, which each rank adds inside of a step."""


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
    num_dense_tiles: Array = _array()
    """int32, how many of them, the first ones, hold context of queries that read all of it whatever the policy."""
    sparse: Any = None
    """`SparsePrefill`; None where every query reads all of its context."""


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
    sparse: Any = None
    """`SparseDecode`; None where every query reads all of its context."""
    schedules: Any = None
    """`attention.decode_schedules`, which each rank adds inside of a step."""


type Batch = PrefillBatch | DecodeBatch | SparsePrefill | SparseDecode


def batch_specs[B: Batch](batch: B, rules: Rules) -> B:
    """The partition of each array of a batch."""

    def spec(axes: tuple[str | None, ...], array: Array) -> PartitionSpec:
        return rules.spec(axes, array.shape)

    return _map(spec, batch)


_ALIGNED = 64
"""Numbers that the parts of a packed batch begin at multiples of: 256 bytes.  XLA gives a kernel a part where it lies,
and Mosaic takes no other addresses."""


class Form(NamedTuple):
    """How the arrays of a batch lie in a packed one; hashable, so that a program can be compiled for it."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    """Of what one rank sees."""

    @property
    def begins(self) -> list[int]:
        """Where each array begins, and where the last one ends."""
        return [0, *itertools.accumulate(-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in self.shapes)]


def pack(batch: Batch, replicas: int, cp: int) -> tuple[np.ndarray, Form]:
    """All arrays of a batch in one, int32 `[R, cp, W]`: a transfer costs the host more than its bytes.

    Raises ValueError for arrays of another type.
    """
    arrays = []

    def seen(axes: tuple[str | None, ...], array: Array) -> np.ndarray:
        """Its shape as one rank sees it; what the ranks see goes to `arrays`."""
        array = np.asarray(array)
        if array.dtype != np.int32:
            raise ValueError(f"expected batches of int32, got {array.dtype}")
        lead = [size if axis in axes else 1 for axis, size in (("replica", replicas), ("context", cp))]
        inner = array.shape[sum(axis in ("replica", "context") for axis in axes) :]
        arrays.append(array.reshape(*lead, math.prod(inner)))
        return np.empty(inner, np.int32)

    leaves, structure = jax.tree.flatten(_map(seen, batch))
    form = Form(structure, tuple(leaf.shape for leaf in leaves))
    packed = np.zeros((replicas, cp, form.begins[-1]), np.int32)
    for begin, array in zip(form.begins, arrays, strict=False):
        packed[:, :, begin : begin + array.shape[2]] = array
    return packed, form


def unpack(packed: jax.Array, form: Form) -> Any:
    """The batch that one rank sees inside a sharded step, from its part `[1, 1, W]` of the packed one."""
    numbers = packed.reshape(-1)
    leaves = [
        numbers[begin : begin + math.prod(shape)].reshape(shape)
        for begin, shape in zip(form.begins, form.shapes, strict=False)
    ]
    return jax.tree.unflatten(form.structure, leaves)


def local[B: Batch](batch: B) -> B:
    """The part that one rank sees inside a sharded step, without the leading axes of replica and rank."""

    def squeeze(axes: tuple[str | None, ...], array: Array) -> Array:
        lead = sum(axis in ("replica", "context") for axis in axes)
        return array.reshape(array.shape[lead:])

    return _map(squeeze, batch)


def _map[B: Batch](function: Callable, batch: B) -> B:
    """`function(axes, array)` of every array, also of the batch inside."""
    new: dict[str, Any] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if "axes" in item.metadata:
            new[item.name] = function(item.metadata["axes"], value)
        else:
            new[item.name] = None if value is None else _map(function, value)
    return type(batch)(**new)
