"""`moe_experts` in jnp: blocks of rows of one expert each, as many as the routing makes.

The rows are sorted by expert and each expert's rows cut into blocks (the idea of MegaBlocks, arXiv 2211.15841).  The
loop runs over the blocks in use only, so work follows the routing, and memory beyond the operands is one block's,
whatever the routing.
"""

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK_ROWS = 128


def moe_experts(x, experts, weights, gate_up, down, layer):
    """See `jaxinfer.kernels.moe_experts`.  Operands keep their type, products accumulate in float32."""
    tokens, per_token = experts.shape
    num_experts = gate_up.shape[1]
    block = min(_BLOCK_ROWS, tokens)

    local = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
    order = jnp.argsort(local, stable=True)
    rows = jnp.bincount(local, length=num_experts)
    first_row = jnp.cumsum(rows) - rows
    last_block = jnp.cumsum((rows + block - 1) // block)

    def step(index, out):
        expert = jnp.searchsorted(last_block, index, side="right")
        done = index - jnp.where(expert > 0, last_block[expert - 1], 0)
        offset = done * block + jnp.arange(block)
        pair = order.at[first_row[expert] + offset].get(mode="clip")
        token = jnp.where(offset < rows[expert], pair // per_token, tokens)  # past the rows: out of range, dropped
        inputs = x.at[token].get(mode="fill", fill_value=0)
        gate, up = jnp.einsum("td,gid->gti", inputs, gate_up[layer, expert], preferred_element_type=jnp.float32)
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        result = jnp.einsum("ti,di->td", hidden, down[layer, expert], preferred_element_type=jnp.float32)
        weight = weights.reshape(-1).at[pair].get(mode="clip")
        return out.at[token].add(result * weight[:, None], mode="drop")

    return lax.fori_loop(0, last_block[-1], step, jnp.zeros(x.shape, jnp.float32))
