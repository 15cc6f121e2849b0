"""`mla_prefill` in e4m3 for Hopper through Pallas Mosaic GPU: makes the operands, and runs `attention_e4m3`.

Beside the products, making them moves, for `S` keys, `T` queries and `H` heads, `6 S H (nope + v)` bytes (the
expansion in bfloat16, written and read, and e4m3) and `3` to `5 T H (nope + rope)`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic import mla_prefill as bfloat16
from jaxinfer.kernels.mosaic.attention_e4m3 import ALIGNMENT, KEYS, Blocks, attend, shared_memory_bytes, value_order
from jaxinfer.kernels.reference.expansion import Operands, expand
from jaxinfer.kernels.tiles import SHARED_MEMORY, device


def reason_against(
    q: bfloat16.Operand, latents: bfloat16.Operand, k_b: bfloat16.Operand, v_b: bfloat16.Operand
) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    reason = bfloat16.reason_against(q, latents, k_b, v_b)
    if reason is None and (v := v_b.shape[1]) > 128:
        return f"values of {v} numbers do not fit into registers with sums of their own"
    return reason


def mla_prefill(q, latents, k_b, v_b, key_limit, *, scale, blocks: Blocks | None = None, multiprocessors=None):
    """See `jaxinfer.kernels.mla_prefill`; `blocks` and `multiprocessors` are chosen where they are None."""
    tokens, heads, _ = q.shape
    v = v_b.shape[1]
    dimensions = k_b.shape[1], latents.shape[1] - k_b.shape[2], v
    blocks = blocks or _fitting(*dimensions)[0]
    multiprocessors = multiprocessors or device().multiprocessors

    def visible():
        made = operands(q, latents, k_b, v_b, jnp.max(key_limit))
        limit = jnp.pad(key_limit, (0, -tokens % ALIGNMENT))
        out, lse = attend(made, limit, scale=scale, blocks=blocks, multiprocessors=multiprocessors)
        return out[:tokens], lse[:, :tokens].T

    def nothing():
        return jnp.zeros((tokens, heads, v), jnp.float32), jnp.full((tokens, heads), -jnp.inf, jnp.float32)

    return lax.cond(jnp.any(key_limit > 0), visible, nothing)


def operands(q: jax.Array, latents: jax.Array, k_b: jax.Array, v_b: jax.Array, written: jax.Array) -> Operands:
    """What the kernel reads, lengths rounded up to whole tiles, from latents of which the first `written` are there."""
    latents = jnp.pad(latents, ((0, -latents.shape[0] % KEYS), (0, 0)))
    # Memory that was never written may hold NaN, which a weight of zero does not silence.
    latents = jnp.where((jnp.arange(latents.shape[0]) < written)[:, None], latents, 0)
    moved = latents.reshape(-1, 16, latents.shape[1])[:, value_order()].reshape(latents.shape)
    # Only odd, hence small, queries are padded.
    return expand(jnp.pad(q, ((0, -q.shape[0] % ALIGNMENT), (0, 0), (0, 0))), latents, k_b, v_b, moved)


def _fitting(nope, rope, v):
    """Ways to cut the work whose buffers fit, the fastest first."""
    found = [Blocks(stages=stages) for stages in (4, 3, 2)]
    return [blocks for blocks in found if shared_memory_bytes(nope, rope, v, blocks) <= SHARED_MEMORY]
