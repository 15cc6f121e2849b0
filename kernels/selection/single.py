"""The selection of a single token, which reads all candidates, in few kernels.

It is that of the other modules, but for its candidates.  Where one query block is all there is to select for, a step
takes as long as its kernels are many: blocks are compared in pairs, where many rows are better sorted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kernels.selection.hot import fixed_point
from jaxinfer.kernels.selection.lists import by_rank, ranks

_NOTHING = -1e30
"""The log-sum-exp of no key, as a number that can be subtracted from itself."""


class Entries(NamedTuple):
    """Blocks that a token may read or remember, some twice: candidates, those remembered, those that are hot."""

    blocks: Int[Array, " N"]
    """int32; -1: none."""
    amounts: Int[Array, " N"]
    """int32, their masses (see `hot.amounts`)."""
    weights: Int[Array, " N"]
    """int32, how hot they are without the amounts."""


class Listed(NamedTuple):
    """Which of the entries a token reads, each block once, and which its query block remembers."""

    hot: Bool[Array, " N"]
    """Whether it is read because it is hot."""
    read: Bool[Array, " N"]
    """Whether it is read: because it is hot, or a candidate."""
    start: Int[Array, " N"]
    """Of what is read: the sizes of what is listed before."""
    place: Int[Array, " N"]
    """int32, a permutation: the record is what lies in its first places."""
    remembered: Int[Array, "N 2"]
    """int32, (block, amount), and (-1, 0) of what is not to be remembered."""


def shares(best: Float[Array, "V NB"], local_lse: Float[Array, " V"], first, end) -> Float[Array, "V NB"]:
    """The shares of `scores.shares_of_best` of the blocks `first .. end - 1`, others 0; `first` is at least 1."""
    blocks = jnp.arange(best.shape[1])
    # One softmax: what is read anyhow stands in the place of the first block, which is never retrieved.
    best = jnp.where((blocks >= first) & (blocks < end), best, -jnp.inf)
    best = jnp.where(blocks == 0, jnp.maximum(local_lse, _NOTHING)[:, None], best)
    return jnp.where(blocks == 0, 0.0, jax.nn.softmax(best, axis=1))


def candidates(
    votes: Float[Array, "V NB"], first, end, count: int
) -> tuple[Int[Array, " count"], Float[Array, " count"]]:
    """The blocks that the token reads, in the order in which they are taken, and the mean of their votes.

    The voters take turns: every voter's best block, then every voter's second, and so on.  Of the last turn, which does
    not fit whole, the blocks with the largest sum over the voters are taken; of equal ones the earlier block.  -1 and 0
    at the end where there are fewer.

    A token has one list for all heads, and no second level ranks it: what a single voter looks for, and is not sure
    of, a sum over many loses (`scores.standing`; two of thirty look-ups of `retrieval-probe`).
    """
    voters, num_blocks = votes.shape
    turns, blocks = min(count, num_blocks), lax.broadcasted_iota(jnp.int32, votes.shape, 1)
    eligible = (blocks >= first) & (blocks < end)
    # Whole rows: some thousands of blocks are one kernel, where `top_k` takes six.
    _, chosen = lax.sort((jnp.where(eligible, -votes, 1.0), blocks), num_keys=2, is_stable=False)
    # By turn, then by voter: of equal blocks the first call counts.
    block, call, sums = chosen[:, :turns].T.reshape(-1), jnp.arange(voters * turns), jnp.sum(votes, axis=0)
    # Once, not for every pair that is compared.
    block, each = lax.optimization_barrier((block, sums[block]))
    again = jnp.any((block == block[:, None]) & (call < call[:, None]), axis=1)
    taken = ~again & (block >= first) & (block < end)
    # A sum of shares is at most the number of voters: it decides within a turn.
    order = jnp.where(taken, turns - call // voters + each / (voters + 1), -1.0)
    value = jnp.where(taken, block + 1, 0)
    found = by_rank(ranks(order, value), value, count) - 1
    return found, jnp.where(found < 0, 0.0, sums[found] / voters)


def entries(
    candidates: Int[Array, " C"],
    masses: Float[Array, " C"],
    left: Int[Array, "R 2"],
    hottest: Int[Array, "hot 2"],
    weights: Int[Array, " NB"],
) -> Entries:
    """All blocks that matter, `N = C + R + hot`.

    Args:
        candidates, masses: what the token found; -1: none.
        left: the record of the tokens before it in its query block.
        hottest: see `hot.hottest`, by these weights.
        weights: how hot each block is without the query block.
    """
    count, first = len(candidates) + len(left) + len(hottest), len(candidates)

    def put(array, first):
        return jnp.pad(array, (first, count - first - len(array)))

    # Sums, where XLA would make a kernel of each concatenation.
    blocks = put(candidates + 1, 0) + put(left[:, 0] + 1, first) + put(hottest[:, 0] + 1, first + len(left)) - 1
    amounts = put(fixed_point(masses), 0) + put(left[:, 1], first)
    return Entries(blocks, amounts, weights.at[blocks].get(mode="clip"))


def listed(
    entries: Entries, sizes: Int[Array, " N"], first, end, *, candidates: int, remembered: int, hot: int
) -> Listed:
    """What a token reads: its candidates, then what else is hot once its query block's record is counted.

    Of a block that was found before as well, the larger amount stays.  No block that is not among the entries can be
    hot, for a weight only grows.

    Args:
        sizes: what each entry takes in the list.
        first, end: the blocks `first .. end - 1` can be hot.
        candidates: how many entries, the first ones, are candidates.
        remembered: entries of a record.
        hot: how many blocks can be hot.
    """
    blocks, amounts, weights = entries
    number = jnp.arange(len(blocks))
    same, earlier = blocks == blocks[:, None], number < number[:, None]
    own = (blocks >= 0) & ~jnp.any(same & earlier, axis=1)
    amounts = jnp.where(own, jnp.max(jnp.where(same, amounts, 0), axis=1), 0)
    larger, lower = amounts > amounts[:, None], jnp.where(amounts > 0, blocks < blocks[:, None], earlier)
    place = jnp.sum(larger | (amounts == amounts[:, None]) & lower, axis=1)
    pairs = jnp.stack((jnp.where(amounts > 0, blocks, -1), amounts), axis=1)

    weights = weights + jnp.where(place < remembered, amounts, 0)
    weights = jnp.where(own & (blocks >= first) & (blocks < end), weights, 0)
    hotter = (weights > weights[:, None]) | ((weights == weights[:, None]) & (blocks < blocks[:, None]))
    is_hot = jnp.sum(hotter | (weights[:, None] <= 0), axis=1) < hot
    chosen = (number < candidates) & (blocks >= 0)
    # What is hotter than a hot block is read as well.
    before = chosen & (earlier | ~chosen[:, None]) | hotter & ~chosen[:, None] & (weights > 0)
    start = jnp.sum(jnp.where(before, sizes, 0), axis=1)
    return Listed(is_hot, is_hot | chosen, start, place, pairs)
