"""The key-value look-ups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.configs.probe import CLUSTERS
from jaxinfer.evaluation.lookups import VALUE_TOKENS, make_lookups


def grams(ids: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(700, 4000),
    count=st.integers(1, 12),
    key_tokens=st.integers(2, 3),
    vocabulary=st.sampled_from([1024, 8192]),
)
def test_each_value_can_be_found_in_one_place_only(
    seed: int, tokens: int, count: int, key_tokens: int, vocabulary: int
) -> None:
    rng = np.random.default_rng(seed)
    depths = [i / max(count - 1, 1) for i in range(count)]
    found = make_lookups(rng, np.arange(vocabulary), tokens, depths, key_tokens, 1 / 32)
    assert len(found.ids) == tokens and len(found.values) == count and len(found.rows) == count - 1
    text = found.ids[: tokens - count * (key_tokens + VALUE_TOKENS) + VALUE_TOKENS]
    windows = grams(text, key_tokens)
    key = tuple(found.ids[-key_tokens:])
    asked = [*found.rows, list(range(tokens - 1, tokens - 1 + VALUE_TOKENS))]
    for value, rows, depth in zip(found.values, asked, found.depths, strict=True):
        known = [*found.ids, *found.values[-1]]
        assert [known[row + 1] for row in rows] == value
        for row, token in zip(rows, value, strict=True):
            context = tuple(known[row - key_tokens + 1 : row + 1])
            assert windows.count(context) == 1
            assert text[windows.index(context) + key_tokens] == token
        place = windows.index(tuple(known[rows[0] - key_tokens + 1 : rows[0] + 1])) / len(text)
        assert abs(place - depth) < 0.25
    assert windows.count(key) == 1


def test_near_misses_differ_in_one_token_of_the_same_cluster() -> None:
    found = make_lookups(np.random.default_rng(0), np.arange(8192), 8192, [0.5], 3, 1 / 32)
    key = np.array(found.ids[-3:])
    near = [np.array(g) for g in grams(found.ids[:-3], 3) if np.sum(np.array(g) != key) == 1]
    assert len(near) >= 8192 // 32 - 2
    assert all(np.all(gram % CLUSTERS == key % CLUSTERS) for gram in near)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 260 tokens for 12 look-ups, got 200"):
        make_lookups(np.random.default_rng(0), np.arange(8192), 200, [i / 11 for i in range(12)], 3, 0.0)
    with pytest.raises(ValueError, match="to choose from, got 64"):
        make_lookups(np.random.default_rng(0), np.arange(64), 600, [0.5], 3, 1 / 32)
