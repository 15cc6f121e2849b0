"""How much memory a step needs beside weights and cache, and how many pages that leaves."""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.cache import RECORDED
from jaxinfer.configs.attention import Dense, Hybrid
from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.step import Capacity
from jaxinfer.kernels import mla_prefill
from jaxinfer.kernels.grouped_moe import ROWS
from jaxinfer.kernels.mla_sparse import window_keys
from jaxinfer.kernels.selection import retrieve
from jaxinfer.model.moe import exchange_tokens
from jaxinfer.model.params import Tree
from jaxinfer.model.precision import Precision
from jaxinfer.model.sparse import window_runs
from jaxinfer.sharding.rules import Plan, Rules

_SCORE_BYTES = 256 * 2**20
"""Scores of one block of queries in the reference form of sparse attention."""


def moe_workspace(config: ModelConfig, precision: Precision, tokens: int, rules: Rules) -> int:
    """Bytes that the routed experts of one layer need on a device, whatever the routing.

    One tile of tokens from all expert ranks: inputs, float32 outputs before and after their sum over the ranks, the
    sorted list of (token, expert) pairs, and one block of rows with what the reference kernel makes of one expert's
    weights.
    """
    plan, itemsize = Plan.prefill(rules), precision.dtype.itemsize
    exchange = tuple(axis for axis in plan.axes("experts", config.num_experts) if axis in plan.token_axes)
    ranks = rules.size(exchange)
    tile = exchange_tokens(tokens, ranks) * ranks
    d, width = config.hidden_size, precision.width(config.moe_intermediate_size)
    width //= rules.size(plan.axes(precision.pieces("expert_mlp"), width))
    pairs = tile * config.experts_per_token
    weights = 3 * width * d * (itemsize + 4)
    if precision.dtype == jnp.float32 and precision.quantized is None:
        rows = 128 * (4 * d + 3 * width) * 4
    elif precision.quantized is None:
        rows = min(pairs, ROWS) * (d + 3 * width) * (itemsize + 4) + (pairs + ROWS) * d * 4
    else:
        # Rows and products in 8 bits and in the type between, and in float32 as the reference computes them; results.
        rows = min(pairs, ROWS) * (d + width) * (2 * itemsize + 9) + (pairs + ROWS) * d * itemsize
    return tile * d * (itemsize + 3 * 4) + pairs * 4 * 8 + rows + weights + tokens * d * 4


def sparse_workspace(
    config: ModelConfig, policy: Hybrid, capacity: Capacity, heads: int, itemsize: int, e4m3: bool = False
) -> int:
    """Bytes that one layer of hybrid attention needs on a device beside what dense attention does.

    What grows with the context: one sequence whole, its index and records, and the masses of its blocks for each query
    block of a chunk.
    """
    tokens, context, latent = capacity.chunk_size, capacity.max_context + policy.hot_epoch, config.latent_dim
    query_blocks, blocks = tokens // policy.query_block + capacity.max_segments, context // policy.block
    gathered = 2 * context * latent * itemsize + context // policy.query_block * RECORDED * 2 * 4 * 2
    gathered += 2 * context // policy.group * policy.index_dim
    masses = 3 * query_blocks * blocks * 4 + context // policy.hot_epoch * blocks * 4 * 2
    absorbed = query_blocks * policy.query_block * heads * latent * (2 * itemsize + 2 * 4)
    if e4m3:  # keys, and values again, turned; queries, their rotary part in two bytes
        rope = config.qk_rope_head_dim
        gathered += 2 * context * config.kv_lora_rank
        absorbed += query_blocks * policy.query_block * heads * (config.kv_lora_rank + 2 * rope)
    lists = query_blocks * policy.candidates * policy.head_groups * 4 * 4
    voters = min(policy.voters, heads)
    selection = retrieve.workspace(
        query_blocks,
        blocks,
        latent,
        index_dim=policy.index_dim,
        per_block=policy.block // policy.group,
        head_groups=policy.head_groups,
        probes=policy.probes,
        voters=voters,
        candidates=policy.candidates,
    )
    return gathered + masses + absorbed + lists + selection + _SCORE_BYTES


def near_keys(policy: Hybrid, capacity: Capacity) -> int:
    """Keys that a layer of hybrid attention expands together: windows, sinks and anchors of one sequence."""
    each = [policy, *(of for _, _, of in policy.layers if isinstance(of, Hybrid))]
    shared = policy.sinks + policy.most_anchors(capacity.max_context)
    runs = (window_runs(capacity.chunk_size, capacity.layout, of) for of in each)
    return max(window_keys(capacity.max_context + policy.hot_epoch, shared, of) for of in runs)


def step_workspace(
    config: ModelConfig,
    precision: Precision,
    policy: Dense | Hybrid,
    capacity: Capacity,
    rules: Rules,
    tile_tokens: int,
) -> int:
    """Bytes of the largest step's activations on a device: attention of a chunk, or the experts, and the logits."""
    plan, itemsize = Plan.prefill(rules), precision.dtype.itemsize
    tokens, d = capacity.chunk_size, config.hidden_size
    heads = config.num_heads // rules.size(plan.axes("heads", config.num_heads))
    residual = 4 * tokens * d * (itemsize + 4)
    queries = 3 * tokens * heads * config.qk_head_dim * (itemsize + 4)
    outputs = 6 * tokens * heads * config.v_head_dim * 4
    rank = config.kv_lora_rank
    keys = tile_tokens if isinstance(policy, Dense) else max(tile_tokens, near_keys(policy, capacity))
    shapes = (
        (tokens, heads, config.qk_head_dim),
        (keys, config.latent_dim),
        (heads, config.qk_nope_head_dim, rank),
        (heads, config.v_head_dim, rank),
    )
    attention = queries + outputs
    operands = (jax.ShapeDtypeStruct(shape, precision.dtype) for shape in shapes)
    attention += mla_prefill.workspace(*operands, e4m3=precision.e4m3_attention)
    if isinstance(policy, Hybrid):
        attention += sparse_workspace(config, policy, capacity, heads, itemsize, precision.e4m3_attention)
    experts = moe_workspace(config, precision, tokens, rules) if config.num_moe_layers else 0
    width = config.intermediate_size // rules.size(plan.axes("mlp", config.intermediate_size))
    dense = tokens * width * 3 * (itemsize + 4) if config.num_dense_layers else 0
    shared = tokens * config.moe_intermediate_size * config.num_shared_experts * 3 * (itemsize + 4)
    logits = 6 * capacity.replicas * max(capacity.max_segments, capacity.max_num_seqs) * config.vocab_size * 4
    return residual + max(attention, experts + shared, dense) + logits


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on the device that holds most of it."""
    per_device: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            per_device[shard.device] = per_device.get(shard.device, 0) + shard.data.nbytes
    return max(per_device.values())


def pages_that_fit(
    config: ModelConfig,
    precision: Precision,
    policy: Dense | Hybrid,
    capacity: Capacity,
    rules: Rules,
    mesh: Mesh,
    params: Tree,
    page_bytes: int,
    memory_fraction: float,
    tile_tokens: int,
) -> int:
    """Pages on each device beside weights, rotary tables and the largest step, within a fraction of its memory."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() or {}
    if device.platform == "cpu":  # virtual devices share the machine's memory
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // math.prod(mesh.devices.shape)
    else:
        total = stats["bytes_limit"]
    tables = 2 * capacity.max_context * config.qk_rope_head_dim // 2 * 4
    used = device_bytes(params) + tables + step_workspace(config, precision, policy, capacity, rules, tile_tokens)
    return int(total * memory_fraction - used) // page_bytes
