"""Who gets what in a step: fairness, preemption, placement, cost."""

import time
import tracemalloc
from itertools import pairwise

import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Request, Sequence, Status
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.step import Capacity, Sampled, SegmentResult, Step, StepResult
from tests.engine.drive import answer, by_request, engine, reference, request, run
from tests.engine.fake_runner import FakeRunner, capacity

HALVED = [
    pytest.param(capacity(pages=2000), id="cp1"),
    pytest.param(capacity(cp=8, chunk=12), id="cp8, three stripes"),
    pytest.param(capacity(cp=4, chunk=8, segments=2), id="two segments"),
]
IN_TURNS = [
    pytest.param(capacity(cp=8, stripe=8, chunk=8), id="one stripe"),
    pytest.param(capacity(cp=2, chunk=64, segments=1), id="one segment"),
]


def prefill_tokens(step: Step, request: Request) -> int:
    return sum(segment.count for group in step.prefill for segment in group if segment.sequence.request is request)


@pytest.mark.parametrize("spec", [*HALVED, *IN_TURNS])
@pytest.mark.parametrize("arrival", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [1, 4, 13])
def test_a_short_prompt_has_its_first_token_within_two_steps(spec: Capacity, arrival: int, length: int):
    subject = engine(spec)
    long, short = request(3000), request(length, max_tokens=4)
    subject.add(long)
    for _ in range(arrival):
        subject.step()
    subject.add(short)
    updates = [update for _ in range(2) for update in by_request(subject.step(), short)]
    assert any(update.token_ids for update in updates)
    assert subject.stats().prefilling == 1  # the long one is still at it


@pytest.mark.parametrize("spec", [*HALVED, *IN_TURNS])
def test_a_long_prompt_gets_half_of_the_prefill_under_a_flood_of_short_ones(spec: Capacity):
    subject = engine(spec)
    long = request(2000, max_tokens=1)
    budget, unfinished = spec.chunk_size * spec.layout.cp, 2000
    shares: list[int] = []

    def flood(step: int) -> None:
        if step == 0:
            subject.add(long)
        if unfinished > budget:
            for length in (1, 9, 30):
                subject.add(request(length, max_tokens=2))

    runner = subject.runner
    assert isinstance(runner, FakeRunner)

    def each_step(step: int) -> None:
        nonlocal unfinished
        if step:
            shares.append(prefill_tokens(runner.steps[-1], long))
            unfinished -= shares[-1]
        flood(step)

    run(subject, each_step=each_step)
    shares = shares[: next(i for i in range(len(shares)) if sum(shares[: i + 1]) > 2000 - budget)]
    assert len(shares) > 5
    if spec.chunk_size == spec.layout.stripe or spec.max_segments == 1:
        assert all(a + b >= budget for a, b in pairwise(shares))
    else:
        assert min(shares) >= budget / 2


@pytest.mark.parametrize("spec", [*HALVED, *IN_TURNS])
def test_a_prompt_alone_gets_all(spec: Capacity):
    subject = engine(spec)
    one = request(1000, max_tokens=1)
    run(subject, one)
    assert isinstance(subject.runner, FakeRunner)
    budget = spec.chunk_size * spec.layout.cp
    assert len(subject.runner.steps) == -(-1000 // budget)


@pytest.mark.parametrize("spec", HALVED)
def test_what_short_prompts_leave_goes_to_the_long_one(spec: Capacity):
    subject = engine(spec)
    long = request(2000)
    subject.add(long)
    subject.add(request(1))
    subject.step()
    assert isinstance(subject.runner, FakeRunner)
    budget = spec.chunk_size * spec.layout.cp
    assert prefill_tokens(subject.runner.steps[0], long) >= budget - spec.layout.round_tokens


@pytest.mark.parametrize("spec", [*HALVED, *IN_TURNS])
def test_a_short_prompt_overtakes_those_between(spec: Capacity):
    subject = engine(spec)
    for length in (3000, 900, 800, 700):
        subject.add(request(length))
    subject.step()
    short = request(3)
    subject.add(short)
    updates = [update for _ in range(2) for update in by_request(subject.step(), short)]
    assert any(update.token_ids for update in updates)


def test_the_second_oldest_is_not_starved_either():
    """Long prompts are done in the order of their arrival, all in good time."""
    subject = engine(capacity(pages=8000, seqs=64))
    longs = [request(1000 + i, max_tokens=1) for i in range(5)]
    subject_steps = {}
    for one in longs:
        subject.add(one)
    step = 0
    while len(subject_steps) < 5:
        subject.add(request(30, max_tokens=1))
        step += 1
        for update in subject.step():
            if update.token_ids and any(update.request_id == one.id for one in longs):
                subject_steps[update.request_id] = step
    assert list(subject_steps) == [one.id for one in longs]
    assert step <= 2 * 5010 // 64 + 5


def test_every_running_sequence_decodes_in_every_step():
    subject = engine(capacity(cp=2, chunk=16, seqs=8))
    requests = [request(length, max_tokens=30) for length in (5, 9, 1, 700, 30)]
    started: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        subject.add(one)
    step = 0
    while subject.has_work:
        for update in subject.step():
            started[update.request_id] += [step] * len(update.token_ids)
        step += 1
    for steps in started.values():
        assert steps == list(range(steps[0], steps[0] + 30))


def test_places_are_limited():
    subject = engine(capacity(seqs=3))
    outputs = run(subject, *(request(5, max_tokens=6) for _ in range(10)))
    assert all(len(output.token_ids) == 6 for output in outputs)
    assert isinstance(subject.runner, FakeRunner)
    assert max(len(step.decode[0]) for step in subject.runner.steps) == 3


# Preemption.


@pytest.mark.parametrize("cp", [1, 4])
def test_preempted_and_resumed_equals_uninterrupted(cp: int):
    spec = capacity(cp=cp, pages=-(-24 // cp), chunk=16)  # each request needs 13 pages of 24
    subject = engine(spec)
    requests = [request(30, max_tokens=70, temperature=1.0, seed=i, logprobs=1) for i in range(4)]
    outputs = run(subject, *requests)
    assert subject.stats().preemptions >= 3
    assert sum(output.metrics.preemptions for output in outputs) == subject.stats().preemptions
    assert outputs[0].metrics.preemptions == 0  # never the oldest
    for one, output in zip(requests, outputs, strict=True):
        assert answer(output) == reference(one, spec)
        assert output.outputs[0].logprobs is not None and len(output.outputs[0].logprobs) == 70


def test_only_younger_sequences_are_robbed(monkeypatch: pytest.MonkeyPatch):
    victims = []
    preempt = Scheduler._preempt

    def watched(self: Scheduler, sequence) -> None:
        oldest = min(other.order for other in self._queues[sequence.replica])
        victims.append(sequence.order - oldest)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", watched)
    run(engine(capacity(pages=20, chunk=16)), *(request(20 + i, max_tokens=60) for i in range(12)))
    assert len(victims) > 5 and min(victims) > 0


def test_a_prompt_that_needs_all_pages_is_not_passed_by_for_ever():
    spec = capacity(pages=20, chunk=64)
    subject = engine(spec)
    large = request(150, max_tokens=10)  # 20 pages
    ended = {}

    def each_step(step: int) -> None:
        if step == 1:
            subject.add(large)
        if step < 60 and large.id not in ended:
            subject.add(request(4, max_tokens=20))
        if large.id not in ended and step > 1 and large.id not in subject._live:
            ended[large.id] = step

    run(subject, each_step=each_step)
    assert ended[large.id] < 60


def sequence(length: int, new: int = 1) -> Sequence:
    one = request(length, max_tokens=new)
    return Sequence(request=one, index=0, token_ids=list(one.prompt_ids), num_prompt=length, max_new_tokens=new, seed=0)


def test_a_place_is_taken_from_the_youngest_when_nobody_can_do_anything():
    scheduler = Scheduler(capacity(stripe=8, chunk=8, pages=4, seqs=1))
    old, young, elsewhere = sequence(16), sequence(32), sequence(16)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(2):  # the young one's turn, then the old one's, which has no place
        step = scheduler.schedule()
        assert [segment.sequence for segment in step.prefill[0]] == [young]
        scheduler.commit(step)
    elsewhere.pages = scheduler.pages.no_pages()
    assert scheduler.pages.grow(elsewhere, 16)  # now the young one is stuck, without the pages of its last 16 tokens
    step = scheduler.schedule()
    assert [segment.sequence for segment in step.prefill[0]] == [old]
    assert young.status is Status.WAITING and young.pages == [[]]


def test_a_place_is_not_taken_from_an_older_one():
    scheduler = Scheduler(capacity(seqs=1))
    old, young = sequence(16, new=5), sequence(16)
    scheduler.add(old)
    scheduler.commit(scheduler.schedule())
    old.token_ids.append(0)
    scheduler.add(young)
    old.suspect = True
    for _ in range(2):  # its turn, and the turn of the others, who can do nothing
        step = scheduler.schedule()
        assert step.decode == [[old]] and step.prefill == [[]]
    assert scheduler.preemptions == 0


# Placement.


def test_short_prompts_spread_over_the_ranks():
    subject = engine(capacity(cp=8, stripe=8, chunk=8, segments=8))
    for _ in range(8):
        subject.add(request(5))
    subject.step()
    assert isinstance(subject.runner, FakeRunner)
    segments = subject.runner.steps[0].prefill[0]
    assert sorted(segment.sequence.home for segment in segments) == list(range(8))


def test_replicas_share_the_tokens():
    subject = engine(capacity(replicas=3))
    long = request(500, max_tokens=1)
    subject.add(long)
    shorts = [request(10, max_tokens=1) for _ in range(20)]
    for one in shorts:
        subject.add(one)
    counts = [0, 0, 0]
    for sequence in subject._scheduler:
        if sequence.request is not long:
            counts[sequence.replica] += 1
    assert counts == [0, 10, 10]
    while subject.has_work:
        subject.step()
    late = request(10)
    subject.add(late)
    assert next(iter(subject._scheduler)).replica == 0


# Cost.


class Silent:
    """A runner that computes nothing."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity

    def run(self, step: Step) -> StepResult:
        token = Sampled(token_id=5)
        return StepResult(
            prefill=[
                [SegmentResult(sampled=token if s.ends_prompt else None) for s in group] for group in step.prefill
            ],
            decode=[[token for _ in group] for group in step.decode],
        )

    def cache_alive(self) -> bool:
        return True

    def reset_cache(self) -> None:
        raise AssertionError("the cache is alive")


def test_a_step_of_a_512k_prompt_copies_nothing_long():
    spec = capacity(cp=8, stripe=64, page_size=64, pages=1100, chunk=8192, context=530_000)
    subject = Engine(Silent(spec))
    subject.add(request([7] * 524_288, max_tokens=20))
    subject.add(request([7] * 100, max_tokens=20))
    tracemalloc.start()
    try:
        steps = large = 0
        while subject.has_work:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            subject.step()
            large += tracemalloc.get_traced_memory()[1] - before > 1_000_000  # a copy of the ids takes 4 MB
            steps += 1
    finally:
        tracemalloc.stop()
    assert steps == 8 + 20
    assert large <= 1  # the first token appended makes the list grow


def test_adding_requests_costs_the_same_however_many_wait():
    subject = engine(capacity(replicas=2))
    times = []
    for _ in range(6):
        start = time.process_time()
        for _ in range(300):
            subject.add(request([1, 2, 3]))
        times.append(time.process_time() - start)
    assert min(times[3:]) < 3 * min(times[:3])
    assert subject.stats().waiting == 1800
