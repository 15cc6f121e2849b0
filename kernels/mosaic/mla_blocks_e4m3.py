"""`mla_blocks` in e4m3 for Hopper: makes the operands of `block_attention_e4m3`, and runs it.

Beside the products, making them moves, for `S` keys and `R` rows (queries times heads), `5 rank S` bytes of the
context, whose keys are read once more to be turned round, and `3 rank R + 4 rope R` of the queries.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic import mla_blocks as bfloat16
from jaxinfer.kernels.mosaic.attention_e4m3 import value_order
from jaxinfer.kernels.mosaic.block_attention import Shape
from jaxinfer.kernels.mosaic.block_attention_e4m3 import attend
from jaxinfer.kernels.mosaic.decode_parts import TILE
from jaxinfer.kernels.mosaic.mla_queries_e4m3 import round_queries
from jaxinfer.kernels.reference.mla_sparse import center_of, latents_to_e4m3


def mla_blocks(q, context, blocks, free, unit, *, block, kv_rank, scale, multiprocessors):
    """See `jaxinfer.kernels.mla_sparse`; `multiprocessors` is the number of thread blocks that run at a time."""
    rows, shape = bfloat16.rows_of(q, blocks.shape[1], kv_rank, scale)
    entries, counts, bias = bfloat16.lists(blocks, free, block)
    center, unit = center_of(context, blocks, block, kv_rank), unit.astype(jnp.float32).reshape(1)
    made, offset = queries_of(shape, rows, center, unit)
    operands = made | keys_of(context, center, unit)
    operands |= {"context": context, "entries": entries, "counts": counts, "bias": bias, "center": center, "unit": unit}
    out, lse = attend(shape, operands, multiprocessors)
    return bfloat16.by_query(q, shape, out, lse + offset * math.log(2))


def queries_of(
    shape: Shape, rows: jax.Array, center: jax.Array, unit: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """What the kernel reads of queries `[outer, heads of all lists, rank + rope]`, which are rounded.

    Returns: `q` e4m3 `[outer, heads, rank]`, `q_rope` bfloat16 `[outer, heads, rope]` in the same unit, of a row and of
    the keys, and `factor` float32 `[lists, rows]`, by which products become scores of base 2; the center's part of
    these, float32 `[lists, rows]`.
    """
    outer, heads, dim = rows.shape
    q, rope, *of_rows = round_queries(rows.reshape(-1, dim), center, unit, shape.scale)
    split = -1, shape.queries, shape.groups, shape.heads
    factor, offset = (a.reshape(split).swapaxes(1, 2).reshape(shape.lists, -1) for a in of_rows)
    return {"q": q.reshape(outer, heads, -1), "q_rope": rope.reshape(outer, heads, -1), "factor": factor}, offset


def keys_of(context: jax.Array, center: jax.Array, unit: jax.Array) -> dict[str, jax.Array]:
    """What the kernel reads of a context `[S, rank + rope]`.

    Returns: `keys` e4m3 `[S, rank]`, the latents without `center` over `unit`, and `values` `[S / TILE, rank, TILE]`,
    the same by tile with keys innermost, in the order of `value_order`: what a tile's copy reads lies in one piece.
    """
    rank = len(center)
    # Behind a barrier: fused with the rounding, XLA reads or writes the turned array a few bytes at a time.
    keys = lax.optimization_barrier(latents_to_e4m3(context[:, :rank], center, unit))
    moved = keys.reshape(-1, 16, rank)[:, value_order()].reshape(-1, TILE, rank)
    return {"keys": keys, "values": moved.swapaxes(1, 2)}
