"""`mla_blocks` for Hopper: what the kernel reads of the lists, its rows, and query blocks that it cannot do."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.block_attention import BLOCK, Shape, attend
from jaxinfer.kernels.mosaic.decode_parts import TILE
from jaxinfer.kernels.reference import mla_sparse as reference


def reason_against(q: jax.Array, context: jax.Array, block: int, kv_rank: int) -> str | None:
    """Why the kernel cannot take operands of these shapes and types, None if it can."""
    if q.dtype != jnp.bfloat16 or context.dtype != jnp.bfloat16:
        return f"queries are {q.dtype} and the context {context.dtype}, not bfloat16"
    if block % BLOCK:
        return f"blocks of {block} keys are no multiple of {BLOCK}"
    if kv_rank % (2 * TILE) or kv_rank > 512:
        return f"kv_rank = {kv_rank} is no multiple of {2 * TILE} up to 512"
    if q.shape[3] - kv_rank != TILE:
        return f"the rope part has {q.shape[3] - kv_rank} dimensions, not {TILE}"
    return None


def mla_blocks(q, context, blocks, free, *, block, kv_rank, scale, multiprocessors):
    """See `jaxinfer.kernels.mla_sparse`; `multiprocessors` is the number of thread blocks that run at a time."""
    rows, shape = rows_of(q, blocks.shape[1], kv_rank, scale)
    entries, counts, bias = lists(blocks, free, block)
    operands = {"q": rows, "context": context, "entries": entries, "counts": counts, "bias": bias}
    out, lse = by_query(q, shape, *attend(shape, operands, multiprocessors))
    sizes = {"block": block, "kv_rank": kv_rank, "scale": scale}
    return _mended(q, context, blocks, free, out, lse, sizes)


def rows_of(q: jax.Array, groups: int, kv_rank: int, scale: float) -> tuple[jax.Array, Shape]:
    """The queries `[n, Q, H, dim]` as the kernel has them, `[outer, heads of all lists, dim]`, and its sizes.

    Where whole row tiles are not runs of a query's heads, the rows of a list are moved together and padded with 0.
    """
    n, queries, heads, dim = q.shape
    of_list = heads // groups
    count = queries * of_list
    if of_list % TILE == 0 or (TILE % of_list == 0 and of_list % 8 == 0 and count % TILE == 0):
        rows, sizes = q.reshape(n * queries, heads, dim), (queries, of_list)
    else:
        padded = -(-count // TILE) * TILE
        rows = q.reshape(n, queries, groups, of_list, dim).swapaxes(1, 2).reshape(n, groups, count, dim)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - count), (0, 0))).reshape(n, groups * padded, dim)
        sizes = 1, padded
    return rows, Shape(
        lists=n * groups,
        groups=groups,
        queries=sizes[0],
        heads=sizes[1],
        rank=kv_rank,
        rope=dim - kv_rank,
        scale=scale * math.log2(math.e),
    )


def by_query(q: jax.Array, shape: Shape, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The kernel's results for the rows of `rows_of` as `[n, Q, H, kv_rank]` and `[n, Q, H]`."""
    n, queries, heads, _ = q.shape
    of_list = heads // shape.groups
    rows = queries * of_list
    lse = lse.reshape(n, shape.groups, -1)[:, :, :rows].reshape(n, shape.groups, queries, of_list).swapaxes(1, 2)
    if (shape.queries, shape.heads) != (queries, of_list):
        out = out.reshape(n, shape.groups, -1, shape.rank)[:, :, :rows]
        out = out.reshape(n, shape.groups, queries, of_list, shape.rank).swapaxes(1, 2)
    return out.reshape(n, queries, heads, shape.rank), lse.reshape(n, queries, heads)


def _mended(q, context, blocks, free, out, lse, sizes):
    """Computes query blocks whose weights left the range of float32 once more, one after another."""

    def one(state):
        out, lse, wrong = state
        at = jnp.argmax(wrong)
        mine = (lax.dynamic_slice_in_dim(array, at, 1) for array in (q, blocks))
        mine_q, mine_blocks = mine
        exact, exact_lse = reference.mla_blocks(mine_q, context, mine_blocks, free, **sizes)
        out = lax.dynamic_update_slice_in_dim(out, exact, at, 0)
        return out, lax.dynamic_update_slice_in_dim(lse, exact_lse, at, 0), wrong.at[at].set(False)

    state = out, lse, jnp.any(jnp.isnan(lse), axis=(1, 2))
    return lax.while_loop(lambda state: jnp.any(state[2]), one, state)[:2]


def lists(blocks: jax.Array, free: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the kernel reads of `blocks` `[n, G, N]` and `free` `[S]`.

    Returns:
        int32 `[n * G, N * block / BLOCK]`, four times the numbers of blocks of `BLOCK` keys, ascending, plus 1 if a key
            of its first tile does not count, plus 2 if one of the second does not; blocks of which no key counts are
            left out.
        int32 `[n * G]`, how many there are.
        float32 `[S / TILE, TILE]`, 0 for keys that count, else -inf.
    """
    parts = block // BLOCK
    split = jnp.where(blocks[..., None] >= 0, blocks[..., None] * parts + jnp.arange(parts, dtype=jnp.int32), -1)
    split = split.reshape(blocks.shape[0] * blocks.shape[1], -1)
    by_block = free.reshape(-1, 2, TILE)
    masked = jnp.any(~by_block, axis=2).astype(jnp.int32) @ jnp.array([1, 2], jnp.int32)
    some = jnp.any(by_block, axis=(1, 2))
    read = (split >= 0) & some.at[split].get(mode="clip")
    none = jnp.iinfo(jnp.int32).max
    entries = jnp.sort(jnp.where(read, 4 * split + masked.at[split].get(mode="clip"), none), axis=1)
    bias = jnp.where(free, 0.0, -jnp.inf).astype(jnp.float32).reshape(-1, TILE)
    return entries, jnp.sum(read, axis=1, dtype=jnp.int32), bias
