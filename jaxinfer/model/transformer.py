"""The whole decoder: embedding, groups of stacked layers that are scanned, and the vocabulary head.

The functions here run on one rank, inside `jax.shard_map`; `plan` says which mesh axes divide what.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxinfer.cache import Cache
from jaxinfer.configs.attention import DENSE, Dense, Hybrid
from jaxinfer.configs.kv_format import KVFormat
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.model.attention import decode_schedules, rotations
from jaxinfer.model.batch import DecodeBatch, PrefillBatch
from jaxinfer.model.block import Block
from jaxinfer.model.params import Tree, apart, specs, together, use, weight
from jaxinfer.model.policies import Policies
from jaxinfer.model.precision import Precision
from jaxinfer.model.sparse_plan import decode_plans
from jaxinfer.sharding.collectives import all_gather, own_piece
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan, Rules


class Ends(nnx.Module):
    """What comes before the first layer and after the last."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.embed = weight((config.vocab_size, config.hidden_size), (None, "embedding"), dtype)
        self.final_norm = weight((config.hidden_size,), (None,), dtype)
        self.head = weight((config.vocab_size, config.hidden_size), ("vocab", None), dtype)


class Group(NamedTuple):
    """Layers of one kind, stacked: `block` describes one of them."""

    block: Block
    layers: int


class Transformer:
    """The description of a model: modules that declare the weights; the arrays themselves live in a nested dict."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        policy: Dense | Hybrid = DENSE,
        formats: Sequence[KVFormat] = (),
    ):
        """`formats` are those of the layers' caches, one for each, or none: all have the same."""
        self.config = config
        self.policies = Policies.of(policy, config.num_layers, formats)
        self.ends = Ends(config, precision.dtype)
        counts = {"dense": config.num_dense_layers, "moe": config.num_moe_layers}
        self.groups = {kind: Group(Block(config, kind, precision), n) for kind, n in counts.items() if n}

    def hidden(
        self, params: Tree, cache: Cache, tables: Tree, batch: PrefillBatch | DecodeBatch, layout: Layout, plan: Plan
    ) -> tuple[jax.Array, Cache]:
        """The residual stream after the last layer, float32 `[T, d]`, and the cache with the batch's latents.

        `tables` are those that `engine.runner.Runner` describes.
        """
        with jax.named_scope("embed"):
            x = self.embed(params["embed"], batch.tokens, plan).astype(jnp.float32)
        angles = rotations((tables["cos"], tables["sin"]), batch.positions)
        if batch.sparse is not None:
            batch = replace(batch, sparse=replace(batch.sparse, index=tables["index"], voters=tables["voters"]))
        if isinstance(batch, DecodeBatch):
            schedules = decode_schedules(batch, self.config.num_heads, layout, plan, self.policies)
            batch = replace(batch, schedules=schedules)
            if batch.sparse is not None:
                plans = decode_plans(cache, batch, self.config.num_heads, layout, plan, self.policies)
                batch = replace(batch, sparse=replace(batch.sparse, plans=plans))
        first = 0
        for name, group in self.groups.items():
            sliced, whole = apart(group.block, params[name])
            policies = self.policies.scan(first, first + group.layers)

            def step(carry, layer, block=group.block, whole=whole, policies=policies):
                sliced, index = layer
                weights = together(sliced, whole)
                return use(block, weights, plan)(*carry, index, batch, angles, layout, plan, policies), None

            layers = jnp.arange(first, first + group.layers)
            (x, cache), _ = lax.scan(step, (x, cache), (sliced, layers))
            first += group.layers
        return x, cache

    def embed(self, table: jax.Array, tokens: jax.Array, plan: Plan) -> jax.Array:
        """Rows of the embedding, `[T, d]`, for the tokens `[T]` of this rank.

        Each rank holds some columns of the table.  It looks up those columns for the tokens of all ranks, and an
        all-to-all brings the columns of its own tokens together: no rank ever holds more than the result.
        """
        axes = plan.axes("embedding", self.config.hidden_size)
        exchange = tuple(axis for axis in axes if axis in plan.token_axes)
        x = table.at[all_gather(tokens, exchange, 0)].get(mode="clip")
        for axis in reversed(axes):  # the innermost axis holds neighbouring columns
            if axis in exchange:
                # Tokens of the ranks of `axis` are the innermost part of the token dimension that is still gathered.
                ranks = lax.axis_size(axis)
                pieces = x.reshape(-1, ranks, tokens.shape[0], x.shape[-1])
                x = lax.all_to_all(pieces, axis, split_axis=1, concat_axis=3, tiled=True)
                x = x.reshape(-1, x.shape[-1])
            else:
                x = all_gather(x, (axis,), 1)
        return x

    def logits(self, params: Tree, hidden: jax.Array, plan: Plan) -> jax.Array:
        """Float32 logits `[N, vocab]` of rows `hidden [N, d]`, which are the same on all cp and tp ranks."""
        x = rms_norm(hidden, params["final_norm"], self.config.rms_norm_eps).astype(params["head"].dtype)
        axes = plan.axes("vocab", self.config.vocab_size)
        other_requests = tuple(axis for axis in axes if axis == "ep")
        rows = all_gather(x, other_requests, 0)
        scores = jnp.einsum(
            "td,vd->tv", rows, params["head"], preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
        )
        return own_piece(all_gather(scores, axes, 1), other_requests, 0)


def parameter_specs(config: ModelConfig, rules: Rules, mesh: Mesh, precision: Precision) -> Tree:
    """Every parameter of the model as `jax.ShapeDtypeStruct` with its sharding: what a checkpoint is loaded into.

    A nested dict: `embed [V, d]`, `head [V, d]`, `final_norm [d]`, and the groups `dense` and `moe` with the weights of
    a `Block`, stacked over the layers of the group on a leading axis; a quantised weight is a `Quantized` of two.
    """
    model = Transformer(config, precision)
    tree = specs(model.ends, None, rules, mesh)
    for name, group in model.groups.items():
        tree[name] = specs(group.block, group.layers, rules, mesh)
    return tree
