"""How much softmax mass each key block holds for the heads and queries that speak: estimated, then exact.

Shapes: `P` probe queries, `V` voting heads, `D` numbers of a latent (absorbed queries and keys), `M` groups and `d`
numbers of the index of each, `NB` key blocks, `C` candidates.  All results are float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels.selection.lists import top_blocks

ALIKE = 1 - 2.0**-14
"""Shares whose ratio is no smaller are equal: they are exponentials of differences of logits, rounded in float32."""


def group_logits(
    q: Float[Array, "P V d"], q_scale: Float[Array, "P V"], index: Float[Array, "M d"], *, group: int, scale: float
) -> Float[Array, "P V M"]:
    """First level: the logit of each group, `scale q_scale q index + ln(group)`, as if all its tokens were their mean.

    Args:
        q, q_scale: projected queries, e4m3, and their scales (see `kernels.selection.index`).
        index: the index of the groups, e4m3: their means, projected.

    Costs `2 d V P M` floating-point operations for a query block.  Products and sums are in float32.
    """
    # bfloat16 holds every e4m3, and its products are as exact.
    q, index = q.astype(jnp.bfloat16), index.astype(jnp.bfloat16)
    logits = jnp.einsum("pvd,md->pvm", q, index, preferred_element_type=jnp.float32)
    return logits * (scale * q_scale)[..., None] + math.log(group)


def best_groups(logits: Float[Array, "*rows M"], first, end, *, per_block: int) -> Float[Array, "*rows NB"]:
    """First level: the largest logit of the `per_block` groups of each block.

    Of the blocks `first .. end - 1`; others have -inf.
    """
    best = jnp.max(logits.reshape(*logits.shape[:-1], -1, per_block), axis=-1)
    blocks = jnp.arange(best.shape[-1])
    return jnp.where((blocks >= first) & (blocks < end), best, -jnp.inf)


def estimated_shares(
    logits: Float[Array, "P V M"], local_lse: Float[Array, "P V"], first, end, *, per_block: int
) -> Float[Array, "P V NB"]:
    """First level: each block's share of a head's softmax, from the logits of its `per_block` groups.

    A block counts as its best group: the maximum over small pieces keeps a single good one visible, as in InfLLM-v2
    and HISA.  The share is relative to `local_lse`, the log-sum-exp of what the query reads anyhow, and the best groups
    of the blocks `first .. end - 1`; other blocks have share 0.
    """
    return shares_of_best(best_groups(logits, first, end, per_block=per_block), local_lse)


def shares_of_best(best: Float[Array, "*rows NB"], local_lse: Float[Array, "*rows"]) -> Float[Array, "*rows NB"]:
    """See `estimated_shares`, from what `best_groups` found."""
    return _share(best, jnp.logaddexp(local_lse, jax.nn.logsumexp(best, axis=-1))[..., None])


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
    return masses_of_blocks(jax.nn.logsumexp(jnp.where(seen, logits, -jnp.inf), axis=-1), local_lse)


def masses_of_blocks(
    per_block: Float[Array, "*lead P V C"], local_lse: Float[Array, "*lead P V"]
) -> Float[Array, "*lead C"]:
    """See `exact_masses`, from the log-sum-exp of the keys of each candidate."""
    total = jnp.logaddexp(local_lse, jax.nn.logsumexp(per_block, axis=-1))
    return jnp.mean(jnp.max(_share(per_block, total[..., None]), axis=-3), axis=-2)


def _share(part: jax.Array, total: jax.Array) -> jax.Array:
    """`exp(part - total)`; 0 where nothing is, also where the total is nothing too."""
    return jnp.where(jnp.isneginf(part), 0.0, jnp.exp(part - jnp.where(jnp.isneginf(total), 0.0, total)))


def standing(votes: Float[Array, "V NB"]) -> Float[Array, " NB"]:
    """How a group of heads ranks the blocks: by the sum of their shares, but a voter's best before all others.

    A share is one number for each voter and block, the largest over the probes.  Where it is the voter's largest, up to
    rounding, it counts `bonus` more: however flat the others are, or however sure of other blocks, the second level
    sees what each voter would choose.
    """
    best = jnp.max(votes, axis=1, keepdims=True)
    return jnp.sum(votes + jnp.where((votes >= best * ALIKE) & (votes > 0), bonus(votes.shape[0]), 0.0), axis=0)


def bonus(voters: int) -> int:
    """More than all shares of a block can be together."""
    return voters + 1


def candidate_blocks(standing: Float[Array, " NB"], first, end, count: int) -> Int[Array, " count"]:
    """The blocks that one group of heads hands to the second level: those of the highest standing.

    Of equal ones the earlier block is taken, and of all only the blocks `first .. end - 1`.

    Returns: `[count]` int32, ascending, -1 at the end where there are fewer.
    """
    blocks = jnp.arange(standing.shape[0])
    return top_blocks(jnp.where((blocks >= first) & (blocks < end), standing, -1.0), count)
