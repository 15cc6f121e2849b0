"""Hybrid attention of single tokens: which positions each reads, and the attention to those that this rank holds."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import RECORDED, Cache, LayerCache
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mla_sparse import mla_sparse_decode
from jaxinfer.kernels.selection.grid import eligible_blocks
from jaxinfer.kernels.selection.hot import EPOCHS, amounts, epoch_masses, hot_blocks, hot_weights, joined, record
from jaxinfer.kernels.selection.index import query_index
from jaxinfer.kernels.selection.retrieve import voting_heads
from jaxinfer.kernels.selection.scores import candidate_blocks, estimated_shares, group_logits
from jaxinfer.model.batch import DecodeBatch
from jaxinfer.model.policies import Policies
from jaxinfer.model.sparse import put_index, reads_all, windows
from jaxinfer.sharding.collectives import all_gather, merge
from jaxinfer.sharding.layout import Layout


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
    me = lax.axis_index("cp")
    sparse = (batch.positions >= 0) & ~reads_all(batch.positions, policy)
    first = jnp.where(sparse, windows(batch.positions, policy), 0)
    kinds = {"kv_rank": kv_rank, "scale": scale}

    def read(units, lengths):
        out, lse = mla_decode(q[:, None], *_in_units(cache, batch, units, layout, policy), lengths, **kinds)
        return out[:, 0], lse[:, 0]

    def read_shared(tokens):
        return mla_sparse_decode(q, cache.latents, cache.place, batch.page_table, tokens, **kinds)

    near = read(*_window(first, sparse, me, batch, layout, policy))
    shared = _shared(first, me, batch, layout)
    lse = jnp.logaddexp(near[1], read_shared(shared)[1])
    begin, end = eligible_blocks(first, sinks=policy.sinks, block=policy.block)
    shares = _shares(q, lse, begin, end, cache, batch, layout, policy, scale)
    votes = all_gather(shares, head_axes, 1)
    candidates = jax.vmap(lambda votes, end: candidate_blocks(votes, begin, end, policy.candidates))(votes, end)

    num_blocks = votes.shape[-1]
    masses = jnp.mean(jnp.take_along_axis(votes, jnp.maximum(candidates, 0)[:, None], axis=2), axis=1)
    counts = jax.vmap(lambda mass, blocks: amounts(mass[None], blocks[None], num_blocks))(masses, candidates)
    place = cache.records.at[cache.row, batch.write_page, batch.write_offset // policy.query_block]
    begun = (batch.positions % policy.query_block > 0)[:, None, None]
    counts = jax.vmap(joined)(counts, jnp.where(begun, place.get(mode="clip"), -1))
    records = jax.vmap(lambda counts: record(counts, RECORDED))(counts)
    cache = cache._replace(records=place.set(records, mode="drop"))

    weights = _weights(cache, batch, layout, policy, me, num_blocks)
    most = policy.hot_blocks + policy.retrieve_blocks
    hot = jax.vmap(lambda weights, end: hot_blocks(weights, begin, end, most))(weights, end)
    known = jnp.any(candidates[:, :, None] == hot[:, None], axis=2)
    blocks = jnp.concatenate((jnp.where(known, -1, candidates), hot), axis=1)
    reads = jnp.stack((jnp.sum(hot >= 0), jnp.sum(~known & (candidates >= 0)))).astype(jnp.float32)
    cache = cache._replace(reads=cache.reads.at[cache.row, :, 1, :2].set(reads))
    # Listed blocks are read whole, so that the anchors in them are read there.
    listed = jnp.any(batch.sparse.shared[:, :, None] // policy.block == blocks[:, None], axis=2)
    far = merge(*read(*_blocks(blocks, me, batch, layout, policy)), *read_shared(jnp.where(listed, -1, shared)))
    return *merge(*near, *far), cache


def _unit(layout, policy):
    """Tokens that lie together on a rank and in a page, and of which windows and blocks are made: a page, as a rule."""
    return math.gcd(layout.stripe, policy.block)


def _in_units(cache, batch, units, layout, policy):
    """Latents in pages of one unit, the layer's place, and the table of units `[B, N]` that count through pages."""
    unit = _unit(layout, policy)
    of_page = layout.page_size // unit
    cut = jax.tree.map(lambda array: array.reshape(array.shape[0], -1, unit, array.shape[-1]), cache.latents)
    pages = jnp.take_along_axis(batch.page_table, units // of_page, axis=1, mode="clip")
    return cut, cache.place, pages * of_page + units % of_page


def _window(first, sparse, me, batch, layout, policy):
    """The window of each token as far as it lies on this rank: units `[B, N]`, and how many tokens of these."""
    unit, longest = _unit(layout, policy), policy.window + policy.block + policy.query_block
    width = -(-longest // layout.round_tokens) * layout.stripe + layout.stripe
    begin = layout.local_length(first, me, batch.homes)
    end = layout.local_length(batch.positions + 1, me, batch.homes)
    return begin[:, None] // unit + jnp.arange(-(-width // unit)), jnp.where(sparse, end - begin, 0)


def _shared(first, me, batch, layout):
    """Sinks and anchors before the windows that lie on this rank, `[B, A]`; -1: none."""
    positions = batch.sparse.shared
    here = layout.rank(positions, batch.homes[:, None]) == me
    return jnp.where(here & (positions < first[:, None]), layout.local_index(positions), -1)


def _blocks(blocks, me, batch, layout, policy):
    """Key blocks `[B, K]` (-1: none) as far as they lie on this rank: units `[B, N]`, and how many tokens of these."""
    unit, homes = _unit(layout, policy), batch.homes[:, None]
    width = policy.block // layout.round_tokens * layout.stripe + min(layout.stripe, policy.block % layout.round_tokens)
    begin = layout.local_length(blocks * policy.block, me, homes)[..., None] // unit
    end = layout.local_length((blocks + 1) * policy.block, me, homes)[..., None] // unit
    units = begin + jnp.arange(width // unit)
    here = ((units < end) & (blocks >= 0)[..., None]).reshape(blocks.shape[0], -1)
    units = units.reshape(here.shape)
    places = jnp.where(here, jnp.cumsum(here, axis=1) - 1, here.shape[1])
    first_ones = jax.vmap(lambda units, places: jnp.zeros_like(units).at[places].set(units, mode="drop"))(units, places)
    return first_ones, jnp.sum(here, axis=1) * unit


def _shares(q, lse, begin, end, cache, batch, layout, policy, scale):
    """The estimated share of every block for this rank's voting heads, `[B, V, NB]`, the same on all ranks of cp."""
    ranks = layout.cp
    voting = jnp.asarray(voting_heads(q.shape[1], 1, policy.voters)[0])
    top = lax.pmax(lse, "cp")
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    local = shift + jnp.log(lax.psum(jnp.exp(lse - shift), "cp"))

    def logits(item):
        q, pages = item
        index = cache.index.at[cache.layer, pages].get(mode="clip").reshape(-1, q.shape[-1])
        return group_logits(q[None], index, group=policy.group, scale=scale)[0]

    speaking = query_index(q[:, voting], batch.sparse.index.queries[cache.layer])
    own = lax.map(logits, (speaking, batch.page_table))
    batches, voters, groups = own.shape
    stripe = layout.stripe // policy.group
    own = own.reshape(batches, voters, groups // stripe, 1, stripe)
    every = all_gather(own, ("cp",) if ranks > 1 else (), 3)
    turns = (jnp.arange(ranks) + batch.homes[:, None]) % ranks
    ordered = jnp.take_along_axis(every, turns[:, None, None, :, None], axis=3).reshape(batches, voters, -1)
    ordered = ordered[..., : ordered.shape[-1] // (policy.block // policy.group) * (policy.block // policy.group)]

    def shares(logits, lse, end):
        return estimated_shares(logits[None], lse[None], begin, end, per_block=policy.block // policy.group)[0]

    return jax.vmap(shares)(ordered, local[:, voting], end)


def _weights(cache, batch, layout, policy, me, num_blocks):
    """How hot each block is for each query, `[B, NB]`: from the records of its own epoch so far and of those before."""
    epoch = jnp.maximum(batch.positions, 0) // policy.hot_epoch
    start = (epoch[:, None] - EPOCHS + 1 + jnp.arange(EPOCHS + 1)) * policy.hot_epoch
    begun = (batch.positions // policy.query_block + 1) * policy.query_block
    start = jnp.clip(start, 0, begun[:, None])
    bounds = layout.local_length(start, me, batch.homes[:, None]) // policy.query_block
    width = (policy.hot_epoch // layout.round_tokens + 1) * layout.stripe // policy.query_block
    rows = bounds[:, :-1, None] + jnp.arange(width)
    per_page = layout.page_size // policy.query_block
    page = jnp.take_along_axis(batch.page_table, (rows // per_page).reshape(rows.shape[0], -1), axis=1, mode="clip")
    left = cache.records.at[cache.row, page.reshape(rows.shape), rows % per_page].get(mode="clip")
    left = jnp.where((rows < bounds[:, 1:, None])[..., None, None], left, -1)
    left = left.reshape(*left.shape[:2], -1, 2)
    masses = lax.psum(jax.vmap(lambda left: epoch_masses(left, num_blocks))(left), "cp")
    # Weights count the epochs before; a row more makes the running one count as the last of them.
    masses = jnp.pad(masses, ((0, 0), (0, 1), (0, 0)))
    return jax.vmap(lambda masses: hot_weights(masses)[-1])(masses)
