"""The selection of a single token against that of query blocks, and against slow and obvious forms."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.selection import hot, single
from jaxinfer.kernels.selection.scores import best_groups, shares_of_best
from tests.selection import slow

CANDIDATES = jax.jit(single.candidates, static_argnums=3)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_shares(seed: int):
    """Also where nothing is read anyhow, or nothing can be retrieved."""
    rng = np.random.default_rng(seed)
    logits, local = rng.normal(size=(3, 12)) * rng.choice([1, 30]), rng.normal(size=3) * 30
    logits, local = (
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(np.where(rng.random(3) < 0.2, -np.inf, local), jnp.float32),
    )
    first, end = int(rng.integers(1, 12)), int(rng.integers(0, 13))
    found = single.shares(logits, local, first, end)
    wanted = shares_of_best(best_groups(logits, first, end, per_block=1), local)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-7)
    assert not np.any(found[:, :first]) and not np.any(found[:, max(end, 0) :])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 14))
def test_candidates(seed: int, count: int):
    """Equal scores, also many of them, give equal lists."""
    rng = np.random.default_rng(seed)
    votes = rng.integers(0, rng.integers(2, 9), size=(3, 12)).astype(np.float32) / 64
    first = int(rng.integers(0, 4))
    end = int(rng.integers(first, 13))
    votes[:, :first] = votes[:, end:] = 0
    blocks, masses = (np.asarray(found) for found in CANDIDATES(jnp.asarray(votes), first, end, count))
    taken = blocks[blocks >= 0]
    assert taken.tolist() == blocks[: len(taken)].tolist()
    assert sorted(taken.tolist()) == slow.by_turns(votes, first, end, count)
    np.testing.assert_allclose(masses[: len(taken)], votes[:, taken].mean(axis=0), rtol=1e-6)
    assert not np.any(masses[len(taken) :])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_listed_and_remembered(seed: int):
    rng = np.random.default_rng(seed)
    num_blocks, remembered, hottest = 14, 3, 4
    first, end = sorted(rng.integers(0, num_blocks + 1, 2).tolist())
    weights = rng.integers(0, rng.integers(1, 20), num_blocks).astype(np.int32)
    candidates = rng.permutation(num_blocks)[:5].astype(np.int32)
    candidates[int(rng.integers(0, 6)) :] = -1
    # Few different masses, so that many are equal.
    masses = np.where(candidates < 0, 0, rng.integers(0, 4, 5) / 2**14).astype(np.float32)
    left = np.full((remembered, 2), (-1, 0), np.int32)
    before = rng.permutation(num_blocks)[: int(rng.integers(0, remembered + 1))]
    left[: len(before)] = np.stack((before, rng.integers(1, 5, len(before))), axis=1)

    amounts = dict(left[: len(before)].tolist())
    for block, mass in zip(candidates.tolist(), masses, strict=True):
        if block >= 0:
            amounts[block] = max(amounts.get(block, 0), round(float(mass) * 2**14))
    ordered = sorted(((block, amount) for block, amount in amounts.items() if amount), key=lambda p: (-p[1], p[0]))
    record = ordered[:remembered]
    total = weights.copy()
    for block, amount in record:
        total[block] += amount
    wanted = sorted((b for b in range(first, end) if total[b]), key=lambda b: (-total[b], b))[:hottest]

    top = hot.hottest(jnp.asarray(weights), first, end, hottest)
    arrays = (jnp.asarray(array) for array in (candidates, masses, left))
    entries = single.entries(*arrays, top, jnp.asarray(weights))
    blocks = np.asarray(entries.blocks)
    sizes = np.where(blocks < 0, 7, blocks % 3).astype(np.int32)
    counts = {"candidates": len(candidates), "remembered": remembered, "hot": hottest}
    found = single.listed(entries, jnp.asarray(sizes), first, end, **counts)
    is_hot, read = np.asarray(found.hot), np.asarray(found.read)
    assert sorted(blocks[is_hot].tolist()) == sorted(wanted)
    there = [block for block in candidates.tolist() if block >= 0]
    fresh = [block for block in wanted if block not in there]
    assert sorted(blocks[read].tolist()) == sorted(there + fresh)
    starts = dict(zip(blocks[read].tolist(), np.asarray(found.start)[read].tolist(), strict=True))
    assert [starts[block] for block in there + fresh] == np.cumsum([0, *(b % 3 for b in there + fresh)])[:-1].tolist()
    assert sorted(np.asarray(found.place).tolist()) == list(range(len(blocks)))
    kept = np.empty((len(blocks), 2), np.int32)
    kept[np.asarray(found.place)] = found.remembered
    assert kept[:remembered].tolist() == [*map(list, record), *[[-1, 0]] * (remembered - len(record))]


def test_hottest():
    weights = jnp.asarray([9, 2, 0, 7, 2, 5], jnp.int32)
    assert np.asarray(hot.hottest(weights, 1, 5, 4)).tolist() == [[3, 7], [1, 2], [4, 2], [-1, 0]]
