"""Both levels of retrieval for the query blocks of a chunk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mosaic import block_masses, block_scores, block_votes
from jaxinfer.kernels.reference.rows import map_active
from jaxinfer.kernels.selection.index import TYPE, query_index
from jaxinfer.kernels.selection.lists import sorted_whole
from jaxinfer.kernels.selection.probes import probe_rows
from jaxinfer.kernels.selection.scores import (
    candidate_blocks,
    estimated_shares,
    exact_masses,
    group_logits,
    masses_of_blocks,
    standing,
)
from jaxinfer.kernels.tiles import device

_LOGIT_BYTES = 256 * 2**20
_QUERY_BLOCKS = 8
"""Query blocks that are taken at a time, and as many as their logits have room for."""
_SCORE_BYTES = 640 * 2**20
"""Room for the scores of blocks: of a chunk of 8,192 tokens before a million of DeepSeek-V3, all at once."""


class Retrieval(NamedTuple):
    """What `retrieve` found for `n` query blocks and `G` groups of heads."""

    candidates: Int[Array, "n G C"]
    """int32, block numbers, ascending, -1 at the end where there are fewer."""
    masses: Float[Array, "n G C"]
    """float32, the softmax mass of each; 0 for none."""


def voting_heads(heads: int, groups: int, voters: int) -> np.ndarray:
    """Heads that vote, int32 `[groups, V]`: evenly spread, as many of each group, all of them where there are fewer.

    `groups` divides `heads`.
    """
    size = heads // groups
    each = min(size, max(1, voters // groups))
    return (np.arange(groups)[:, None] * size + np.arange(each) * size // each).astype(np.int32)


def retrieve(
    q: Float[Array, "n Q H D"],
    valid: Bool[Array, "n Q"],
    local_lse: Float[Array, "n Q H"],
    first: Int[Array, " n"],
    end: Int[Array, " n"],
    context: Float[Array, "S D"],
    index: Float[Array, "M d"],
    projection: Float[Array, "D d"],
    free: Bool[Array, " S"],
    voting: Int[Array, "G V"],
    *,
    scale: float,
    block: int,
    group: int,
    probes: int,
    candidates: int,
    implementation: dispatch.Implementation | None = None,
) -> Retrieval:
    """Finds the blocks that hold most softmax mass for each query block and group of heads, each group for itself.

    Args:
        q: absorbed queries of `n` query blocks of `Q` successive positions each.
        valid: which of them exist.
        local_lse: log-sum-exp of what each query reads anyhow.
        first, end: the blocks `first .. end - 1` may be retrieved (see `grid.eligible_blocks`).
        context: latents and rotated keys in the order of the positions, `S` a multiple of `block`.
        index: the index of the groups, e4m3: their means, projected (see `kernels.selection.index`).
        projection: of the queries, in their type.
        free: positions that count in the second level: those that are not read anyhow as anchors.
        voting: heads that speak for each group of heads (see `voting_heads`).
        scale: factor on the logits.
        implementation: None chooses (see `dispatch`).

    A query costs `2 d V P / Q` floating-point operations for each group of the context, and `2 D V P / Q` for each key
    of its candidates: with 64 of 576 numbers, 32 voters, 4 probes, 32 queries and groups of 4 tokens 67 MFLOP over a
    context of 524,288 tokens, and 38 for 64 candidates of 128 tokens.

    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    sizes = {"scale": scale, "block": block, "group": group, "probes": probes, "candidates": candidates}
    reason = _reason_against(q, context, index, projection, block, block // group, probes, voting.shape[1])
    chosen = dispatch.choose("selection", implementation, reason)
    function = _by_kernels if chosen == "mosaic" else _by_query_blocks
    return function(q, valid, local_lse, (first, end), context, index, projection, free, voting, **sizes)


def workspace(
    n: int,
    num_blocks: int,
    dim: int,
    *,
    index_dim: int,
    per_block: int,
    head_groups: int,
    probes: int,
    voters: int,
    candidates: int,
) -> int:
    """Bytes that `retrieve` needs at most beside its operands.

    Args:
        n, num_blocks: query blocks and key blocks.
        dim, index_dim: numbers of a latent and of the index of a group.
        per_block: groups of a key block.
        head_groups, voters: groups of heads, and voters of all of them.
    """
    each = _score_bytes(probes * voters, num_blocks)
    scores = min(n * each, _SCORE_BYTES + each)
    rows = n * probes * voters * (2 * dim * 2 + 2 * index_dim * 4 + candidates * 4)
    tiles = num_blocks * per_block * index_dim * 2
    # How blocks stand is sorted when there are no scores any more.
    found = 4 * n * head_groups * num_blocks + max(scores, n * head_groups * 16 * sorted_whole(candidates))
    return max(_LOGIT_BYTES, found + rows + tiles)


def _score_bytes(rows, num_blocks):
    """Of a query block with so many rows."""
    return block_scores.SUMS.dtype.itemsize * rows * num_blocks


def _reason_against(q, context, index, projection, block, per_block, probes, voters):
    types = [array.dtype for array in (q, context, projection)]
    if any(dtype != jnp.bfloat16 for dtype in types):
        return "queries are {}, latents {} and the projection {}, not bfloat16".format(*types)
    if index.dtype != TYPE:
        return f"the index is {index.dtype}, not {TYPE.dtype}"
    if 0 in q.shape or context.shape[0] == 0:
        return "there are no queries or no keys"
    return (
        block_scores.reason_against(index.shape[1], per_block)
        or block_votes.reason_against(probes, index.shape[0] // per_block)
        or block_masses.reason_against(probes * voters, block, q.shape[3])
    )


def _by_query_blocks(
    q, valid, local_lse, limits, context, index, projection, free, voting, *, scale, block, group, probes, candidates
):
    """Some query blocks at a time, so that the logits of a long chunk need not exist at once."""
    first, end = limits
    head_groups = voting.shape[0]
    num_blocks = context.shape[0] // block
    keys, open_keys = context.reshape(num_blocks, block, -1), free.reshape(num_blocks, block)

    def of_group(heads, item):
        q, valid, lse, first, end = item
        rows = probe_rows(valid, probes)
        q, lse = q[rows][:, heads], lse[rows][:, heads]
        logits = group_logits(*query_index(q, projection), index, group=group, scale=scale)
        votes = jnp.max(estimated_shares(logits, lse, first, end, per_block=block // group), axis=0)
        found = candidate_blocks(standing(votes), first, end, candidates)
        seen = open_keys.at[found].get(mode="clip") & (found >= 0)[:, None]
        return Retrieval(found, exact_masses(q, keys.at[found].get(mode="clip"), seen, lse, scale=scale))

    def of_query_block(item):
        return jax.vmap(of_group, in_axes=(0, None))(voting, item)

    gathered = candidates * block
    each = 4 * (probes * voting.size * (index.shape[0] + gathered) + head_groups * gathered * context.shape[1])
    batch = max(1, min(_QUERY_BLOCKS, _LOGIT_BYTES // each))
    return map_active(
        of_query_block, (q, valid, local_lse, first, end), end > first, batch, Retrieval(jnp.int32(-1), jnp.float32(0))
    )


def _by_kernels(
    q, valid, local_lse, limits, context, index, projection, free, voting, *, scale, block, group, probes, candidates
):
    """Both levels by kernels of their own, for all query blocks at once where there is room."""
    n, dim = q.shape[0], q.shape[3]
    head_groups, voters = voting.shape
    num_blocks, multiprocessors = context.shape[0] // block, device().multiprocessors
    rows = jax.vmap(lambda valid: probe_rows(valid, probes))(valid)[:, None, :, None]
    places = jnp.arange(n)[:, None, None, None], rows, voting[:, None]
    q, local_lse = q[places], local_lse[places]
    of_blocks = index.reshape(num_blocks, block // group, -1)

    def find(items):
        (speaking, speaking_scale), local_lse, first, end = items
        spoken = jnp.repeat(jnp.stack((first, end)), head_groups * probes * voters, axis=1)
        rows = speaking.reshape(-1, index.shape[1])
        best = block_scores.block_scores(rows, of_blocks, *spoken, multiprocessors=multiprocessors)
        sizes = {"num_blocks": num_blocks, "scale": scale, "group": group, "multiprocessors": multiprocessors}
        stands = block_votes.block_votes(best, speaking_scale, local_lse, first, end, **sizes)

        def of_group(stands, first, end):
            return candidate_blocks(stands, first, end, candidates)

        return jax.vmap(jax.vmap(of_group, in_axes=(0, None, None)))(stands, first, end)

    each = _score_bytes(head_groups * probes * voters, num_blocks)
    parts = min(n, -(-n * each // _SCORE_BYTES))
    batch = -(-n // parts)
    items = query_index(q, projection), local_lse, *limits
    if parts == 1:
        found = find(items)
    else:

        def split(array):
            padding = [(0, parts * batch - n)] + [(0, 0)] * (array.ndim - 1)
            return jnp.pad(array, padding).reshape(parts, batch, *array.shape[1:])

        found = lax.map(find, jax.tree.map(split, items)).reshape(-1, head_groups, candidates)[:n]
    per_block = block_masses.block_masses(
        q.reshape(n * head_groups, probes * voters, dim),
        context.reshape(num_blocks, block, dim),
        found.reshape(n * head_groups, candidates),
        free.reshape(num_blocks, block),
        scale=scale,
        multiprocessors=multiprocessors,
    )
    per_block = jnp.where(found.reshape(-1, candidates, 1) < 0, -jnp.inf, per_block).swapaxes(1, 2)
    masses = masses_of_blocks(per_block.reshape(*local_lse.shape, candidates), local_lse)
    return Retrieval(found, jnp.where(found < 0, 0.0, masses))
