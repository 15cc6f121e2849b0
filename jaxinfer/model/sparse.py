"""Hybrid attention of a chunk: which positions its queries read, and the attention to them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint

from jaxinfer.cache import RECORDED, Cache, LayerCache
from jaxinfer.configs.attention import Hybrid
from jaxinfer.kernels.latents import expand
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mla_sparse import mla_blocks, mla_window
from jaxinfer.kernels.selection.choice import retrieved_blocks
from jaxinfer.kernels.selection.grid import eligible_blocks, window_start
from jaxinfer.kernels.selection.hot import amounts, epoch_masses, hot_blocks, hot_weights, record
from jaxinfer.kernels.selection.index import group_index
from jaxinfer.kernels.selection.lists import join
from jaxinfer.kernels.selection.retrieve import Retrieval, retrieve
from jaxinfer.model.batch import PrefillBatch
from jaxinfer.model.context import Part, in_order
from jaxinfer.model.policies import Policies
from jaxinfer.model.voters import Voters
from jaxinfer.sharding.collectives import all_reduce, merge
from jaxinfer.sharding.layout import Layout


class Queries(NamedTuple):
    """A chunk's queries on one rank, by token and by query block."""

    q: jax.Array
    """`[T, H, nope + rope]`."""
    absorbed: jax.Array
    """`[n, Q, H, kv_rank + rope]`."""
    rows: jax.Array
    """int32 `[n, Q]`, each token's place in the chunk; anything where it is not valid."""
    valid: jax.Array
    """bool `[n, Q]`."""
    start: jax.Array
    """int32 `[n]`, the position of a block's first token; -1: no block."""
    segments: jax.Array
    """int32 `[n]`, whose block it is; -1: no block."""
    page: jax.Array
    """int32 `[n]`, the page that holds its tokens; out of range: no block."""
    slot: jax.Array
    """int32 `[n]`, which of the page's query blocks it is."""


class Context(NamedTuple):
    """One sequence as its queries read it, the same on all ranks of cp."""

    latents: jax.Array
    """`[S, kv_rank + rope]`, in the order of the positions."""
    index: jax.Array
    """`[S / group, index_dim]`, e4m3."""
    shared: jax.Array
    """int32 `[A]`, positions of sinks and anchors, ascending; then the largest int32."""
    free: jax.Array
    """bool `[S]`, whether a position is none of them."""


class Selection(NamedTuple):
    """What the query blocks of a chunk read besides window, sinks and anchors."""

    hot: jax.Array
    """int32 `[n, hot]`; -1: none."""
    blocks: jax.Array
    """int32 `[n, G, N]`, all blocks that each group of heads reads, the hot ones among them; -1: none."""


def reads_all(positions: jax.Array, policy: Hybrid) -> jax.Array:
    """Whether the queries at `positions` read every earlier position, as is cheapest in short contexts."""
    return positions // policy.query_block * policy.query_block < policy.dense_below


def windows(positions: jax.Array, policy: Hybrid) -> jax.Array:
    """Where the windows of the queries at `positions` begin."""
    return window_start(
        positions,
        window=policy.window,
        block=policy.block,
        query_block=policy.query_block,
        dense_below=policy.dense_below,
    )


def write_index(cache: Cache, layer: jax.Array, batch: PrefillBatch, policies: Policies) -> Cache:
    """Writes the index of the groups that the chunk's tokens complete; their latents are in the cache."""
    if policies.hybrid is None:
        return cache
    tokens, group = batch.positions.shape[0], policies.hybrid.group
    ends = (batch.positions >= 0) & (batch.positions % group == group - 1)
    # A step begins at a whole stripe, so that a group ends in the step that begins it.
    (rows,) = jnp.nonzero(ends, size=tokens // group, fill_value=tokens)
    page = batch.write_page.at[rows].get(mode="fill", fill_value=cache.index.shape[1])
    last = batch.write_offset.at[rows].get(mode="clip")
    return put_index(cache, layer, page, last // group, batch.sparse.index.keys[layer], group, policies)


def put_index(
    cache: Cache,
    layer: jax.Array,
    page: jax.Array,
    number: jax.Array,
    projection: jax.Array,
    group: int,
    policies: Policies,
) -> Cache:
    """Writes the index of groups, int32 `[n]` each: their pages (out of range: none) and numbers in these.

    Nothing is written in layers whose policy is dense.
    """
    rows = page[:, None], number[:, None] * group + jnp.arange(group)
    page = policies.if_hybrid(layer, page, cache.index.shape[1])

    def take(latents, place):
        taken = jax.tree.map(lambda array: array.at[place, *rows].get(mode="clip"), latents)
        return expand(taken, projection.dtype)

    found = group_index(policies.read(cache, layer, take), projection, group)[:, 0]
    return cache._replace(index=put_rows(cache.index, layer, page, number, found))


def put_rows(array: jax.Array, layer: jax.Array, page: jax.Array, number: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes `rows [n, ...]` to places of pages, int32 `[n]` each; pages out of range: none."""
    if len(page) == 1:
        # XLA writes a single row after a kernel that reads the old one and another for the range; two rows, in one.
        page = jnp.concatenate((page, jnp.full_like(page, array.shape[1])))
        number, rows = jnp.tile(number, 2), jnp.tile(rows, (2, *[1] * (rows.ndim - 1)))
    return array.at[layer, page, number].set(rows, mode="drop")


def attend(
    q: jax.Array,
    k_b: jax.Array,
    v_b: jax.Array,
    dense: tuple[jax.Array, jax.Array],
    cache: LayerCache,
    batch: PrefillBatch,
    layout: Layout,
    policy: Hybrid,
    voters: Voters,
    head_axes: tuple[str, ...],
    scale: float,
    unit: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, LayerCache, Selection]:
    """Attends the chunk's queries that do not read all, to what they select, one sequence after another.

    Args:
        q: `[T, H, nope + rope]`, this rank's tokens and heads.
        k_b, v_b: `[H, nope, kv_rank]` and `[H, v, kv_rank]`.
        dense: output `[T, H, v]` and log-sum-exp `[T, H]`, float32, of those that read all; 0 and -inf for others.
        cache: with the chunk's latents and their index.
        voters: under this policy.
        head_axes: mesh axes that divide the heads.
        unit: of the latents, where blocks are attended to in e4m3 (see `kernels.mla_sparse.mla_blocks`); None: they
            are not.

    Returns: `dense` with the others' output and log-sum-exp; the cache with what the query blocks remember; and what
    was selected, nothing for other query blocks.
    """
    tokens = q.shape[0]
    queries = _queries(q, k_b, batch, cache.records.shape[1], policy)
    nothing = jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (*queries.start.shape, RECORDED, 2))
    records = cache.records.at[cache.row, queries.page, queries.slot].set(nothing, mode="drop")

    def of_segment(index, state):
        out, lse, records, chosen, captured = state
        segment = batch.sparse.segments[index]
        mine = (batch.segments == segment) & (segment >= 0) & ~reads_all(batch.positions, policy)
        my_blocks = (queries.segments == segment) & (segment >= 0) & ~reads_all(queries.start, policy)

        def gathered(*parts):
            pages, tiles, home = batch.sparse.pages[index], batch.sparse.tiles[index], batch.homes[segment]
            return in_order(parts, pages, tiles, home, layout, tile_pages=batch.tile_pages.shape[1])

        arrays, structure = jax.tree.flatten(cache.latents)
        of_groups = Part(cache.index, cache.layer, policy.group)
        *arrays, of_groups = gathered(*(Part(array, cache.place) for array in arrays), of_groups)
        latents = expand(jax.tree.unflatten(structure, arrays), q.dtype)
        shared = batch.sparse.shared[index]
        free = jnp.ones(latents.shape[0], bool).at[shared].set(False, mode="drop")
        context = Context(latents, of_groups, shared, free)
        near = _attend_near(q, k_b, v_b, context, jnp.where(mine, batch.positions, -1), layout, policy, scale)

        first, end = eligible_blocks(windows(queries.start, policy), sinks=policy.sinks, block=policy.block)
        first, end = jnp.full_like(end, first), jnp.where(my_blocks, end, 0)
        projection = batch.sparse.index.queries[cache.layer]
        found = _retrieve(queries, context, projection, voting, near[1][queries.rows], first, end, policy, scale)
        found = Retrieval(jnp.where(far[:, None], found.candidates, -1), jnp.where(far[:, None], found.masses, 0.0))
        num_blocks = latents.shape[0] // policy.block
        masses = jax.vmap(lambda masses, blocks: amounts(masses, blocks, num_blocks))(found.masses, found.candidates)
        found_now = jax.vmap(lambda masses: record(masses, RECORDED))(all_reduce(masses, head_axes))
        page = jnp.where(my_blocks, queries.page, records.shape[1])
        records = records.at[cache.row, page, queries.slot].set(found_now, mode="drop")

        (left,) = gathered(Part(records, cache.row, policy.query_block))
        hot = _hot(left, queries.start, first, end, num_blocks, policy)
        selection = _choose(found.masses, found.candidates, hot, far, policy)
        distant = _attend_far(queries, v_b, context, selection, my_blocks, tokens, policy, scale, unit)
        chosen = jax.tree.map(lambda new, old: jnp.where(_over(my_blocks, new), new, old), selection, chosen)
        read = merge(*near, *distant)
        captured += _captured(queries, read[1], context, my_blocks, policy, v_b.shape[2], scale)
        return *merge(out, lse, *read), records, chosen, captured

    n, ranks = queries.start.shape[0], lax.axis_size(head_axes) if head_axes else 1
    voting, far = _of_rank(voters, cache.layer, ranks, head_axes, q.shape[1])
    state = (
        *dense,
        records,
        Selection(
            jnp.full((n, policy.hot_blocks), -1, jnp.int32),
            jnp.full((n, policy.head_groups // ranks, policy.hot_blocks + policy.max_retrieved), -1, jnp.int32),
        ),
        jnp.zeros(2, jnp.float32),
    )
    out, lse, records, chosen, captured = lax.fori_loop(0, batch.sparse.count, of_segment, state)
    hot, listed = jnp.sum(chosen.hot >= 0, axis=1), jnp.mean(jnp.sum(chosen.blocks >= 0, axis=2), axis=1)
    read = jnp.stack((hot, listed - hot)) @ jnp.sum(queries.valid, axis=1).astype(jnp.float32)
    read = jnp.concatenate((read, all_reduce(captured, head_axes) / ranks))
    return out, lse, cache._replace(records=records, reads=cache.reads.at[cache.row, :, 0].set(read)), chosen


def _over(mask: jax.Array, like: jax.Array) -> jax.Array:
    """A mask `[n]` in the shape of an array `[n, ...]` it chooses from."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def _queries(q: jax.Array, k_b: jax.Array, batch: PrefillBatch, pages: int, policy: Hybrid) -> Queries:
    """The chunk's queries; `pages` are the rank's."""
    (tokens, _, _), nope, size = q.shape, k_b.shape[1], policy.query_block
    first = jnp.maximum(batch.sparse.query_blocks, 0)
    rows = jnp.minimum(first[:, None] + jnp.arange(size), tokens - 1)
    start, segments, none = batch.positions[first], batch.segments[first], batch.sparse.query_blocks < 0
    successive = batch.positions[rows] - start[:, None] == jnp.arange(size)
    # One product writes the whole: the rotary part passes through it by an identity, exactly.
    absorb = jax.vmap(lambda w: jax.scipy.linalg.block_diag(w, jnp.eye(q.shape[2] - nope, dtype=w.dtype)))(k_b)
    absorbed = jnp.einsum("thd,hdc->htc", q[rows.reshape(-1)], absorb, preferred_element_type=q.dtype).swapaxes(0, 1)
    return Queries(
        q=q,
        absorbed=absorbed.reshape(*rows.shape, *absorbed.shape[1:]),
        rows=rows,
        valid=(batch.segments[rows] == segments[:, None]) & successive & ~none[:, None],
        start=jnp.where(none, -1, start),
        segments=jnp.where(none, -1, segments),
        page=jnp.where(none, pages, batch.write_page[first]),
        slot=batch.write_offset[first] // size,
    )


def _attend_near(q, k_b, v_b, context, positions, layout, policy, scale):
    """Attention of the queries at `positions` (-1: none) to their windows and to the sinks and anchors before."""
    first = jnp.where(positions < 0, 0, windows(positions, policy))
    shared = context.latents.at[context.shared].get(mode="clip")
    before = jnp.searchsorted(context.shared, first, method="compare_all").astype(jnp.int32)
    runs = window_runs(q.shape[0], layout, policy)
    operands = q, context.latents, k_b, v_b, first, positions + 1, shared, before
    return mla_window(*operands, scale=scale, runs=runs)


def window_runs(tokens: int, layout: Layout, policy: Hybrid) -> tuple[int, int]:
    """How many runs of successive positions hold the windows of a rank's `tokens` of one sequence, and their length.

    One where the windows of neighbouring stripes meet.
    """
    behind = policy.window + policy.block - 1 + policy.query_block - 1
    if layout.cp == 1:
        return 1, tokens + behind
    # A step begins at a whole stripe.
    stripes = -(-tokens // layout.stripe)
    if (layout.cp - 1) * layout.stripe > behind:
        return stripes, layout.stripe + behind
    return 1, (stripes - 1) * layout.round_tokens + layout.stripe + behind


def _of_rank(voters, layer, ranks, head_axes, heads):
    """The voting heads `[G, V]` of this rank's groups, counted through its own heads, and which groups read far."""
    rank, groups = lax.axis_index(head_axes) if head_axes else 0, voters.far.shape[1] // ranks
    voting, far = (
        lax.dynamic_slice_in_dim(array[layer], rank * groups, groups) for array in (voters.prefill, voters.far)
    )
    return voting - rank * heads, far


def _retrieve(queries, context, projection, voting, lse, first, end, policy, scale):
    return retrieve(
        queries.absorbed,
        queries.valid,
        lse,
        first,
        end,
        context.latents,
        context.index,
        projection,
        context.free,
        voting,
        scale=scale,
        block=policy.block,
        group=policy.group,
        probes=policy.probes,
        candidates=policy.candidates,
    )


def _hot(records, start, first, end, num_blocks, policy):
    """The hot blocks `[n, hot]` of the query blocks at `start [n]`, from what all query blocks of the sequence left."""
    by_epoch = records.reshape(records.shape[0] * policy.query_block // policy.hot_epoch, -1, 2)
    weights = hot_weights(epoch_masses(by_epoch, num_blocks))
    weights = weights.at[jnp.maximum(start, 0) // policy.hot_epoch].get(mode="clip")
    return jax.vmap(lambda weights, first, end: hot_blocks(weights, first, end, policy.hot_blocks))(weights, first, end)


def _choose(masses, candidates, hot, far, policy):
    """What each group reads: the hot blocks and those that it retrieved, or nothing where it does not read far."""

    def of_group(masses, candidates, hot):
        least, most = policy.min_retrieved, policy.max_retrieved
        return retrieved_blocks(masses, candidates, hot, least=least, most=most, mass=policy.retrieve_mass)

    retrieved = jax.vmap(jax.vmap(of_group, in_axes=(0, 0, None)))(masses, candidates, hot)
    return Selection(hot, jnp.where(far[:, None], jax.vmap(join)(hot, retrieved), -1))


def _captured(queries, lse, context, mine, policy, kv_rank, scale):
    """Of the last query of the blocks that are `mine`: the share of dense attention's softmax mass that it read, on the
    mean of the heads, and how many such queries there are, 0 or 1.

    `lse [T, H]` is the log-sum-exp of what the queries read.  To read all keys for one query of a chunk of 8,192 takes
    less than a hundredth of the layer's time.
    """
    block = jnp.max(jnp.where(mine, jnp.arange(mine.shape[0]), -1))
    last = jnp.sum(queries.valid[block]) - 1
    q = queries.absorbed[block, last]
    keys = context.latents.reshape(1, -1, policy.block, q.shape[-1])
    length = jnp.where(block < 0, 0, queries.start[block] + last + 1)
    where = jnp.int32(0), jnp.arange(keys.shape[1])[None], length[None]
    _, dense = mla_decode(q[None, None], keys, *where, kv_rank=kv_rank, scale=scale)
    share = jnp.mean(jnp.exp(lse[queries.rows[block, last]] - dense[0, 0]))
    return jnp.where(block < 0, 0.0, jnp.stack((share, jnp.float32(1))))


def _attend_far(queries, v_b, context, selection, mine, tokens, policy, scale, unit):
    """Attention of the query blocks that are `mine` to their lists, by token: `[T, H, v]` and `[T, H]`."""
    dtype, (heads, _, rank) = queries.q.dtype, v_b.shape
    sizes = {"block": policy.block, "kv_rank": rank, "scale": scale, "unit": unit}
    latent, of_block = mla_blocks(queries.absorbed, context.latents, selection.blocks, context.free, **sizes)
    # cuBLAS reads the heads where they lie; XLA would move all of the latents before.
    latent = with_layout_constraint(latent.reshape(-1, heads, rank).swapaxes(0, 1), ArrayLayout((1, 0, 2)))
    values = jnp.einsum("hrc,hvc->hrv", latent.astype(dtype), v_b, preferred_element_type=jnp.float32)
    # Read by token, which becomes a part of the merge: out of range where none of these blocks has the token.
    none = queries.rows.size
    rows = jnp.where(queries.valid & mine[:, None], queries.rows, tokens).reshape(-1)
    place = jnp.full(tokens, none, jnp.int32).at[rows].set(jnp.arange(none, dtype=jnp.int32), mode="drop")
    out = values.swapaxes(0, 1).at[place].get(mode="fill", fill_value=0.0)
    return out, of_block.reshape(none, heads).at[place].get(mode="fill", fill_value=-jnp.inf)
