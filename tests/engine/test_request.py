"""Sampling parameters, seeds, metrics, and the pages' book-keeping."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.pages import PageAllocator
from jaxinfer.engine.request import Request, RequestMetrics, SamplingParams, Sequence, sequence_seed
from jaxinfer.sharding.layout import Layout


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (16, 0, (), ())
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.seed is params.logprobs is params.prompt_logprobs is params.logit_bias is None
    assert not params.ignore_eos


def test_values_are_normalised():
    params = SamplingParams(temperature=0, stop="x", stop_token_ids=[3], logit_bias={5: -1}, top_k=-1, max_tokens=None)
    assert params.temperature == 0.0 and isinstance(params.temperature, float)
    assert params.stop == ("x",) and params.stop_token_ids == (3,) and params.logit_bias == {5: -1.0}
    assert SamplingParams(stop=None).stop == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("seed", 2**64),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 101.0}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=f"expected .*{name}.* got "):
        SamplingParams(**{name: value})


def test_seeds_differ_by_sample_and_repeat():
    seeds = {sequence_seed(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(seeds) > 4990 and all(0 <= seed < 2**31 for seed in seeds)
    assert sequence_seed(1, 2) == sequence_seed(1, 2)


def test_metrics():
    metrics = RequestMetrics(arrival=1.0, first_scheduled=1.5, first_token=3.0, finished=5.0, output_tokens=5)
    assert (metrics.queue_time, metrics.ttft, metrics.tpot, metrics.e2e) == (0.5, 2.0, 0.5, 4.0)
    empty = RequestMetrics(arrival=1.0)
    assert empty.queue_time is empty.ttft is empty.tpot is empty.e2e is None


def sequence(replica: int, allocator: PageAllocator) -> Sequence:
    request = Request(id="r", prompt_ids=[0])
    return Sequence(
        request=request,
        index=0,
        token_ids=[0],
        num_prompt=1,
        max_new_tokens=1,
        seed=0,
        replica=replica,
        pages=allocator.no_pages(),
    )


def test_grow_is_all_or_nothing_and_double_free_raises():
    layout = Layout(cp=2, stripe=2, page_size=4)
    allocator = PageAllocator(1, layout, 2)
    one, other = sequence(0, allocator), sequence(0, allocator)
    assert allocator.grow(one, 9) and [len(pages) for pages in one.pages] == [2, 1]
    assert not allocator.grow(other, 3) and other.pages == [[], []]  # rank 0 is full
    other.home = 1
    assert allocator.grow(other, 2) and [len(pages) for pages in other.pages] == [0, 1]
    assert allocator.free_pages(0) == [0, 0] and allocator.total_free == 0
    stale = [list(pages) for pages in one.pages]
    allocator.release(one)
    assert allocator.free_pages(0) == [2, 1]
    one.pages = stale
    with pytest.raises(ValueError, match="in use"):
        allocator.release(one)


def test_home_is_the_rank_with_most_pages_that_fits():
    allocator = PageAllocator(1, Layout(cp=4, stripe=4, page_size=4), 8)
    assert allocator.choose_home(4, [3, 5, 5, 1]) == 1
    assert allocator.choose_home(8, [1, 0, 5, 0]) is None  # two ranks in a row are needed
    assert allocator.choose_home(8, [5, 0, 4, 4]) == 2
    assert allocator.choose_home(17, [2, 2, 2, 2]) == 0
    assert allocator.choose_home(33, [2, 2, 2, 2]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=60))
def test_pages_are_conserved(actions: list[tuple[int, int]]):
    allocator = PageAllocator(2, Layout(cp=3, stripe=2, page_size=4), 10)
    sequences = [sequence(i % 2, allocator) for i in range(6)]
    for which, length in actions:
        one = sequences[which]
        if length % 7 == 0:
            allocator.release(one)
        else:
            allocator.grow(one, length)
        for replica in range(2):
            for rank in range(3):
                held = [page for s in sequences if s.replica == replica for page in s.pages[rank]]
                assert len(set(held)) == len(held) and set(held) <= set(range(10))
                assert len(held) + allocator.free_pages(replica)[rank] == 10
    assert allocator.total == 60
