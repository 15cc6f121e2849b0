"""Random workloads: every output equals that of the request alone, and no page is lost."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.step import Capacity
from tests.engine.drive import EOS, answer, check_books, engine, reference, request
from tests.engine.fake_runner import capacity, text_token

STOPS = ["a", "b a", "é", ".\u6f22", "aab", "👍", "ab", " . ", "\ufffd\ufffd"]


def next_token(tokens: np.ndarray, sequence: Sequence, vocab: int) -> int:
    """As `text_token`, with an end of sequence now and then."""
    return EOS if int(tokens.astype(np.int64).sum()) % 37 == 0 else text_token(tokens, sequence, vocab)


def random_request(rng: random.Random, longest: int) -> Request:
    length = rng.choice([1, rng.randint(1, 20), rng.randint(1, min(200, longest)), rng.randint(1, longest)])
    return request(
        [rng.randrange(256) for _ in range(length)],
        n=rng.choice([1, 1, 1, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(100),
        max_tokens=rng.choice([1, 5, 40]),
        min_tokens=rng.choice([0, 0, 1]),
        stop=rng.sample(STOPS, rng.choice([0, 1, 3])),
        stop_token_ids=rng.choice([(), (), (0x9F,)]),
        ignore_eos=rng.random() < 0.2,
    )


def play(spec: Capacity, seed: int, count: int, longest: int) -> dict[str, int]:
    """`count` requests come over time, some are aborted; returns how many ended how."""
    rng = random.Random(seed)
    subject = engine(spec, next_token=next_token)
    coming = [random_request(rng, longest) for _ in range(count)]
    accumulators: dict[str, Accumulator] = {}
    aborted: set[str] = set()
    while coming or subject.has_work:
        for _ in range(min(len(coming), rng.choice([0, 0, 1, 2, 8]))):
            one = coming.pop()
            accumulators[one.id] = Accumulator(one)
            subject.add(one)
        open_ids = [id for id, accumulator in accumulators.items() if not accumulator.finished and id not in aborted]
        if open_ids and rng.random() < 0.03:
            aborted.add(rng.choice(open_ids))
            assert sum(map(subject.abort, aborted)) == 1
        for update in subject.step():
            accumulators[update.request_id].add(update)
        check_books(subject)
    for accumulator in accumulators.values():
        one, output = accumulator.request, accumulator.output
        assert accumulator.finished and output.error is None
        for got, expected in zip(answer(output), reference(one, spec, next_token), strict=True):
            if got[2] == "abort":
                assert one.id in aborted
                assert expected[0][: len(got[0])] == got[0] and expected[1].startswith(got[1])
            else:
                assert got == expected
    stats = subject.stats()
    assert stats.free_pages == stats.total_pages
    assert stats.waiting == stats.prefilling == stats.running == 0
    return {**stats.finished, "preemptions": stats.preemptions}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(capacity(cp=8, stripe=4, chunk=16, pages=400), id="cp8"),
        pytest.param(capacity(), id="cp1", marks=pytest.mark.slow),
        pytest.param(capacity(replicas=2, cp=4, stripe=8, segments=2), id="two replicas", marks=pytest.mark.slow),
    ],
)
def test_200_requests_equal_each_alone(spec: Capacity):
    ends = play(spec, seed=0, count=200, longest=3000)
    assert ends["stop"] > 50 and ends["length"] > 20 and ends["abort"] > 3


def test_turns_where_a_chunk_cannot_be_halved():
    ends = play(capacity(cp=4, stripe=8, chunk=8, segments=1, seqs=3), seed=1, count=50, longest=600)
    assert ends["stop"] > 10 and ends["length"] > 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", [capacity(pages=60, seqs=8), capacity(cp=4, pages=16, chunk=16, context=512)])
def test_tight_pages(spec: Capacity, seed: int):
    """The pool holds a few requests at a time: most are preempted, and nothing shows of it."""
    ends = play(spec, seed, count=60, longest=400)
    assert ends["preemptions"] >= 3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 3),
    cp=st.integers(1, 5),
    stripe=st.integers(1, 4),
    stripes_per_page=st.integers(1, 3),
    stripes_per_chunk=st.integers(1, 5),
    segments=st.integers(1, 4),
    seqs=st.integers(1, 6),
    slack=st.floats(1.0, 3.0),
)
def test_any_capacity(seed, replicas, cp, stripe, stripes_per_page, stripes_per_chunk, segments, seqs, slack):
    page_size, longest = stripe * stripes_per_page, 100
    spec = capacity(
        replicas=replicas,
        cp=cp,
        stripe=stripe,
        page_size=page_size,
        pages=int(slack * -(-(longest + 40) // (page_size * cp))) + 1,
        chunk=stripe * stripes_per_chunk,
        segments=segments,
        seqs=seqs,
        context=longest + 40,
    )
    play(spec, seed, count=12, longest=longest)
