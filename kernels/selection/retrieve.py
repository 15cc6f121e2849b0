"""Both levels of retrieval for the query blocks of a chunk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels.selection.probes import probe_rows
from jaxinfer.kernels.selection.scores import candidate_blocks, estimated_shares, exact_masses

_LOGIT_BYTES = 256 * 2**20


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
    """Finds the blocks that hold most softmax mass for each query block and group of heads.

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
    heads, num_blocks = q.shape[2], context.shape[0] // block
    voting = jnp.asarray(voting_heads(heads, head_groups, voters))
    keys, open_keys = context.reshape(num_blocks, block, -1), free.reshape(num_blocks, block)

    def one(item):
        q, valid, lse, first, end = item
        q, lse = q[:, voting], lse[:, voting]
        rows = probe_rows(q, valid, probes)
        q, lse = q[rows], lse[rows]
        shares = estimated_shares(q, means, lse, first, end, group=group, block=block, scale=scale)

        def of_group(q, lse, shares):
            found = candidate_blocks(shares, first, end, candidates)
            seen = open_keys.at[found].get(mode="clip") & (found >= 0)[:, None]
            return found, exact_masses(q, keys.at[found].get(mode="clip"), seen, lse, scale=scale)

        split = (head_groups, -1)
        return Retrieval(
            *jax.vmap(of_group, in_axes=1)(
                q.reshape(probes, *split, q.shape[-1]),
                lse.reshape(probes, *split),
                shares.reshape(probes, *split, num_blocks),
            )
        )

    each = probes * len(voting) * (means.shape[0] + candidates * block) * 4
    return lax.map(one, (q, valid, local_lse, first, end), batch_size=max(1, _LOGIT_BYTES // each))
