"""The engine over the real runner and the bundled architecture: batching, preemption and lost caches do not show."""

import random
from dataclasses import replace

import pytest

from jaxinfer.build import build_engine
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.engine.compilations import CompilationCounter
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, RequestOutput, SamplingParams
from tests.engine.drive import answer, check_books

pytestmark = pytest.mark.slow

LONGEST = 3000


@pytest.fixture(scope="module")
def built() -> Engine:
    options = EngineOptions(
        model="tiny-random", mesh="cp=2", max_context=4096, chunk_size=128, page_size=16, max_num_seqs=8
    )
    return build_engine(options, progress=False)


def over(built: Engine, pages: int | None = None) -> Engine:
    """A new engine over the same runner, which may be told that it has fewer pages."""
    assert built.config is not None
    subject = Engine(built.runner, built.tokenizer, eos_token_ids=tuple(built.eos_token_ids), config=built.config)
    if pages is not None:
        subject.capacity = replace(built.capacity, pages_per_rank=pages)
        subject._scheduler = type(subject._scheduler)(subject.capacity)
    return subject


def requests(count: int, longest: int, seed: int) -> list[Request]:
    """Random prompts of bytes; random tokens of a random model are broken UTF-8 for the most part."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.choice([1, rng.randint(1, 20), rng.randint(1, 200), rng.randint(1, longest)])
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
            n=rng.choice([1, 1, 2]),
            max_tokens=rng.choice([1, 8, 30]),
            stop=rng.sample(["a", "\ufffd\ufffd", " ", "é", "0x"], rng.choice([0, 1, 2])),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logprobs=rng.choice([None, 2]),
        )
        made.append(Request(id=f"{seed}-{i}", prompt_ids=[rng.randrange(256) for _ in range(length)], params=params))
    return made


def alone(built: Engine, wanted: list[Request]) -> dict[str, RequestOutput]:
    return {one.id: together(over(built), [one], random.Random(0))[one.id] for one in wanted}


def together(
    subject: Engine, wanted: list[Request], rng: random.Random, aborts: float = 0.0
) -> dict[str, RequestOutput]:
    """All outputs; requests come a few at a time, and some are aborted."""
    coming = list(reversed(wanted))
    accumulators = {one.id: Accumulator(one) for one in wanted}
    while coming or subject.has_work:
        for _ in range(min(len(coming), rng.choice([0, 1, 3]) if subject.has_work else 1)):
            subject.add(coming.pop())
        if subject._live and rng.random() < aborts:
            subject.abort(rng.choice(list(subject._live)))
        for update in subject.step():
            accumulators[update.request_id].add(update)
        check_books(subject)
    assert subject.stats().free_pages == subject.stats().total_pages
    assert all(accumulator.finished for accumulator in accumulators.values())
    return {id: accumulator.output for id, accumulator in accumulators.items()}


def check_equal(got: RequestOutput, expected: RequestOutput) -> None:
    assert got.error is None
    for mine, its in zip(answer(got), answer(expected), strict=True):
        if mine[2] == "abort":
            assert its[0][: len(mine[0])] == mine[0] and its[1].startswith(mine[1])
        else:
            assert mine == its
    for mine, its in zip(got.outputs, expected.outputs, strict=True):
        for a, b in zip(mine.logprobs or [], its.logprobs or [], strict=mine.finish_reason != "abort"):
            assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)


def test_200_random_requests_equal_each_alone(built: Engine):
    wanted = requests(200, LONGEST, seed=1)
    expected = alone(built, wanted)
    counter = CompilationCounter()
    outputs = together(over(built), wanted, random.Random(2), aborts=0.02)
    for one in wanted:
        check_equal(outputs[one.id], expected[one.id])
    assert sum(output.finish_reason == "abort" for output in outputs.values()) >= 3
    assert counter.count == 0


def test_preempted_requests_equal_each_alone(built: Engine):
    wanted = requests(40, 200, seed=3)
    expected = alone(built, wanted)
    subject = over(built, pages=10)
    outputs = together(subject, wanted, random.Random(4))
    assert subject.stats().preemptions > 3
    for one in wanted:
        check_equal(outputs[one.id], expected[one.id])


def test_a_lost_cache_is_made_anew(built: Engine, monkeypatch: pytest.MonkeyPatch):
    wanted = requests(12, 200, seed=5)
    expected = alone(built, wanted)
    runner, steps = built.runner, 0
    run = runner.run

    def failing(step):
        nonlocal steps
        steps += 1
        if steps == 7:
            runner.cache.latents[0].delete()  # pyright: ignore[reportAttributeAccessIssue]
        return run(step)

    monkeypatch.setattr(runner, "run", failing)
    subject = over(built)
    outputs = together(subject, wanted, random.Random(6))
    assert subject.stats().faults == 1
    for one in wanted:
        check_equal(outputs[one.id], expected[one.id])
