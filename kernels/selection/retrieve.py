"""Both levels of retrieval for the query blocks of a chunk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels.reference.rows import map_active
from jaxinfer.kernels.selection.probes import probe_rows
from jaxinfer.kernels.selection.scores import candidate_blocks, estimated_shares, exact_masses, group_logits

_LOGIT_BYTES = 256 * 2**20
_QUERY_BLOCKS = 8
"""Query blocks that are taken at a time, and as many as their logits have room for."""


class Retrieval(NamedTuple):
    """What `retrieve` found for `n` query blocks and `G` groups of heads."""

    candidates: Int[Array, "n G C"]
    """int32, block numbers, ascending, -1 at the end where there are fewer."""
    masses: Float[Array, "n G C"]
    """float32, the softmax mass of each; 0 for none."""


def voting_heads(heads: int, groups: int, voters: int) -> list[int]:
    """The heads that vote, group after group: as many of each, evenly spread.  `groups` divides `heads`."""
    size = heads // groups
    each = min(size, max(1, voters // groups))
    return [group * size + i * size // each for group in range(groups) for i in range(each)]


def retrieve(
    q: Float[Array, "n Q H D"],
    valid: Bool[Array, "n Q"],
    local_lse: Float[Array, "n Q H"],
    first: Int[Array, " n"],
    end: Int[Array, " n"],
    context: Float[Array, "S D"],
    means: Float[Array, "M D"],
    free: Bool[Array, " S"],
    *,
    scale: float,
    block: int,
    group: int,
    head_groups: int,
    probes: int,
    voters: int,
    candidates: int,
) -> Retrieval:
    """Finds the blocks that hold most softmax mass for each query block and group of heads, each group for itself.

    Args:
        q: absorbed queries of `n` query blocks of `Q` successive positions each.
        valid: which of them exist.
        local_lse: log-sum-exp of what each query reads anyhow.
        first, end: the blocks `first .. end - 1` may be retrieved (see `grid.eligible_blocks`).
        context: latents and rotated keys in the order of the positions, `S` a multiple of `block`.
        means: their `group_means`.
        free: positions that count in the second level: those that are not read anyhow as anchors.
        scale: factor on the logits.

    A query costs `2 D V P / Q` floating-point operations for each group of the context and as much for each key of its
    candidates: with 576 numbers, 32 voters, 4 probes, 32 queries and groups of 32 tokens 76 MFLOP over a context of
    524,288 tokens, and 38 for 64 candidates of 128 tokens.  The query blocks are taken some at a time, so that the
    logits of a long chunk need not exist at once.
    """
    num_blocks = context.shape[0] // block
    voting = jnp.asarray(voting_heads(q.shape[2], head_groups, voters)).reshape(head_groups, -1)
    keys, open_keys = context.reshape(num_blocks, block, -1), free.reshape(num_blocks, block)

    def of_group(heads, item):
        q, valid, lse, first, end = item
        rows = probe_rows(valid, probes)
        q, lse = q[rows][:, heads], lse[rows][:, heads]
        logits = group_logits(q, means, group=group, scale=scale)
        votes = jnp.max(estimated_shares(logits, lse, first, end, per_block=block // group), axis=0)
        found = candidate_blocks(votes, first, end, candidates)
        seen = open_keys.at[found].get(mode="clip") & (found >= 0)[:, None]
        return Retrieval(found, exact_masses(q, keys.at[found].get(mode="clip"), seen, lse, scale=scale))

    def of_query_block(item):
        return jax.vmap(of_group, in_axes=(0, None))(voting, item)

    gathered = candidates * block
    each = 4 * (probes * voting.size * (means.shape[0] + gathered) + head_groups * gathered * context.shape[1])
    batch = max(1, min(_QUERY_BLOCKS, _LOGIT_BYTES // each))
    return map_active(
        of_query_block, (q, valid, local_lse, first, end), end > first, batch, Retrieval(jnp.int32(-1), jnp.float32(0))
    )
