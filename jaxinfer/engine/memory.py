"""How much memory a step needs beside weights and cache, and how many pages that leaves."""

import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.step import Capacity
from jaxinfer.model.moe import EXCHANGE_TOKENS
from jaxinfer.model.params import Tree
from jaxinfer.sharding.rules import Plan, Rules

_SCORE_BYTES = 256 * 2**20
"""Scores of one block of queries in the reference attention."""


def moe_workspace(config: ModelConfig, tokens: int, rules: Rules, itemsize: int) -> int:
    """Bytes that the routed experts of one layer need on a device, whatever the routing.

    One tile of tokens from all expert ranks: inputs, float32 outputs before and after their sum over the ranks, the
    sorted list of (token, expert) pairs, and one block of the expert kernel with a copy of that expert's weights.
    """
    plan = Plan.prefill(rules)
    exchange = [axis for axis in plan.axes("experts", config.num_experts) if axis in plan.token_axes]
    tile = min(tokens, EXCHANGE_TOKENS) * rules.size(tuple(exchange))
    d = config.hidden_size
    width = config.moe_intermediate_size // rules.size(plan.axes("expert_mlp", config.moe_intermediate_size))
    pairs = tile * config.experts_per_token * 4 * 8
    block = 3 * width * d * (itemsize + 4) + 128 * (4 * d + 3 * width) * 4
    return tile * d * (itemsize + 3 * 4) + pairs + block + tokens * d * 4


def step_workspace(config: ModelConfig, capacity: Capacity, rules: Rules, itemsize: int, tile_tokens: int) -> int:
    """Bytes of the largest step's activations on a device: attention of a chunk, or the experts, and the logits."""
    plan = Plan.prefill(rules)
    tokens, d = capacity.chunk_size, config.hidden_size
    heads = config.num_heads // rules.size(plan.axes("heads", config.num_heads))
    residual = 4 * tokens * d * (itemsize + 4)
    queries = 3 * tokens * heads * config.qk_head_dim * (itemsize + 4)
    outputs = 6 * tokens * heads * config.v_head_dim * 4
    expanded = 2 * tile_tokens * heads * (config.qk_head_dim + config.v_head_dim) * (itemsize + 4)
    latents = 4 * tile_tokens * config.latent_dim * (itemsize + 4)
    scores = 3 * min(_SCORE_BYTES, tokens * heads * tile_tokens * 4)
    attention = queries + outputs + expanded + latents + scores
    experts = moe_workspace(config, tokens, rules, itemsize) if config.num_moe_layers else 0
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
    itemsize = params["embed"].dtype.itemsize
    tables = 2 * capacity.max_context * config.qk_rope_head_dim // 2 * 4
    used = device_bytes(params) + tables + step_workspace(config, capacity, rules, itemsize, tile_tokens)
    return int(total * memory_fraction - used) // page_bytes
