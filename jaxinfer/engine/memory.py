"""How much memory a step needs beside weights and cache, and how many pages that leaves."""

import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.step import Capacity
from jaxinfer.kernels.grouped_moe import ROWS
from jaxinfer.model.moe import exchange_tokens
from jaxinfer.model.params import Tree
from jaxinfer.model.precision import Precision
from jaxinfer.sharding.rules import Plan, Rules

_SCORE_BYTES = 256 * 2**20
"""Scores of one block of queries in the reference attention."""


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
    if precision.quantized is None:
        rows = 128 * (4 * d + 3 * width) * 4
    else:
        # Rows and products in 8 bits and in the type between, and in float32 as the reference computes them; results.
        rows = min(pairs, ROWS) * (d + width) * (2 * itemsize + 9) + (pairs + ROWS) * d * itemsize
    return tile * d * (itemsize + 3 * 4) + pairs * 4 * 8 + rows + weights + tokens * d * 4


def step_workspace(
    config: ModelConfig, precision: Precision, capacity: Capacity, rules: Rules, tile_tokens: int
) -> int:
    """Bytes of the largest step's activations on a device: attention of a chunk, or the experts, and the logits."""
    plan, itemsize = Plan.prefill(rules), precision.dtype.itemsize
    tokens, d = capacity.chunk_size, config.hidden_size
    heads = config.num_heads // rules.size(plan.axes("heads", config.num_heads))
    residual = 4 * tokens * d * (itemsize + 4)
    queries = 3 * tokens * heads * config.qk_head_dim * (itemsize + 4)
    outputs = 6 * tokens * heads * config.v_head_dim * 4
    expanded = 2 * tile_tokens * heads * (config.qk_head_dim + config.v_head_dim) * (itemsize + 4)
    latents = 4 * tile_tokens * config.latent_dim * (itemsize + 4)
    scores = 3 * min(_SCORE_BYTES, tokens * heads * tile_tokens * 4)
    attention = queries + outputs + expanded + latents + scores
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
    used = device_bytes(params) + tables + step_workspace(config, precision, capacity, rules, tile_tokens)
    return int(total * memory_fraction - used) // page_bytes
