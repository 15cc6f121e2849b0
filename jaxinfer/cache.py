"""The paged latent cache: for all layers together, its pages divided over the replica groups and cp ranks."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.configs.kv_format import KVFormat
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.latents import Latents, QuantizedLatents
from jaxinfer.sharding.rules import Rules

AXES = (None, "pages", None, None)


def cache_spec(
    config: ModelConfig, rules: Rules, mesh: Mesh, pages_per_rank: int, page_size: int, kind: KVFormat
) -> jax.ShapeDtypeStruct | QuantizedLatents:
    """Shapes, types and sharding of the cache: arrays `[layers, pages of all ranks, page_size, ...]`."""
    pages = pages_per_rank * rules.mesh.replicas * rules.mesh.cp

    def array(count: int, dtype: str) -> jax.ShapeDtypeStruct:
        shape = (config.num_layers, pages, page_size, count)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=rules.sharding(mesh, AXES, shape))

    parts = kind.parts(config.kv_lora_rank, config.qk_rope_head_dim)
    arrays = {name: array(*part) for name, part in parts.items()}
    return QuantizedLatents(**arrays) if kind.quantized else arrays["values"]


def allocate(spec: jax.ShapeDtypeStruct | QuantizedLatents) -> Latents:
    """A cache of zeros, made where it lies."""

    def zeros():
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), spec)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda array: array.sharding, spec))()
