"""What hybrid attention of single tokens reads of a sequence's cache, as far as it is the same for all layers.

Decode has little to compute and is as slow as its kernels are many, so that what follows from the positions alone, and
from what earlier query blocks left in every layer, is computed once a step.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import Cache
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.mla_decode import decode_schedule
from jaxinfer.kernels.selection.grid import eligible_blocks
from jaxinfer.kernels.selection.hot import EPOCHS, epoch_masses, hottest
from jaxinfer.model.batch import DecodeBatch
from jaxinfer.model.policies import Policies
from jaxinfer.model.sparse import reads_all, windows
from jaxinfer.model.voters import Voters
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """Of `B` sequences under one policy, on this rank.  A unit is of `unit` tokens (see there)."""

    policy: Hybrid = field(metadata={"static": True})
    voters: jax.Array | None
    """int32 `[layers, V]`, the heads that vote, of all ranks; None: evenly spread ones."""
    window: jax.Array
    """int32 `[B, N]`, the units of the cache that hold each window."""
    window_length: jax.Array
    """int32 `[B]`, how many tokens of these."""
    window_schedule: tuple
    blocks_schedule: tuple
    """For as many blocks as can be listed."""
    shared: tuple[jax.Array, jax.Array, jax.Array]
    """int32 `[B, A]` each, the page, the place in it, and the key block of the sinks and anchors before each window
    that lie on this rank; page -1: none."""
    begin: int
    end: jax.Array
    """int32 `[B]`: the blocks `begin .. end - 1` may be retrieved or hot."""
    left: jax.Array
    """int32 `[layers, B, RECORDED, 2]`, the record of the token's query block up to now."""
    weights: jax.Array
    """int32 `[layers, B, NB]`, how hot each block is without that record: from the rest of the token's epoch and the
    epochs before."""
    hottest: jax.Array
    """int32 `[layers, B, hot, 2]`, the hottest of them."""


def decode_plans(
    cache: Cache, batch: DecodeBatch, heads: int, layout: Layout, plan: Plan, policies: Policies
) -> tuple[DecodePlan, ...]:
    """The plan of each of the distinct hybrid policies."""
    others = [axis for axis in plan.axes("heads", heads) if axis != "cp"]
    rows = heads // math.prod(lax.axis_size(axis) for axis in others)
    return tuple(
        decode_plan(cache, batch, rows, layout, policy, voters)
        for policy, voters in zip(policies.distinct, batch.sparse.voters, strict=True)
        if isinstance(policy, Hybrid)
    )


def decode_plan(
    cache: Cache, batch: DecodeBatch, heads: int, layout: Layout, policy: Hybrid, voters: Voters
) -> DecodePlan:
    """`heads` are those of this rank."""
    sparse = (batch.positions >= 0) & ~reads_all(batch.positions, policy)
    first = jnp.where(sparse, windows(batch.positions, policy), 0)
    window, length = _window(first, sparse, batch, layout, policy)
    most = listed_blocks(policy) * units_of_block(layout, policy) * unit(layout, policy)
    begin, end = eligible_blocks(first, sinks=policy.sinks, block=policy.block)
    weights = _weights(cache, batch, layout, policy)
    hot = jax.vmap(lambda weights, end: hottest(weights, begin, end, policy.hot_blocks + policy.retrieve_blocks))
    return DecodePlan(
        policy=policy,
        voters=voters.decode,
        window=in_cache(window, batch, layout, policy),
        window_length=length,
        window_schedule=decode_schedule(length, heads),
        blocks_schedule=decode_schedule(jnp.where(sparse, most, 0), heads),
        shared=_shared(first, batch, layout, policy),
        begin=begin,
        end=end,
        left=_left(cache, batch, policy),
        weights=weights,
        hottest=jax.vmap(lambda weights: hot(weights, end))(weights),
    )


def listed_blocks(policy: Hybrid) -> int:
    """How many blocks a token reads at most."""
    return policy.candidates + policy.hot_blocks + policy.retrieve_blocks


def unit(layout: Layout, policy: Hybrid) -> int:
    """Tokens that lie together on a rank and in a page, and of which windows and blocks are made: a page, as a rule."""
    return math.gcd(layout.stripe, policy.block)


def units_of_block(layout: Layout, policy: Hybrid) -> int:
    """How many units of a block lie on one rank at most."""
    rest = min(layout.stripe, policy.block % layout.round_tokens)
    return (policy.block // layout.round_tokens * layout.stripe + rest) // unit(layout, policy)


def in_cache(units: jax.Array, batch: DecodeBatch, layout: Layout, policy: Hybrid) -> jax.Array:
    """Where units `[B, N]` that count through a sequence's pages lie in the cache."""
    of_page = layout.page_size // unit(layout, policy)
    pages = jnp.take_along_axis(batch.page_table, units // of_page, axis=1, mode="clip")
    return pages * of_page + units % of_page


def _window(first, sparse, batch, layout, policy):
    """The window of each token as far as it lies on this rank: units `[B, N]`, and how many tokens of these."""
    me, size = lax.axis_index("cp"), unit(layout, policy)
    longest = policy.window + policy.block + policy.query_block
    width = -(-longest // layout.round_tokens) * layout.stripe + layout.stripe
    begin = layout.local_length(first, me, batch.homes)
    end = layout.local_length(batch.positions + 1, me, batch.homes)
    return begin[:, None] // size + jnp.arange(-(-width // size)), jnp.where(sparse, end - begin, 0)


def _shared(first, batch, layout, policy):
    """Page, place and block of the sinks and anchors before the windows that lie on this rank, `[B, A]` each."""
    positions = batch.sparse.shared
    here = (layout.rank(positions, batch.homes[:, None]) == lax.axis_index("cp")) & (positions < first[:, None])
    token = layout.local_index(jnp.where(here, positions, 0))
    page = jnp.take_along_axis(batch.page_table, token // layout.page_size, axis=1, mode="clip")
    return jnp.where(here, page, -1), token % layout.page_size, positions // policy.block


def _left(cache, batch, policy):
    """What earlier tokens of each token's query block left, `[layers, B, RECORDED, 2]`, the same on all ranks of cp."""
    none = jnp.array([-1, 0], jnp.int32)
    left = cache.records.at[:, batch.write_page, batch.write_offset // policy.query_block].get(mode="clip")
    mine = (batch.write_page < cache.records.shape[1]) & (batch.positions % policy.query_block > 0)
    return lax.psum(jnp.where(mine[:, None, None], left - none, 0), "cp") + none


def _weights(cache, batch, layout, policy):
    """How hot each block is for each token, `[layers, B, NB]` (see `hot_weights`).

    From the query blocks of its epoch before its own, which count as those of the last epoch, and the epochs before.
    """
    num_blocks = batch.page_table.shape[1] * layout.page_size * layout.cp // policy.block
    me, size = lax.axis_index("cp"), policy.query_block
    per_page, width = layout.page_size // size, (policy.hot_epoch // layout.round_tokens + 1) * layout.stripe // size
    now = jnp.maximum(batch.positions, 0) // size * size
    weights = jnp.int32(0)
    for age in range(EPOCHS):
        start = (now // policy.hot_epoch - age) * policy.hot_epoch
        bounds = [jnp.clip(bound, 0, now) for bound in (start, start + policy.hot_epoch)]
        begin, end = (layout.local_length(bound, me, batch.homes) // size for bound in bounds)
        rows = begin[:, None] + jnp.arange(width)
        page = jnp.take_along_axis(batch.page_table, rows // per_page, axis=1, mode="clip")
        left = cache.records.at[:, page, rows % per_page].get(mode="clip")
        left = jnp.where((rows < end[:, None])[..., None, None], left, -1)
        layers, batches = left.shape[:2]
        masses = epoch_masses(left.reshape(layers * batches, -1, 2), num_blocks).reshape(layers, batches, num_blocks)
        weights += lax.psum(masses, "cp") >> age
    return weights
