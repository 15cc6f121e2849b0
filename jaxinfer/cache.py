"""The paged latent cache: one array for all layers, its pages divided over the replica groups and cp ranks."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.configs.model import ModelConfig
from jaxinfer.sharding.rules import Rules

AXES = (None, "pages", None, None)


def cache_spec(
    config: ModelConfig, rules: Rules, mesh: Mesh, pages_per_rank: int, page_size: int, dtype: jnp.dtype
) -> jax.ShapeDtypeStruct:
    """Shape, type and sharding of the cache: `[layers, pages of all ranks, page_size, kv_rank + rope]`."""
    pages = pages_per_rank * rules.mesh.replicas * rules.mesh.cp
    shape = (config.num_layers, pages, page_size, config.latent_dim)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(mesh, AXES, shape))


def allocate(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """A cache of zeros, made where it lies."""
    return jax.jit(lambda: jnp.zeros(spec.shape, spec.dtype), out_shardings=spec.sharding)()
