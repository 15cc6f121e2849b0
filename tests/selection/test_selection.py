"""Every part of the selection against a slow and obvious form, over random cases."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.selection import hot as hot_module
from jaxinfer.kernels.selection.choice import retrieved_blocks
from jaxinfer.kernels.selection.grid import eligible_blocks, window_start
from jaxinfer.kernels.selection.index import group_index, query_index
from jaxinfer.kernels.selection.lists import ascending, by_rank, join, ranks, top_blocks, top_k
from jaxinfer.kernels.selection.means import group_means
from jaxinfer.kernels.selection.probes import probe_rows
from jaxinfer.kernels.selection.retrieve import retrieve, voting_heads
from jaxinfer.kernels.selection.scores import (
    candidate_blocks,
    estimated_shares,
    exact_masses,
    group_logits,
    standing,
)
from tests.selection import slow

# The exponential of a logit of 40 in float32 is off by 40 * 2^-24 and more, relative to itself.
EXPONENTIALS = {"rtol": 2e-5, "atol": 1e-7}


def listed(blocks) -> list[int]:
    """The block numbers of a list; checks that the places without one are at its end."""
    numbers = np.asarray(blocks).tolist()
    kept = [number for number in numbers if number >= 0]
    assert numbers == kept + [-1] * (len(numbers) - len(kept))
    assert len(set(kept)) == len(kept)
    return kept


@settings(max_examples=300)
@given(
    position=st.integers(0, 2**31 - 1),
    window=st.integers(1, 10000),
    block=st.sampled_from([32, 64, 128, 96]),
    query_block=st.sampled_from([1, 16, 32]),
    dense_below=st.integers(0, 40000),
)
def test_window(position: int, window: int, block: int, query_block: int, dense_below: int):
    sizes = {"window": window, "block": block, "query_block": query_block, "dense_below": dense_below}
    start = window_start(position, **sizes)
    assert start == slow.window_start(position, **sizes)
    assert int(window_start(jnp.int32(position), **sizes)) == start
    assert 0 <= start <= position and start % block == 0
    first, end = eligible_blocks(start, sinks=2 * block, block=block)
    assert first == 2 and end * block == start


def test_every_position_is_read_once_when_lists_hold_all_blocks():
    """Sinks, eligible blocks and window part the positions up to the query."""
    for position in range(0, 3000, 7):
        start = window_start(position, window=300, block=64, query_block=16, dense_below=500)
        first, end = eligible_blocks(start, sinks=128, block=64)
        sinks = range(min(128, start))
        blocks = itertools.chain.from_iterable(range(b * 64, b * 64 + 64) for b in range(first, end))
        assert [*sinks, *blocks, *range(start, position + 1)] == list(range(position + 1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_means(dtype):
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(2, 96, 5)) + 3, dtype)
    means = group_means(latents, 32)
    assert means.dtype == dtype
    for ours, rows in zip(means, latents, strict=True):
        wanted = slow.group_means(np.asarray(rows, np.float64), 32)
        np.testing.assert_allclose(np.asarray(ours, np.float64), wanted, rtol=2**-8 if dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_probes(count: int):
    for valid in range(1, 9):
        rows = np.asarray(probe_rows(jnp.arange(8) < valid, count)).tolist()
        assert rows == slow.probe_rows(valid, count)
        assert rows[-1] == valid - 1
        assert len(set(rows)) == min(valid, count)
    assert probe_rows(jnp.zeros(8, bool), count).shape == (count,)


class Case:
    """Random latents with a direction that many share, as keys of a model have, and queries that look at some."""

    def __init__(self, seed: int, block: int = 8, group: int = 4, blocks: int = 12, voters: int = 4, probes: int = 3):
        rng = np.random.default_rng(seed)
        self.block, self.group, self.dim, self.scale = block, group, 6, 0.7
        common = rng.normal(size=self.dim)
        self.context = (rng.normal(size=(blocks * block, self.dim)) + common).astype(np.float32)
        self.q = rng.normal(size=(probes, voters, self.dim)).astype(np.float32)
        self.q[rng.random(self.q.shape[:2]) < 0.5] += 2 * self.context[rng.integers(len(self.context))]
        self.lse = rng.normal(size=self.q.shape[:2]).astype(np.float32)
        self.lse[rng.random(self.lse.shape) < 0.1] = -np.inf
        self.first = int(rng.integers(0, 3))
        self.end = int(rng.integers(self.first, blocks + 1))
        self.free = rng.random(len(self.context)) > 0.1
        self.index = group_index(jnp.asarray(self.context), jnp.eye(self.dim), group)
        self.rng = rng

    def shares(self):
        speaking = query_index(jnp.asarray(self.q), jnp.eye(self.dim))
        logits = group_logits(*speaking, self.index, group=self.group, scale=self.scale)
        return estimated_shares(logits, jnp.asarray(self.lse), self.first, self.end, per_block=self.block // self.group)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_estimated_shares(seed: int):
    case = Case(seed)
    wanted = slow.shares(
        slow.rounded_queries(case.q.astype(np.float64)),
        np.asarray(case.index, np.float64),
        case.lse,
        case.first,
        case.end,
        case.group,
        case.block,
        case.scale,
    )
    np.testing.assert_allclose(case.shares(), wanted, **EXPONENTIALS)


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(1, 14))
def test_candidates(seed: int, count: int):
    """Equal scores, also many of them, give equal lists."""
    rng = np.random.default_rng(seed)
    shares = rng.integers(0, rng.integers(2, 9), size=(2, 3, 12)).astype(np.float32) / 64
    first = int(rng.integers(0, 4))
    end = int(rng.integers(first, 13))
    shares[..., :first] = shares[..., end:] = 0
    found = listed(candidate_blocks(standing(jnp.max(jnp.asarray(shares), axis=0)), first, end, count))
    assert found == slow.candidate_blocks(shares, first, end, count)
    assert len(found) == min(count, end - first)


def test_a_voter_that_is_sure_is_heard():
    """Three flat voters agree on blocks that a fourth has nothing of; its own choice is handed on all the same."""
    votes = np.zeros((4, 8), np.float32)
    votes[:3, 1:6] = np.linspace(0.3, 0.1, 5)
    votes[3, 7] = 0.01
    assert listed(candidate_blocks(standing(jnp.asarray(votes)), 1, 8, 2)) == [1, 7]
    assert listed(candidate_blocks(standing(jnp.asarray(votes)), 1, 8, 3)) == [1, 2, 7]
    assert listed(candidate_blocks(standing(jnp.asarray(votes)), 1, 7, 3)) == [1, 2, 3]


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_exact_masses(seed: int):
    case = Case(seed)
    blocks = case.rng.permutation(12)[:5]
    keys, seen = case.context.reshape(12, case.block, -1)[blocks], case.free.reshape(12, case.block)[blocks]
    seen[3] = False
    case.free[blocks[3] * case.block : (blocks[3] + 1) * case.block] = False
    keys = np.where(seen[..., None], keys, np.nan)  # what is not seen may hold anything
    found = exact_masses(
        jnp.asarray(case.q), jnp.asarray(keys), jnp.asarray(seen), jnp.asarray(case.lse), scale=case.scale
    )
    wanted = slow.masses(
        case.q.astype(np.float64), case.context, blocks.tolist(), case.free, case.lse, case.block, case.scale
    )
    np.testing.assert_allclose(found, wanted, **EXPONENTIALS)


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1), st.one_of(st.none(), st.floats(0.05, 1.0)))
def test_retrieved(seed: int, mass: float | None):
    rng = np.random.default_rng(seed)
    count, most = 12, int(rng.integers(1, 9))
    least = most if mass is None else int(rng.integers(1, most + 1))
    candidates = np.sort(rng.permutation(30)[:count]).astype(np.int32)
    candidates[int(rng.integers(0, count + 1)) :] = -1
    # Sixty-fourths add exactly, so that a sum is as large as a share of the total in both forms or in none.
    masses = np.where(candidates < 0, 0, rng.integers(0, 9, count) / 64).astype(np.float32)
    hot = np.array([*rng.choice(candidates, 2, replace=False), -1], np.int32)
    arrays = jnp.asarray(masses), jnp.asarray(candidates), jnp.asarray(hot)
    mass = None if mass is None else float(np.float32(mass))
    found = listed(retrieved_blocks(*arrays, least=least, most=most, mass=mass))
    assert found == slow.retrieved_blocks(masses.tolist(), candidates.tolist(), hot.tolist(), least, most, mass)
    both = listed(join(arrays[2], jnp.asarray(found, jnp.int32)[None])[0])
    assert both == sorted({*found, *(block for block in hot.tolist() if block >= 0)})


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_hot(seed: int):
    rng = np.random.default_rng(seed)
    num_blocks, epochs, per_epoch, count, groups = 10, int(rng.integers(1, 8)), 3, 4, 2
    kept: dict[int, list[tuple[int, int]]] = {}
    records = np.empty((epochs, per_epoch, count, 2), np.int32)
    for epoch in range(epochs):
        kept[epoch] = []
        for query_block in range(per_epoch):
            candidates = np.sort(
                [rng.permutation(num_blocks)[:5] if rng.random() > 0.2 else np.full(5, -1) for _ in range(groups)]
            ).astype(np.int32)
            masses = np.where(candidates < 0, 0, rng.random(candidates.shape) ** 4).astype(np.float32)
            amounts = hot_module.amounts(jnp.asarray(masses), jnp.asarray(candidates), num_blocks)
            left = np.asarray(hot_module.record(amounts, count))
            wanted = slow.record(masses, candidates, count)
            assert left.tolist() == [*map(list, wanted), *[[-1, 0]] * (count - len(wanted))]
            kept[epoch] += wanted
            records[epoch, query_block] = left
    sums = hot_module.epoch_masses(jnp.asarray(records).reshape(epochs, -1, 2), num_blocks)
    weights = hot_module.hot_weights(sums)
    for epoch in range(epochs):
        first, end = sorted(rng.integers(0, num_blocks + 1, 2).tolist())
        found = listed(hot_module.hot_blocks(weights[epoch], first, end, 3))
        assert found == slow.hot_blocks(kept, epoch, first, end, 3)


def test_what_later_epochs_left_and_garbage_change_nothing():
    rng = np.random.default_rng(0)
    records = np.stack((rng.integers(0, 6, (5, 12)), rng.integers(0, 1000, (5, 12))), axis=-1).astype(np.int32)
    before = hot_module.hot_weights(hot_module.epoch_masses(jnp.asarray(records), 6))
    records[3:] = rng.integers(-(2**31), 2**31 - 1, records[3:].shape)
    after = hot_module.hot_weights(hot_module.epoch_masses(jnp.asarray(records), 6))
    np.testing.assert_array_equal(before[:4], after[:4])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 20, 40]), st.sampled_from([np.float32, np.int32]))
def test_top_of_long_rows(seed: int, k: int, dtype):
    """Also where many are equal, as the votes of blocks that nobody looks at are."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-1, int(rng.integers(1, 60)), size=(3, 1100)).astype(dtype)
    found, places = top_k(jnp.asarray(values), k)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(found, np.take_along_axis(values, order, axis=1))


def test_lists():
    order, blocks = jnp.asarray([2.0, 5.0, 2.0, -1.0]), jnp.asarray([7, 3, 4, 0])
    assert np.asarray(ranks(order, blocks)).tolist() == [2, 0, 1, 3]
    assert np.asarray(by_rank(ranks(order, blocks), blocks, 3)).tolist() == [3, 4, 7]
    assert np.asarray(ascending(jnp.asarray([[3, -1, 0], [-1, -1, 7]]))).tolist() == [[0, 3, -1], [7, -1, -1]]
    assert np.asarray(top_blocks(jnp.asarray([1.0, 2.0, 1.0, -1.0, 2.0]), 3)).tolist() == [0, 1, 4]
    assert np.asarray(top_blocks(jnp.asarray([1, -1]), 4)).tolist() == [0, -1, -1, -1]
    assert top_blocks(jnp.asarray([1, -1]), 0).shape == (0,)


def test_voting_heads():
    assert voting_heads(8, 2, 4).tolist() == [[0, 2], [4, 6]]
    assert voting_heads(4, 4, 32).tolist() == [[0], [1], [2], [3]]
    assert voting_heads(6, 1, 4).tolist() == [[0, 1, 3, 4]]
    assert voting_heads(128, 4, 32).tolist() == np.arange(0, 128, 4).reshape(4, 8).tolist()


@pytest.mark.parametrize("budget", [2**28, 1])
def test_retrieve_puts_the_parts_together(budget: int, monkeypatch: pytest.MonkeyPatch):
    """Also with so little room that the query blocks are taken one by one."""
    monkeypatch.setattr("jaxinfer.kernels.selection.retrieve._LOGIT_BYTES", budget)
    rng = np.random.default_rng(3)
    n, queries, heads, dim, block, group, blocks = 5, 4, 6, 6, 8, 4, 12
    q = rng.normal(size=(n, queries, heads, dim)).astype(np.float32)
    lse = rng.normal(size=(n, queries, heads)).astype(np.float32)
    context = rng.normal(size=(blocks * block, dim)).astype(np.float32)
    free = rng.random(len(context)) > 0.1
    valid = np.ones((n, queries), bool)
    valid[-1, 2:] = False
    end = np.array([1, 3, 6, 9, 12], np.int32)
    key_projection, projection = (jnp.asarray(rng.normal(size=(dim, 4)), jnp.float32) for _ in range(2))
    index = group_index(jnp.asarray(context), key_projection, group)
    voting = np.array([[0, 2], [3, 5]], np.int32)
    found = retrieve(
        *map(jnp.asarray, (q, valid, lse, np.ones(n, np.int32), end, context)),
        index,
        projection,
        jnp.asarray(free),
        jnp.asarray(voting),
        scale=0.6,
        block=block,
        group=group,
        probes=2,
        candidates=4,
    )
    for i in range(n):
        for g in range(2):
            of = voting[g]
            rows = slow.probe_rows(int(valid[i].sum()), 2)
            picked, local = q[i][rows][:, of].astype(np.float64), lse[i][rows][:, of]
            speaking = slow.rounded_queries(picked @ np.asarray(projection, np.float64))
            share = slow.shares(speaking, np.asarray(index, np.float64), local, 1, int(end[i]), group, block, 0.6)
            wanted = slow.candidate_blocks(share, 1, int(end[i]), 4)
            assert listed(found.candidates[i, g]) == wanted
            mass = slow.masses(picked, context.astype(np.float64), wanted, free, local, block, 0.6)
            np.testing.assert_allclose(found.masses[i, g], mass + [0.0] * (4 - len(wanted)), **EXPONENTIALS)
