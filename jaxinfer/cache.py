"""The paged cache: for all layers together, its pages divided over the replica groups and cp ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.configs.attention import DENSE, Dense, Hybrid
from jaxinfer.configs.kv_format import KVFormat, distinct
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.latents import QuantizedLatents
from jaxinfer.sharding.rules import Rules

RECORDED = 16
"""Blocks that a query block remembers."""


class Cache(NamedTuple):
    """What is kept of each token, and of each group of tokens where queries select what they read.

    Each array is `[layers, pages of all ranks, rows of a page, ...]`.
    """

    latents: tuple[Any, ...]
    """`kernels.latents.Latents`, a row for each token: one for each format that layers have, in the order in which the
    formats come, with the layers of this format."""
    index: Any = None
    """A row for each group of tokens: `group_index` of `[index_dim]`, e4m3."""
    records: Any = None
    """A row for each query block: int32 `[RECORDED, 2]`, what it retrieved (see `kernels.selection.hot`)."""
    reads: Any = None
    """Of ranks, not of pages, float32 `[layers, ranks, 2, 4]`, of the last prefill and of the last decode: how many hot
    and how many retrieved blocks the queries read, summed over queries, on the mean of the groups of heads; and, of
    prefill, the captured softmax mass of sampled queries, summed, and how many were sampled."""


class LayerCache(NamedTuple):
    """What one layer reads of the cache, and leaves in it: arrays of several layers, and which of these it is."""

    latents: Any
    """`kernels.latents.Latents` of the layers that have its format."""
    place: jax.Array
    """int32, which of these it is."""
    index: Any
    layer: jax.Array
    """int32, which layer of the model it is, and of the index."""
    records: Any
    reads: Any
    row: jax.Array
    """int32, which layer of records and reads it is."""


def cache_spec(
    config: ModelConfig,
    rules: Rules,
    mesh: Mesh,
    pages_per_rank: int,
    page_size: int,
    formats: Sequence[KVFormat],
    policy: Dense | Hybrid = DENSE,
) -> Cache:
    """Shapes, types and sharding of the cache's arrays; those that `policy` does not need are None.

    `formats` are those of the layers, one for each.
    """
    pages = pages_per_rank * rules.mesh.replicas * rules.mesh.cp

    def array(rows: int, *row: int, of: str, layers: int = config.num_layers) -> jax.ShapeDtypeStruct:
        shape = (layers, pages, rows, *row)
        axes = (None, "pages", None, *[None] * len(row))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(of), sharding=rules.sharding(mesh, axes, shape))

    def latents(kind: KVFormat) -> Any:
        parts = kind.parts(config.kv_lora_rank, config.qk_rope_head_dim)
        layers = sum(of_layer == kind for of_layer in formats)
        arrays = {n: array(page_size, count, of=dtype, layers=layers) for n, (count, dtype) in parts.items()}
        return QuantizedLatents(**arrays) if kind.quantized else arrays["values"]

    kinds = distinct(formats)
    each = tuple(map(latents, kinds))
    if isinstance(policy, Dense):
        return Cache(each)
    index = array(page_size // policy.group, policy.index_dim, of="float8_e4m3fn")
    records = array(page_size // policy.query_block, RECORDED, 2, of="int32")
    ranks = config.num_layers, rules.mesh.replicas * rules.mesh.cp, 2, 4
    sharding = rules.sharding(mesh, (None, "pages", None, None), ranks)
    return Cache(each, index, records, jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=sharding))


def allocate(spec: Cache) -> Cache:
    """A cache of zeros, made where it lies."""

    def zeros():
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), spec)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda array: array.sharding, spec))()
