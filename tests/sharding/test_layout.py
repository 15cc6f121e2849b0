"""The deal of positions to context-parallel ranks: every property that the scheduler, cache and attention rely on."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sharding.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stripe = draw(st.integers(1, 12))
    return Layout(cp=draw(st.integers(1, 9)), stripe=stripe, page_size=stripe * draw(st.integers(1, 5)))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the home rank of a sequence."""
    layout = draw(layouts())
    return layout, draw(st.integers(0, layout.cp - 1))


def ranks_of(layout: Layout, length: int, home: int) -> list[list[int]]:
    """The definition, card by card: deal stripes to the ranks in turn, beginning with `home`."""
    hands: list[list[int]] = [[] for _ in range(layout.cp)]
    rank = home
    for start in range(0, length, layout.stripe):
        hands[rank].extend(range(start, min(start + layout.stripe, length)))
        rank = (rank + 1) % layout.cp
    return hands


@given(placed(), st.integers(0, 400))
def test_placement_equals_dealing_card_by_card(place: tuple[Layout, int], length: int) -> None:
    layout, home = place
    for rank, hand in enumerate(ranks_of(layout, length, home)):
        assert layout.local_length(length, rank, home) == len(hand)
        assert layout.pages_needed(length, rank, home) == math.ceil(len(hand) / layout.page_size)
        for index, position in enumerate(hand):
            assert layout.rank(position, home) == rank
            assert layout.local_index(position) == index
            assert layout.position(index, rank, home) == position


@given(placed(), st.integers(0, 10**7))
def test_rank_and_local_index_are_one_to_one_with_positions(place: tuple[Layout, int], position: int) -> None:
    layout, home = place
    assert layout.position(layout.local_index(position), layout.rank(position, home), home) == position


@given(placed(), st.integers(0, 10**7))
def test_local_lengths_add_up_and_differ_by_at_most_a_stripe(place: tuple[Layout, int], length: int) -> None:
    layout, home = place
    lengths = [layout.local_length(length, rank, home) for rank in range(layout.cp)]
    assert sum(lengths) == length
    assert max(lengths) - min(lengths) <= layout.stripe
    assert max(lengths) == lengths[home]


@given(placed(), st.integers(0, 10**6))
def test_one_more_token_lengthens_only_the_rank_that_holds_it(place: tuple[Layout, int], length: int) -> None:
    layout, home = place
    grown = [layout.local_length(length + 1, r, home) - layout.local_length(length, r, home) for r in range(layout.cp)]
    assert grown == [int(r == layout.rank(length, home)) for r in range(layout.cp)]


@given(layouts(), st.integers(0, 300), st.integers(1, 300))
def test_an_aligned_chunk_gives_each_rank_the_same_work(layout: Layout, start: int, rounds: int) -> None:
    """A chunk from any position over whole rounds holds equally many tokens, and pairs under the causal mask differ
    between two ranks by at most one stripe for each of the rank's queries."""
    stop = start + rounds * layout.round_tokens
    lengths = [layout.local_length(stop, r, 0) - layout.local_length(start, r, 0) for r in range(layout.cp)]
    assert lengths == [rounds * layout.stripe] * layout.cp


@given(layouts(), st.integers(1, 40))
def test_causal_work_of_a_chunk_is_balanced(layout: Layout, rounds: int) -> None:
    length = rounds * layout.round_tokens
    positions = np.arange(length)
    ranks = layout.rank(positions, 0)
    work = [int((positions[ranks == rank] + 1).sum()) for rank in range(layout.cp)]
    queries = length // layout.cp
    assert max(work) - min(work) <= queries * (layout.cp - 1) * layout.stripe


@given(placed(), st.integers(0, 500))
def test_a_page_holds_each_offset_once(place: tuple[Layout, int], length: int) -> None:
    layout, home = place
    positions = np.arange(length)
    local = layout.local_index(positions)
    slots = list(zip(layout.rank(positions, home), local // layout.page_size, local % layout.page_size, strict=True))
    assert len(set(slots)) == length
    for rank in range(layout.cp):
        pages = {page for r, page, _ in slots if r == rank}
        assert pages == set(range(layout.pages_needed(length, rank, home)))


@given(placed())
def test_numpy_arrays_and_integers_agree(place: tuple[Layout, int]) -> None:
    layout, home = place
    positions = np.arange(5 * layout.round_tokens + 3)
    assert layout.rank(positions, home).tolist() == [layout.rank(int(p), home) for p in positions]
    assert layout.local_index(positions).tolist() == [layout.local_index(int(p)) for p in positions]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 4, 8)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected positive sizes"):
        Layout(*sizes)


def test_a_stripe_that_does_not_divide_the_page_is_refused() -> None:
    with pytest.raises(ValueError, match="divides the page of 8 tokens, got 3"):
        Layout(cp=2, stripe=3, page_size=8)
