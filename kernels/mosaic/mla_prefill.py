"""`mla_prefill` for Hopper through Pallas Mosaic GPU: expands keys and values, and runs the kernel of `attention`."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.attention import ALIGNMENT, Blocks, attend, shared_memory_bytes
from jaxinfer.kernels.tiles import SHARED_MEMORY, device

Operand = jax.Array | jax.ShapeDtypeStruct


def reason_against(q: Operand, latents: Operand, k_b: Operand, v_b: Operand) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    if q.dtype != jnp.bfloat16:
        return f"the queries are {q.dtype}, not bfloat16"
    if q.shape[0] == 0 or latents.shape[0] == 0:
        return "there are no queries or no keys"
    nope, rope, v = _head_dims(latents, k_b, v_b)
    if nope % 64 or rope % 64 or v % 64:
        return f"head dimensions {nope} + {rope} and {v} are not all multiples of 64"
    if v > 256 or not _fitting(nope, rope, v):
        return f"head dimensions {nope} + {rope} and {v} do not fit into registers and shared memory"
    return None


def mla_prefill(q, latents, k_b, v_b, key_limit, *, scale, blocks: Blocks | None = None, multiprocessors=None):
    """See `jaxinfer.kernels.mla_prefill`; `blocks` and `multiprocessors` are chosen where they are None."""
    tokens, heads, _ = q.shape
    nope, rope, v = _head_dims(latents, k_b, v_b)
    blocks = blocks or _fitting(nope, rope, v)[0]
    multiprocessors = multiprocessors or device().multiprocessors

    def visible():
        k, k_rope, values = _expand(latents, k_b, v_b, jnp.max(key_limit))
        # Swizzled copies want whole tiles of 8 rows; only odd, hence small, operands are padded.
        queries = jnp.pad(q, ((0, -tokens % ALIGNMENT), (0, 0), (0, 0)))
        limit = jnp.pad(key_limit, (0, -tokens % ALIGNMENT))
        out, lse = attend(
            queries, k, k_rope, values, limit, scale=scale, blocks=blocks, multiprocessors=multiprocessors
        )
        return out[:tokens], lse[:, :tokens].T

    def nothing():
        return jnp.zeros((tokens, heads, v), jnp.float32), jnp.full((tokens, heads), -jnp.inf, jnp.float32)

    return lax.cond(jnp.any(key_limit > 0), visible, nothing)


def _expand(latents, k_b, v_b, written):
    """Keys `[S, H, nope]`, the rotary key `[S, rope]` and values `[S, H, v]`, S rounded up to a multiple of 8."""
    keys, rank = latents.shape[0], k_b.shape[2]
    latents = jnp.pad(latents, ((0, -keys % ALIGNMENT), (0, 0)))
    # Memory that was never written may hold NaN, which a weight of zero does not silence.
    latents = jnp.where((jnp.arange(latents.shape[0]) < written)[:, None], latents, 0).astype(jnp.bfloat16)
    latent, rope = latents[:, :rank], latents[:, rank:]
    k, v = (
        jnp.einsum("sc,hdc->shd", latent, w.astype(jnp.bfloat16), preferred_element_type=jnp.bfloat16)
        for w in (k_b, v_b)
    )
    return k, rope, v


def _head_dims(latents, k_b, v_b):
    return k_b.shape[1], latents.shape[1] - k_b.shape[2], v_b.shape[1]


def _fitting(nope, rope, v):
    """Ways to cut the work whose buffers fit, the fastest first."""
    found = [Blocks(keys=keys, stages=stages) for keys, stages in ((128, 2), (64, 3), (64, 2))]
    return [blocks for blocks in found if shared_memory_bytes(nope, rope, v, blocks) <= SHARED_MEMORY]
