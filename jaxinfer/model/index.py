"""Projections of the index of every layer, from its weights alone: no text has to be read for them.

The moments are those of inputs that are normalised and otherwise alike in all directions; what norms and projections
make of them is what tells directions that count from others.  Rotation mixes the two numbers of a rotary pair over the
positions, so that each counts as their mean, and pairs are independent of all else.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.quantize import dequantize_weight
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.kernels.selection.index import Projections, projections
from jaxinfer.model.params import Tree


def index_projections(params: Tree, config: ModelConfig, size: int, dtype: jnp.dtype, mesh: Mesh) -> Projections:
    """The projections of all layers, `[layers, latent_dim, size]` in `dtype`, the same on all devices.

    Every layer's weights are brought to one device: the projections do not depend on how they are divided, so that
    the same blocks are retrieved on every mesh.
    """
    first = mesh.devices.flat[0]
    moments = jax.jit(_moments, static_argnums=1)
    found = []
    for kind in ("dense", "moe"):
        if kind not in params:
            continue
        stacked = params[kind]["attention"] | {"attn_norm": params[kind]["attn_norm"]}
        names = ("q", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "k_b", "attn_norm")
        stacked = {name: stacked[name] for name in names if name in stacked}
        for layer in range(stacked["attn_norm"].shape[0]):
            weights = jax.device_put(jax.tree.map(lambda array, at=layer: array[at], stacked), first)
            of_queries, of_keys = jax.tree.map(np.float64, moments(weights, config))
            found.append(projections(of_queries, of_keys, size))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Projections(*(jax.device_put(np.stack(part).astype(dtype), everywhere) for part in zip(*found, strict=True)))


def _moments(weights: dict[str, Any], config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Second moments `[D, D]`, float32, of one layer's absorbed queries, summed over the heads, and of its latents."""
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    with jax.default_matmul_precision("highest"):
        norm = weights["q_a_norm"] if "q_b" in weights else weights["attn_norm"]
        q = _plain(weights["q_b"] if "q_b" in weights else weights["q"]) * norm.astype(jnp.float32)
        q = q.reshape(config.num_heads, config.qk_head_dim, -1)
        absorbed = jnp.einsum("hnk,hnc->hck", q[:, :nope], weights["k_b"].astype(jnp.float32))
        of_queries = jnp.einsum("hck,hdk->cd", absorbed, absorbed)
        of_rotary = _of_pairs(jnp.sum(q[:, nope:] ** 2, axis=(0, 2)))
        kv = _plain(weights["kv_a"]) * weights["attn_norm"].astype(jnp.float32)
        latent = kv[:rank] @ kv[:rank].T
        # The norm makes the mean square 1, and multiplies.
        gain = weights["kv_a_norm"].astype(jnp.float32)
        latent *= rank / jnp.maximum(jnp.trace(latent), jnp.finfo(jnp.float32).tiny) * gain[:, None] * gain
        of_rotary_keys = _of_pairs(jnp.sum(kv[rank:] ** 2, axis=1))
    return _blocks(of_queries, of_rotary), _blocks(latent, of_rotary_keys)


def _plain(weight: Any) -> jax.Array:
    """A weight `[..., K]` as a float32 matrix `[N, K]`."""
    if not isinstance(weight, Quantized):
        return weight.astype(jnp.float32).reshape(-1, weight.shape[-1])
    scale = weight.scale if weight.scheme == "block" else weight.scale.reshape(-1)
    return dequantize_weight(weight.values.reshape(-1, weight.shape[-1]), scale, jnp.float32)


def _of_pairs(squares: jax.Array) -> jax.Array:
    """The mean of the two numbers of each pair, for both."""
    return jnp.repeat(jnp.mean(squares.reshape(-1, 2), axis=1), 2)


def _blocks(latent: jax.Array, rotary: jax.Array) -> jax.Array:
    return jax.scipy.linalg.block_diag(latent, jnp.diag(rotary))
