"""How much softmax mass each key block holds for the heads and queries that speak: estimated, then exact.

Shapes: `P` probe queries, `V` voting heads, `D` numbers of a latent (absorbed queries and keys), `M` groups, `NB` key
blocks, `C` candidates.  All results are float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels.selection.lists import top_blocks


def group_logits(
    q: Float[Array, "P V D"], means: Float[Array, "M D"], *, group: int, scale: float
) -> Float[Array, "P V M"]:
    """First level: the logit of each group, `scale q mean + ln(group)`, as if all its tokens were their mean.

    Costs `2 D V P M` floating-point operations for a query block.
    """
    logits = jnp.einsum("pvd,md->pvm", q, means.astype(q.dtype), preferred_element_type=jnp.float32)
    return logits * scale + math.log(group)


def estimated_shares(
    logits: Float[Array, "P V M"], local_lse: Float[Array, "P V"], first, end, *, per_block: int
) -> Float[Array, "P V NB"]:
    """First level: each block's share of a head's softmax, from the logits of its `per_block` groups.

    A block counts as its best group: the maximum over small pieces keeps a single good one visible, as in InfLLM-v2
    and HISA.  The share is relative to `local_lse`, the log-sum-exp of what the query reads anyhow, and all groups of
    the blocks `first .. end - 1`; other blocks have share 0.
    """
    blocks = jnp.arange(logits.shape[-1] // per_block)
    eligible = (blocks >= first) & (blocks < end)
    logits = jnp.where(jnp.repeat(eligible, per_block), logits, -jnp.inf)
    total = jnp.logaddexp(local_lse, jax.nn.logsumexp(logits, axis=-1))
    best = jnp.max(logits.reshape(*logits.shape[:2], -1, per_block), axis=-1)
    return _share(best, total[..., None])


def exact_masses(
    q: Float[Array, "P V D"],
    keys: Float[Array, "C block D"],
    seen: Bool[Array, "C block"],
    local_lse: Float[Array, "P V"],
    *,
    scale: float,
) -> Float[Array, " C"]:
    """Second level: the softmax mass of each candidate, the maximum over the probes, the mean over the voters.

    Masses are relative to `local_lse` and all keys of the candidates that are `seen` (memory never written and tokens
    that are read as anchors are not).  Costs `2 D V P C block` floating-point operations.
    """
    rows = jnp.where(seen[..., None], keys, 0).astype(q.dtype)
    logits = jnp.einsum("pvd,cbd->pvcb", q, rows, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(seen, logits, -jnp.inf)
    per_block = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.logaddexp(local_lse, jax.nn.logsumexp(per_block, axis=-1))
    return jnp.mean(jnp.max(_share(per_block, total[..., None]), axis=0), axis=0)


def _share(part: jax.Array, total: jax.Array) -> jax.Array:
    """`exp(part - total)`; 0 where nothing is, also where the total is nothing too."""
    return jnp.where(jnp.isneginf(part), 0.0, jnp.exp(part - jnp.where(jnp.isneginf(total), 0.0, total)))


def candidate_blocks(votes: Float[Array, "V NB"], first, end, count: int) -> Int[Array, " count"]:
    """The blocks that one group of heads hands to the second level.

    The voters take turns: every voter's best block, then every voter's second, and so on, for a sum would silence the
    few heads that look far away.  Of the last turn, which does not fit whole, the blocks with the largest sum over the
    voters are taken; of equal ones the earlier block.

    Args:
        votes: the share of each block for each voter, the maximum over the probes.
        first, end: blocks `first .. end - 1` can be taken.
        count: how many are taken, at least as many as there are voters.

    Returns: `[count]` int32, ascending, -1 at the end where there are fewer.
    """
    voters, num_blocks = votes.shape
    blocks = jnp.arange(num_blocks)
    eligible = (blocks >= first) & (blocks < end)
    turns = min(count, num_blocks)
    _, chosen = jax.lax.top_k(jnp.where(eligible, votes, -1.0), turns)
    turn = jnp.full((voters, num_blocks), turns).at[jnp.arange(voters)[:, None], chosen].set(jnp.arange(turns))
    # A sum of shares is at most the number of voters: it decides within a turn.
    order = turns - jnp.min(turn, axis=0) + jnp.sum(votes, axis=0) / (voters + 1)
    return top_blocks(jnp.where(eligible, order, -1.0), count)
