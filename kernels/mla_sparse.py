"""Attention of a chunk of queries over parts of a long context, and of single queries over listed tokens of the cache.

The parts of a hybrid selection are disjoint, and their results merge by log-sum-exp.  What many queries share (the
window, the anchors) is cheaper with keys and values expanded: `2 (qk + v)` floating-point operations for a key, query
and head.  What few share (retrieved blocks) is cheaper absorbed, `2 (2 kv_rank + rope)`, as nothing is expanded.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.dispatch import Implementation
from jaxinfer.kernels.latents import Latents
from jaxinfer.kernels.mosaic import mla_blocks as mosaic_blocks
from jaxinfer.kernels.mosaic import mla_blocks_e4m3 as mosaic_blocks_e4m3
from jaxinfer.kernels.mosaic import mla_prefill as mosaic
from jaxinfer.kernels.reference import mla_sparse as reference
from jaxinfer.kernels.tiles import device


def mla_window(
    q: Float[Array, "T H qk"],
    context: Float[Array, "S latent"],
    k_b: Float[Array, "H nope kv_rank"],
    v_b: Float[Array, "H v kv_rank"],
    first: Int[Array, " T"],
    limit: Int[Array, " T"],
    shared: Float[Array, "A latent"],
    before: Int[Array, " T"],
    *,
    scale: float,
    runs: tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T H v"], Float[Array, "T H"]]:
    """Multi-head latent attention of each query to the keys `first <= s < limit` and some shared ones, heads expanded.

    Args:
        q: `[T, H, nope + rope]` queries, rotary part last and already rotated.
        context: `[S, kv_rank + rope]` normalised latents, then the shared rotated key, in the order of the positions.
            Rows outside the ranges may hold anything.
        k_b: `[H, nope, kv_rank]` expands a latent to the keys of each head.
        v_b: `[H, v, kv_rank]` expands a latent to the values of each head.
        first: `[T]` int32, the first key of each query.
        limit: `[T]` int32, the end of its keys, at most `S`; not after `first`: none.
        shared: `[A, kv_rank + rope]` keys that all queries read in the same order.
        before: `[T]` int32, how many of the first of these each query reads, 0 to `A`.  Rows from the largest on may
            hold anything.
        scale: factor on the scores, positive.
        runs: the ranges of all queries together cover at most so many runs of so many successive keys.  Memory and the
            work of expanding are in proportion to that; None: to `S`.
        implementation: None chooses (see `dispatch`).

    Returns: output `[T, H, v]` and log-sum-exp `[T, H]`, both float32; a query without keys has 0 and -inf.
    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    reason = mosaic.reason_against(q, context, k_b, v_b)
    operands = q, context, k_b, v_b, first, limit, shared, before
    if dispatch.choose("mla_window", implementation, reason) == "mosaic":
        return mosaic.mla_window(*operands, scale=scale, runs=runs)
    return reference.mla_window(*operands, scale=scale)


def window_keys(context: int, shared: int, runs: tuple[int, int] | None) -> int:
    """How many keys the Mosaic form of `mla_window` expands together, of contexts and shared keys of such lengths."""
    return mosaic.PIECE * (mosaic.ranges_held(context, runs) + -(-shared // mosaic.PIECE))


def mla_blocks(
    q: Float[Array, "n Q H latent"],
    context: Float[Array, "S latent"],
    blocks: Int[Array, "n G N"],
    free: Bool[Array, " S"],
    *,
    block: int,
    kv_rank: int,
    scale: float,
    unit: Float[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "n Q H kv_rank"], Float[Array, "n Q H"]]:
    """Attention of each block of `Q` queries to key blocks of its own, absorbed.

    With a `unit` products are of e4m3 numbers: the latents, as keys and as values, and the queries' latent parts are
    rounded to it, each row of the latter over a power of two of its own; rotary parts are not.  Latents are rounded
    without a mean of some of them, which depends on the lists.  The kernel rounds the weights of the softmax as well
    (see `mosaic.block_attention_e4m3`).

    Args:
        q: `[n, Q, H, kv_rank + rope]` queries in the space of the latents.
        context: `[S, kv_rank + rope]` in the order of the positions; `block` divides `S`.  Blocks that are listed
            hold numbers only, others may hold anything.
        blocks: `[n, G, N]` int32, the key blocks that each group of `H / G` successive heads reads, none twice;
            -1: none.
        free: `[S]`, whether a key counts: those that the query reads elsewhere do not.
        block: tokens of a key block.
        kv_rank: how many of a latent's numbers are values, the first ones.
        scale: factor on the scores, positive.
        unit: float32, a power of two by which latents are divided before they are rounded to e4m3; those beyond 448
            times it are cut off.  None: products are of bfloat16.
        implementation: None chooses (see `dispatch`).

    Returns: output `[n, Q, H, kv_rank]`, the attended latent, of the type of `q`, and log-sum-exp `[n, Q, H]`, float32;
    a query without keys has 0 and -inf.
    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    arguments, sizes = (q, context, blocks, free), {"block": block, "kv_rank": kv_rank, "scale": scale}
    reason = mosaic_blocks.reason_against(q, context, block, kv_rank)
    if dispatch.choose("mla_blocks", implementation, reason) == "reference":
        return reference.mla_blocks(*arguments, unit, **sizes)
    multiprocessors = device().multiprocessors
    if unit is None:
        return mosaic_blocks.mla_blocks(*arguments, **sizes, multiprocessors=multiprocessors)
    return mosaic_blocks_e4m3.mla_blocks(*arguments, unit, **sizes, multiprocessors=multiprocessors)


class ListedKeys(NamedTuple):
    """Keys that single queries list, and their weights in a softmax: the first half of attention to them."""

    rows: Float[Array, "B K latent"]
    """Of the type of the queries; 0 where none is listed."""
    weights: Float[Array, "B H K"]
    """float32, `exp(score - shift)`; 0 where none is listed."""
    shift: Float[Array, "B H"]
    """float32, the largest score, 0 of none."""

    @property
    def lse(self) -> Float[Array, "B H"]:
        """The log-sum-exp of all scores, float32; -inf of none."""
        return self.shift + jnp.log(jnp.sum(self.weights, axis=-1))


def listed_keys(
    q: Float[Array, "B H latent"],
    cache: Latents,
    layer: Int[Array, ""],
    pages: Int[Array, "B K"],
    offsets: Int[Array, "B K"],
    *,
    scale: float,
) -> ListedKeys:
    """Gathers and scores the tokens of the cache that each sequence lists, for one absorbed query of each.

    Args:
        q: `[B, H, kv_rank + rope]` queries in the space of the latents.
        cache: `[layers, pages, page_size, kv_rank + rope]` or the arrays of `QuantizedLatents`.
        layer: int32, the layer read.
        pages, offsets: `[B, K]` int32, where the tokens lie, none twice; page -1: none.
        scale: factor on the scores.
    """
    return ListedKeys(*reference.listed_keys(q, cache, layer, pages, offsets, scale=scale))


def listed_values(
    listed: ListedKeys, open_keys: Bool[Array, "B K"], *, kv_rank: int
) -> tuple[Float[Array, "B H kv_rank"], Float[Array, "B H"]]:
    """Attention to the listed keys that are open: the second half.

    Which are open may depend on the first half.  A query whose open keys have less than e^-80 of the weight of all that
    are listed may find none: what it reads elsewhere, the closed ones among it, is all that counts.

    Args:
        kv_rank: how many of a latent's numbers are values, the first ones but not all.

    Returns: output `[B, H, kv_rank]`, the attended latent, and log-sum-exp `[B, H]`, both float32; 0 and -inf without
    keys.
    """
    return reference.listed_values(*listed, open_keys, kv_rank=kv_rank)
