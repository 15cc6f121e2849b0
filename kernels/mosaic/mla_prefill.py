"""`mla_prefill` for Hopper through Pallas Mosaic GPU: expands keys and values, and runs the kernel of `attention`."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.attention import ALIGNMENT, Blocks, attend, shared_memory_bytes
from jaxinfer.kernels.tiles import SHARED_MEMORY, device

PIECE = 128
"""Rows of a context that are gathered together."""

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


def mla_window(
    q, context, k_b, v_b, first, limit, shared, before, *, scale, runs=None, blocks=None, multiprocessors=None
):
    """See `jaxinfer.kernels.mla_sparse`: expands the shared keys and what lies in the ranges, in pieces of `PIECE`."""
    tokens = q.shape[0]
    nope, rope, v = _head_dims(context, k_b, v_b)
    blocks = blocks or _fitting(nope, rope, v)[0]
    multiprocessors = multiprocessors or device().multiprocessors
    rows, start, end = gather_ranges(context, first, limit, ranges_held(context.shape[0], runs))
    front = -(-shared.shape[0] // PIECE) * PIECE
    # Whole tiles of the kernel: no window begins in a tile of shared keys.
    shared = jnp.where((jnp.arange(shared.shape[0]) < jnp.max(before))[:, None], shared, 0)
    rows = jnp.concatenate((shared, jnp.zeros((front - shared.shape[0], shared.shape[1]), shared.dtype), rows))
    start, end = (jnp.where(end > start, bound + front, 0) for bound in (start, end))
    k, k_rope, values = _expand(rows, k_b, v_b, rows.shape[0])
    padding = (0, -tokens % ALIGNMENT)
    queries = jnp.pad(q, (padding, (0, 0), (0, 0)))
    before, start, end = (jnp.pad(bound, padding) for bound in (before, start, end))
    sizes = {"scale": scale, "blocks": blocks, "multiprocessors": multiprocessors}
    out, lse = attend(queries, k, k_rope, values, before, (start, end), **sizes)
    return out[:tokens], lse[:, :tokens].T


def ranges_held(length, runs):
    """Pieces of a context of so many rows that `runs` may touch, `(count, rows of each)`; None: all."""
    every = -(-length // PIECE)
    return every if runs is None else min(runs[0] * ((runs[1] + 2 * PIECE - 2) // PIECE), every)


def gather_ranges(context, first, limit, held):
    """The rows of `context [S, D]` in the ranges `first <= s < limit`, int32 `[T]` each, one after the other.

    Returns: rows `[held PIECE, D]`, zeros where no range is, whatever `context` holds there; and where each range lies
    among them, 0 and 0 for those that are empty.
    """
    length, width = context.shape
    pieces = -(-length // PIECE)
    seen = limit > first
    begin, end = jnp.where(seen, first // PIECE, 0), jnp.where(seen, -(-limit // PIECE), 0)
    covered = _covered(begin, end, pieces)
    place = jnp.cumsum(covered.astype(jnp.int32)) - 1
    chosen = jnp.zeros(held, jnp.int32).at[jnp.where(covered, place, held)].set(jnp.arange(pieces), mode="drop")
    whole = jnp.pad(context, ((0, -length % PIECE), (0, 0))).reshape(pieces, PIECE, width)
    rows = whole.at[chosen].get(mode="clip").reshape(-1, width)
    start = jnp.where(seen, place[begin] * PIECE + first % PIECE, 0)
    end = start + jnp.where(seen, limit - first, 0)
    return jnp.where(_covered(start, end, rows.shape[0])[:, None], rows, 0), start, end


def _covered(begin, end, size):
    """Which of `size` places are in one of the ranges `begin <= i < end`, bool."""
    steps = jnp.zeros(size + 1, jnp.int32).at[begin].add(1).at[end].add(-1)
    return jnp.cumsum(steps[:size]) > 0


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
