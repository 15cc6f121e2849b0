"""Hybrid attention of single tokens: which positions each reads, and the attention to those that this rank holds."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import RECORDED, Cache, LayerCache
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mla_sparse import listed_keys, listed_values
from jaxinfer.kernels.selection.index import query_index
from jaxinfer.kernels.selection.retrieve import voting_heads
from jaxinfer.kernels.selection.scores import group_logits
from jaxinfer.kernels.selection.single import candidates, entries, listed, shares
from jaxinfer.kernels.words import from_words, words
from jaxinfer.model.batch import DecodeBatch
from jaxinfer.model.policies import Policies
from jaxinfer.model.sparse import put_index
from jaxinfer.model.sparse_plan import in_cache, listed_blocks, unit, units_of_block
from jaxinfer.sharding.collectives import all_gather, merge
from jaxinfer.sharding.layout import Layout

_LOGIT_BYTES = 256 * 2**20
"""Room for the logits of groups and for their index, of some sequences at a time."""


def write_index(cache: Cache, layer: jax.Array, batch: DecodeBatch, policies: Policies) -> Cache:
    """Writes the index of each group that a token completes; its latent is in the cache."""
    if policies.hybrid is None:
        return cache
    group = policies.hybrid.group
    complete = (batch.positions >= 0) & (batch.positions % group == group - 1)
    page = jnp.where(complete, batch.write_page, cache.index.shape[1])
    place = page, batch.write_offset // group
    return put_index(cache, layer, *place, batch.sparse.index.keys[layer], group, policies)


def attend(
    q: jax.Array,
    cache: LayerCache,
    batch: DecodeBatch,
    layout: Layout,
    policy: Hybrid,
    head_axes: tuple[str, ...],
    *,
    kv_rank: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, LayerCache]:
    """Attends the queries that do not read all, to those of their selected positions that lie on this rank.

    The candidates of the first level are all read: to score them exactly would take their latents as well.  So are the
    blocks that are hot up to now, as many as a query block of a prompt reads: what the question retrieved, exactly
    scored, stays at hand while the answer is written.

    Args:
        q: `[B, H, kv_rank + rope]` absorbed queries, the same on all ranks of cp.
        cache: with the tokens' latents and their index.
        head_axes: mesh axes that divide the heads of `q`.
        kv_rank: how many of a latent's numbers are values.

    Returns: output `[B, H, kv_rank]` and log-sum-exp `[B, H]`, float32, 0 and -inf for queries that read all;
    and the cache with what the queries retrieved.
    """
    plan, layer = next(plan for plan in batch.sparse.plans if plan.policy == policy), cache.layer
    kinds = {"kv_rank": kv_rank, "scale": scale}

    def read(units, lengths, schedule):
        size = unit(layout, policy)
        cut = jax.tree.map(lambda array: array.reshape(array.shape[0], -1, size, array.shape[-1]), cache.latents)
        out, lse = mla_decode(q[:, None], cut, cache.place, units, lengths, **kinds, schedule=schedule)
        return out[:, 0], lse[:, 0]

    near = read(plan.window, plan.window_length, plan.window_schedule)
    page, offset, block = plan.shared
    shared = listed_keys(q, cache.latents, cache.place, page, offset, scale=scale)
    lse = jnp.logaddexp(near[1], shared.lse)
    votes = _shares(q, lse, plan, cache, batch, layout, policy, head_axes, scale)
    found = jax.vmap(lambda votes, end: candidates(votes, plan.begin, end, policy.candidates))(votes, plan.end)
    known = jax.vmap(entries)(*found, plan.left[layer], plan.hottest[layer], plan.weights[layer])
    # Once, not for every pair that is compared.
    known, (units, sizes) = lax.optimization_barrier((known, _units(known.blocks, batch, layout, policy)))
    counts = {"candidates": policy.candidates, "remembered": RECORDED, "hot": plan.hottest.shape[2]}
    chosen = jax.vmap(lambda known, sizes, end: listed(known, sizes, plan.begin, end, **counts))(known, sizes, plan.end)

    place = batch.write_page[:, None], batch.write_offset[:, None] // policy.query_block, chosen.place
    records = cache.records.at[cache.row, *place].set(chosen.remembered, mode="drop")
    reads = jnp.stack((jnp.sum(chosen.hot), jnp.sum(chosen.read & ~chosen.hot))).astype(jnp.float32)
    reads = jnp.broadcast_to(reads, (1, cache.reads.shape[1], 1, 2))
    cache = cache._replace(records=records, reads=lax.dynamic_update_slice(cache.reads, reads, (cache.row, 0, 1, 0)))

    most = listed_blocks(policy) * len(units)
    listing = jax.vmap(lambda chosen, units, sizes: _listing(chosen, units, sizes, most))(chosen, units, sizes)
    lengths = jnp.sum(jnp.where(chosen.read, sizes * unit(layout, policy), 0), axis=1)
    far = read(listing, lengths, plan.blocks_schedule)
    # Blocks are read whole, so that the anchors in them are read there.
    there = jnp.any((block[:, :, None] == known.blocks[:, None]) & chosen.read[:, None], axis=2)
    anchors = listed_values(shared, ~there, kv_rank=kv_rank)
    return *merge(*near, *merge(*far, *anchors)), cache


def _units(blocks, batch, layout, policy):
    """Where the units of blocks `[B, N]` lie in this rank's cache, as many arrays `[B, N]` as a block can have here.

    Also how many it has: the first ones.
    """
    size, homes, me = unit(layout, policy), batch.homes[:, None], lax.axis_index("cp")
    begin = layout.local_length(blocks * policy.block, me, homes) // size
    end = layout.local_length((blocks + 1) * policy.block, me, homes) // size
    # Arrays of the shape of the blocks: one kernel finds all of them.
    units = [in_cache(begin + number, batch, layout, policy) for number in range(units_of_block(layout, policy))]
    return units, end - begin


def _listing(chosen, units, sizes, most):
    """A list of `most` units: the first ones, as many as `sizes` says, of each block that is read."""
    found = jnp.int32(0)
    for number, where in enumerate(units):
        places = jnp.where(chosen.read & (number < sizes), chosen.start + number, most)
        found += jnp.where(places == jnp.arange(most)[:, None], where, 0)
    return jnp.sum(found, axis=1)


def _speaking(q, lse, plan, layer, policy, head_axes):
    """Queries and log-sum-exps of the heads that vote, and the axes over which their votes are still to be gathered."""
    if plan.voters is not None:
        q, lse = (all_gather(array, head_axes, 1)[:, plan.voters[layer]] for array in (q, lse))
        return q, lse, ()
    ranks = lax.axis_size(head_axes) if head_axes else 1
    voters = voting_heads(q.shape[1], 1, policy.voters // ranks)[0]
    # Mostly evenly spaced: a slice can be part of other kernels.
    even = q.shape[1] % len(voters) == 0
    q, lse = (array[:, :: q.shape[1] // len(voters)] if even else array[:, jnp.asarray(voters)] for array in (q, lse))
    return q, lse, head_axes


def _shares(q, lse, plan, cache, batch, layout, policy, head_axes, scale):
    """The estimated share of every block for the voting heads, `[B, V, NB]`, the same on all ranks."""
    ranks, group = layout.cp, policy.group
    q, lse, head_axes = _speaking(q, lse, plan, cache.layer, policy, head_axes)
    top = lax.pmax(lse, "cp")
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    local = shift + jnp.log(lax.psum(jnp.exp(lse - shift), "cp"))
    # What lies together on a rank: whole blocks if there is one.
    piece = policy.block if ranks == 1 else unit(layout, policy)

    def best(item):
        q, q_scale, pages = item
        index = from_words(words(cache.index).at[cache.layer, pages].get(mode="clip"), cache.index.dtype)
        index = index.reshape(-1, q.shape[-1])
        index = index[: index.shape[0] // (piece // group) * (piece // group)]
        logits = group_logits(q[None], q_scale[None], index, group=group, scale=scale)[0]
        return jnp.max(logits.reshape(logits.shape[0], -1, piece // group), axis=2)

    speaking, factors = query_index(q, batch.sparse.index.queries[cache.layer])
    groups = batch.page_table.shape[1] * layout.page_size // group
    # At most: where the conversion is no part of the product, the index is there in bfloat16 as well.
    each = groups * (speaking.shape[1] * 4 + speaking.shape[2] * 3)
    found = lax.map(best, (speaking, factors, batch.page_table), batch_size=max(1, _LOGIT_BYTES // each))
    if ranks > 1:
        batches, voters, pieces = found.shape
        stripe = layout.stripe // piece
        every = all_gather(found.reshape(batches, voters, pieces // stripe, 1, stripe), ("cp",), 3)
        turns = (jnp.arange(ranks) + batch.homes[:, None]) % ranks
        found = jnp.take_along_axis(every, turns[:, None, None, :, None], axis=3).reshape(batches, voters, -1)
        of_block = policy.block // piece
        found = found[..., : found.shape[-1] // of_block * of_block]
        found = jnp.max(found.reshape(batches, voters, -1, of_block), axis=3)
    found = jax.vmap(lambda best, lse, end: shares(best, lse, plan.begin, end))(found, local, plan.end)
    return all_gather(found, head_axes, 1)
