"""A prompt through a model layer by layer, as one chunk, to look at its attention at chosen queries."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.cache import Cache, allocate, cache_spec
from jaxinfer.configs.attention import Hybrid
from jaxinfer.configs.kv_format import FLOAT_FORMATS
from jaxinfer.configs.profile import HeadProfile
from jaxinfer.engine.anchors import Anchors, boundary_codes
from jaxinfer.engine.batching import Batcher
from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.step import PrefillSegment
from jaxinfer.kernels.rope import rope as apply_rope
from jaxinfer.llm import LLM
from jaxinfer.model.attention import Attention, rotations
from jaxinfer.model.batch import PrefillBatch, local
from jaxinfer.model.block import Block
from jaxinfer.model.context import Part, in_order
from jaxinfer.model.index import index_projections
from jaxinfer.model.linear import normalised
from jaxinfer.model.params import apart, together, use
from jaxinfer.model.policies import Policies
from jaxinfer.model.rope import softmax_scale
from jaxinfer.model.transformer import Transformer
from jaxinfer.model.voters import voters
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan

_TILE_TOKENS = 512


class AtLayer(NamedTuple):
    """What there is to look at in one layer, inside of a traced step."""

    mass: jax.Array
    """float32 `[rows, H, S]`, the softmax of dense attention over the layer's keys."""
    q: jax.Array
    """`[T, H, nope + rope]`, rotated."""
    attention: Attention
    cache: Cache
    layer: jax.Array
    batch: PrefillBatch
    layout: Layout
    policies: Policies
    rows: jax.Array
    """int32, positions of the queries that are looked at."""


def by_layer(
    llm: LLM,
    ids: Items[int],
    rows: Items[int],
    policy: Hybrid,
    measure: Callable[..., Any],
    *operands: Any,
    profile: HeadProfile | None = None,
) -> list[Any]:
    """Runs the prompt `ids` with a policy, and says what `measure(AtLayer, *operands)` finds in every layer, as numpy
    arrays.

    Every layer reads what the layers before it made with that policy.  Prompts whose lengths round up to the same
    number of blocks, and as many rows, compile to the same programs.  Raises ValueError for a model on more than one
    device, and for rows that do not exist.
    """
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    config = runner.config
    if runner.mesh.size != 1:
        raise ValueError(f"expected a model on one device, got one on {runner.mesh.size}")
    if not rows or min(rows) < 0 or max(rows) >= len(ids):
        raise ValueError(f"expected rows from 0 to {len(ids) - 1}, got {list(rows)}")
    policy = policy.for_model(config.num_heads, config.latent_dim)
    batch, cache, layout = _prompt(runner, policy, list(ids), llm)
    model = Transformer(config, runner.precision, policy)
    plan, policies = Plan.prefill(runner.rules), model.policies

    def begin(params, batch):
        return model.embed(params["embed"], local(batch).tokens, plan).astype(jnp.float32)

    def step(block: Block, params, number, x, cache, layer, tables, batch, rows, operands):
        sliced, whole = apart(block, params)
        weights = together(jax.tree.map(lambda array: array[number], sliced), whole)
        module, batch = use(block, weights, plan), local(batch)
        batch = replace(batch, sparse=replace(batch.sparse, index=tables["index"], voters=tables["voters"]))
        angles = rotations((tables["cos"], tables["sin"]), batch.positions)
        found = measure(_look(module, x, cache, layer, batch, angles, layout, plan, policies, rows), *operands)
        return *module(x, cache, layer, batch, angles, layout, plan, policies), found

    def compiled(function):
        everywhere = PartitionSpec()
        return jax.jit(
            jax.shard_map(function, mesh=runner.mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        )

    index = index_projections(runner.params, config, policy.index_dim, runner.precision.dtype, runner.mesh)
    voting = tuple(voters(of, config, profile) if isinstance(of, Hybrid) else None for of in policies.distinct)
    tables = {**runner.tables, "index": index, "voters": voting}
    x, found = compiled(begin)(runner.params, batch), []
    places = jnp.asarray(rows, jnp.int32)
    for name, group in model.groups.items():
        run = compiled(partial(step, group.block))
        for number in range(group.layers):
            layer = jnp.int32(len(found))
            weights = runner.params[name], jnp.int32(number)
            x, cache, of_layer = run(*weights, x, cache, layer, tables, batch, places, operands)
            found.append(jax.tree.map(np.asarray, of_layer))
    return found


def _prompt(runner: Runner, policy: Hybrid, ids: list[int], llm: LLM) -> tuple[PrefillBatch, Cache, Layout]:
    """The whole prompt as one chunk, and a cache for it alone."""
    size = max(policy.block, policy.group)
    tokens = -(-len(ids) // size) * size
    layout = Layout(1, size, size)
    capacity = replace(
        runner.capacity,
        layout=layout,
        pages_per_rank=tokens // size,
        chunk_size=tokens,
        max_segments=1,
        max_context=tokens,
    )
    codes = boundary_codes(llm.tokenizer, capacity.vocab_size)
    anchors = Anchors(codes, policy.anchor_gap, policy.anchor_boundaries)
    sequence = Sequence(
        request=Request(id="mass", prompt_ids=ids),
        index=0,
        token_ids=ids,
        num_prompt=len(ids),
        max_new_tokens=1,
        seed=0,
        pages=[list(range(tokens // size))],
    )
    batcher = Batcher(capacity, _TILE_TOKENS, policy, anchors)
    batch = batcher.prefill([[PrefillSegment(sequence=sequence, start=0, count=len(ids))]], tokens).batch
    formats = [FLOAT_FORMATS[runner.precision.dtype.name]] * runner.config.num_layers
    spec = cache_spec(runner.config, runner.rules, runner.mesh, tokens // size, size, formats, policy)
    return batch, allocate(spec), layout


def _look(module, x, cache, layer, batch, angles, layout, plan, policies, rows) -> AtLayer:
    attention, config = module.attention, module.attention.config
    scale, nope = softmax_scale(config), config.qk_nope_head_dim
    hidden = normalised(attention.reader, x, module.attn_norm, module.eps, module.dtype)
    q, cache = attention._project(hidden, cache, layer, batch, angles, plan, policies)
    q = apply_rope(q, *angles)
    absorbed = jnp.einsum("thn,hnc->thc", q[rows, :, :nope], attention.k_b, preferred_element_type=jnp.float32)
    absorbed = jnp.concatenate((absorbed.astype(q.dtype), q[rows, :, nope:]), axis=-1)
    pages = batch.tile_pages.shape[1]
    table, tiles = batch.sparse.pages[0], -(-batch.positions.shape[0] // (pages * layout.page_size))
    parts = [Part(cache.latents[0], layer)]
    (context,) = in_order(parts, table, jnp.int32(tiles), batch.homes[0], layout, tile_pages=pages)
    logits = jnp.einsum("thd,sd->ths", absorbed, context, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(context.shape[0]) <= rows[:, None, None]
    mass = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return AtLayer(mass, q, attention, cache, layer, batch, layout, policies, rows)
