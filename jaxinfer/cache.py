"""The paged cache: for all layers together, its pages divided over the replica groups and cp ranks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.configs.attention import DENSE, Dense, Hybrid
from jaxinfer.configs.kv_format import KVFormat
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.latents import QuantizedLatents
from jaxinfer.sharding.rules import Rules

RECORDED = 16
"""Blocks that a query block remembers."""


class Cache(NamedTuple):
    """What is kept of each token, and of each group of tokens where queries select what they read.

    Each array is `[layers, pages of all ranks, rows of a page, ...]`.
    """

    latents: Any
    """`kernels.latents.Latents`, a row for each token."""
    index: Any = None
    """A row for each group of tokens: `group_index` of `[index_dim]`, in bfloat16 where latents are quantised."""
    records: Any = None
    """A row for each query block: int32 `[RECORDED, 2]`, what it retrieved (see `kernels.selection.hot`)."""
    reads: Any = None
    """Of ranks, not of pages, float32 `[layers, ranks, 2, 4]`, of the last prefill and of the last decode: how many hot
    and how many retrieved blocks the queries read, summed over queries, on the mean of the groups of heads; and, of
    prefill, the captured softmax mass of sampled queries, summed, and how many were sampled."""


def cache_spec(
    config: ModelConfig,
    rules: Rules,
    mesh: Mesh,
    pages_per_rank: int,
    page_size: int,
    kind: KVFormat,
    policy: Dense | Hybrid = DENSE,
) -> Cache:
    """Shapes, types and sharding of the cache's arrays; those that `policy` does not need are None."""
    pages = pages_per_rank * rules.mesh.replicas * rules.mesh.cp

    def array(rows: int, *row: int, of: str) -> jax.ShapeDtypeStruct:
        shape = (config.num_layers, pages, rows, *row)
        axes = (None, "pages", None, *[None] * len(row))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(of), sharding=rules.sharding(mesh, axes, shape))

    parts = kind.parts(config.kv_lora_rank, config.qk_rope_head_dim)
    arrays = {name: array(page_size, count, of=dtype) for name, (count, dtype) in parts.items()}
    latents = QuantizedLatents(**arrays) if kind.quantized else arrays["values"]
    if isinstance(policy, Dense):
        return Cache(latents)
    index = array(page_size // policy.group, policy.index_dim, of="bfloat16" if kind.quantized else kind.dtype)
    records = array(page_size // policy.query_block, RECORDED, 2, of="int32")
    ranks = config.num_layers, rules.mesh.replicas * rules.mesh.cp, 2, 4
    sharding = rules.sharding(mesh, (None, "pages", None, None), ranks)
    return Cache(latents, index, records, jax.ShapeDtypeStruct(ranks, jnp.float32, sharding=sharding))


def allocate(spec: Cache) -> Cache:
    """A cache of zeros, made where it lies."""

    def zeros():
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), spec)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda array: array.sharding, spec))()
