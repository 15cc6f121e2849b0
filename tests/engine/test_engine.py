"""The engine over a fake runner: what ends an output, what is handed out, what is refused, what survives a fault."""

import numpy as np
import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import TextStream
from jaxinfer.engine.request import Request, SamplingParams, Update
from jaxinfer.engine.step import Step
from jaxinfer.tokenizer import Tokenizer, byte_tokenizer
from tests.engine.drive import EOS, TOKENIZER, answer, by_request, check_books, engine, reference, request, run
from tests.engine.fake_runner import FakeRunner, capacity


def saying(text: str | bytes | list[int]):
    """A model that says `text`, then ends."""
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    return lambda tokens, sequence, vocab: ids[sequence.num_output] if sequence.num_output < len(ids) else EOS


def stream(subject: Engine, one: Request) -> list[Update]:
    subject.add(one)
    updates = []
    while subject.has_work:
        updates += subject.step()
        check_books(subject)
    return updates


# What ends an output.


def test_ends():
    subject = engine(capacity(), next_token=saying("hello"))
    for params, expected in [
        ({}, ("hello", "stop", None, 6)),
        ({"max_tokens": 3}, ("hel", "length", None, 3)),
        ({"max_tokens": 8, "ignore_eos": True}, ("hello", "length", None, 8)),
        ({"stop": "l"}, ("he", "stop", "l", 3)),
        ({"stop": ["lo", "el"]}, ("h", "stop", "el", 3)),
        ({"stop": ["ello", "ell"]}, ("h", "stop", "ell", 4)),
        ({"stop": "help"}, ("hello", "stop", None, 6)),
        ({"stop": "lot"}, ("hello", "stop", None, 6)),
        ({"stop_token_ids": [ord("o")]}, ("hell", "stop", ord("o"), 5)),
        ({"stop": "l", "min_tokens": 4}, ("hello", "stop", None, 6)),
        ({"stop": "l", "min_tokens": 3}, ("hel", "stop", "l", 4)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, ("hello", "stop", EOS, 6)),
        ({"max_tokens": 9, "min_tokens": 8}, ("hello", "stop", None, 9)),
    ]:
        output = run(subject, request("x", **params))[0]
        assert (output.text, output.finish_reason, output.outputs[0].stop_reason, len(output.token_ids)) == expected


def test_stop_string_may_lie_across_tokens_and_is_never_shown():
    subject = engine(capacity(), next_token=saying("one END two EXIT!"))
    updates = stream(subject, request("x", stop=["EXIT"], max_tokens=50))
    shown = [update.text for update in updates]
    assert "".join(shown) == "one END two "
    assert shown[4] == "" and shown[5] == "EN"  # E is held back until it is no beginning of EXIT
    assert updates[-1].finish_reason == "stop" and updates[-1].stop_reason == "EXIT" and updates[-1].request_finished


def test_of_two_stop_strings_in_one_token_the_first_complete_one_counts():
    backend = byte_tokenizer()._backend
    backend.add_tokens(["one two three"])
    stream = TextStream(Tokenizer(backend), ("three", "two", "e two t"))
    assert stream.push(backend.token_to_id("one two three"), True) == ("one ", "two")
    stream = TextStream(Tokenizer(backend), ("two", "one two"))
    assert stream.push(backend.token_to_id("one two three"), True) == ("", "one two")


def test_held_back_text_comes_out_at_the_end():
    updates = stream(engine(capacity(), next_token=saying("abc")), request("x", stop="bcd", max_tokens=3))
    assert [update.text for update in updates] == ["a", "", "bc"]


def test_characters_are_whole_in_every_update():
    text = "é漢👍"
    updates = stream(engine(capacity(), next_token=saying(text)), request("x", max_tokens=50))
    assert "".join(update.text for update in updates) == text
    assert all(update.text in ("", "é", "漢", "👍") for update in updates)
    cut = stream(engine(capacity(), next_token=saying(text)), request("x", max_tokens=4))
    assert "".join(update.text for update in cut) == "é"


def test_samples_are_independent_and_repeat():
    spec = capacity()
    one = request("x", n=3, temperature=1.0, seed=5, max_tokens=30)
    got = answer(run(engine(spec), one, request("y" * 100, temperature=1.0))[0])
    assert got == reference(one, spec)
    assert len({tuple(sample[0]) for sample in got}) == 3
    free = [run(engine(spec), request("x", temperature=1.0, max_tokens=30))[0].token_ids for _ in range(2)]
    assert free[0] == free[1]  # the engine draws seeds from its own
    subject = engine(spec)
    first, second = run(subject, *(request("x", temperature=1.0, max_tokens=30) for _ in range(2)))
    assert first.token_ids != second.token_ids


# What is handed out.


def test_logprobs():
    subject = engine(capacity(), next_token=saying("é"))
    output = run(subject, request("x", logprobs=2, max_tokens=2))[0]
    entries = output.outputs[0].logprobs
    assert entries is not None and len(entries) == 2
    assert (entries[0].chosen.token_id, entries[0].chosen.logprob, entries[0].chosen.rank) == (0xC3, -0.25, 1)
    assert entries[0].chosen.token_bytes == b"\xc3" and entries[0].chosen.text == "\ufffd"
    assert [(top.token_id, top.rank) for top in entries[0].top] == [(0xC3, 1), (1, 2)]
    bare = run(subject, request("x", logprobs=0, max_tokens=1))[0].outputs[0].logprobs
    assert bare is not None and bare[0].top == []
    assert run(subject, request("x", max_tokens=1))[0].outputs[0].logprobs is None


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_prompt_logprobs_over_segments(chunk: int):
    subject = engine(capacity(chunk=chunk))
    one = request(50, prompt_logprobs=2, n=2, max_tokens=3)
    output = run(subject, one)[0]
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == 50 and entries[0] is None
    for i, entry in enumerate(entries[1:], 1):
        assert entry is not None
        assert (entry.chosen.token_id, entry.chosen.logprob) == (one.prompt_ids[i], -float(i))
        assert [top.token_id for top in entry.top] == [0, 1]
    again = stream(subject, request(50, prompt_logprobs=2, max_tokens=3))
    first = next(i for i, update in enumerate(again) if update.token_ids)
    assert [i for i, update in enumerate(again) if update.prompt_logprobs] == [first]


def test_prompt_logprobs_and_logits_after_a_fault_in_the_prefill():
    subject, runner, _ = faulty(capacity(chunk=16), lambda step: len(runner.steps) == 3)
    scored, wanted = request(60, prompt_logprobs=0, max_tokens=3), request(60, logit_rows=(59, 2))
    outputs = run(subject, scored, wanted)
    entries = outputs[0].prompt_logprobs
    assert entries is not None and len(entries) == 60 and entries[0] is None
    assert [entry.chosen.logprob for entry in entries if entry] == [-float(i) for i in range(1, 60)]
    assert outputs[1].logits is not None
    assert outputs[1].logits[:, 0].tolist() == [sum(wanted.prompt_ids), sum(wanted.prompt_ids[:3])]


def test_logits_of_rows():
    subject = engine(capacity(chunk=8))
    one = request(50, logit_rows=(49, 0, 30, 30))
    output = run(subject, one, request(100))[0]
    assert output.token_ids == [] and output.finish_reason == "length" and output.logits is not None
    expected = [sum(one.prompt_ids[: row + 1]) for row in (49, 0, 30, 30)]
    assert output.logits.shape == (4, 262) and output.logits.dtype == np.float32
    assert (output.logits == np.array(expected, np.float32)[:, None]).all()


def test_prefill_progress_and_metrics():
    subject = engine(capacity(chunk=16), next_token=saying("hi"))
    one = request(70, max_tokens=8)
    subject.add(one)
    assert subject.stats().waiting == 1
    updates = subject.step()
    assert updates == [Update(request_id=one.id, prefill=(16, 70))]
    stats = subject.stats()
    assert (stats.prefilling, stats.prefill_progress, stats.prompt_tokens) == (1, {one.id: (16, 70)}, 16)
    while subject.has_work:
        updates += subject.step()
    assert [update.prefill for update in updates if update.prefill] == [(16, 70), (32, 70), (48, 70), (64, 70)]
    metrics = updates[-1].metrics
    assert metrics is not None and metrics.first_scheduled is not None and metrics.first_token is not None
    assert one.arrival <= metrics.first_scheduled <= metrics.first_token
    assert (metrics.prompt_tokens, metrics.output_tokens) == (70, 3)
    assert metrics.ttft is not None and metrics.tpot is not None and metrics.e2e is not None
    assert metrics.e2e == pytest.approx(metrics.ttft + 2 * metrics.tpot)
    stats = subject.stats()
    assert (stats.generated_tokens, stats.finished, stats.steps) == (3, {"stop": 1}, 7)


# What is refused.


def test_refusals_name_what_was_expected_and_what_came():
    subject = engine(capacity(context=100, pages=10, page_size=8))  # 80 tokens of pages
    for one, message in [
        (request([]), "at least one token, got an empty one"),
        (request([1, 262]), r"prompt's token ids to be in \[0, 262\), got 262"),
        (request([1, -1]), "got -1"),
        (request(95, max_tokens=6), "at most 100 tokens.*got 95 prompt tokens and max_tokens of 6"),
        (request(100, max_tokens=None), "at most 100 tokens.*got 100 prompt tokens and 1 output"),
        (request(80, max_tokens=2), "at most 80 tokens.*got 80 prompt tokens and max_tokens of 2"),
        (request(70, max_tokens=None, min_tokens=20), "min_tokens of at most 11.*got 20"),
        (request(5, stop_token_ids=[300]), "stop_token_ids.*got 300"),
        (request(5, logit_bias={999: 1.0}), "logit_bias.*got 999"),
        (request(5, logit_rows=(5,)), r"logit_rows in \[0, 5\)"),
        (request(5, logit_rows=()), "at least one"),
        (request(5, logit_rows=(0,), n=2), "n=1"),
        (request(81, logit_rows=(0,)), "at most 80 tokens.*got 81 prompt tokens$"),
    ]:
        with pytest.raises(ValueError, match=message):
            subject.add(one)
    assert not subject.has_work
    textless = Engine(FakeRunner(capacity()))
    with pytest.raises(ValueError, match="no tokenizer"):
        textless.add(request([1], stop="x"))
    one = request(5)
    subject.add(one)
    with pytest.raises(ValueError, match="under way"):
        subject.add(request(5, id=one.id))


def test_limits_can_be_reached_exactly():
    spec = capacity(context=100, pages=10, page_size=8)
    for length, limit, produced in [(80, 1, 1), (75, 6, 6), (60, None, 21), (1, None, 80)]:
        subject = engine(spec, next_token=saying("x" * 200))
        output = run(subject, request(length, max_tokens=limit))[0]
        assert (len(output.token_ids), output.finish_reason) == (produced, "length")
    # The context ends before the pages do.
    output = run(engine(capacity(context=100), next_token=saying("x" * 200)), request(60, max_tokens=None))[0]
    assert len(output.token_ids) == 40
    assert run(engine(spec), request(80, logit_rows=(79,)))[0].logits is not None


def test_an_engine_without_tokenizer_deals_in_ids():
    output = run(Engine(FakeRunner(capacity(), saying([5, 6])), eos_token_ids=(EOS,)), request([1, 2], logprobs=1))[0]
    assert output.token_ids == [5, 6, EOS] and output.text == "" and output.finish_reason == "stop"


# Cancellation.


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_any_time(steps: int):
    """Waiting, in the middle of the prefill, running: the other request does not notice."""
    spec = capacity(chunk=16, seqs=2)
    subject = engine(spec)
    victim, other = request(80, n=2, max_tokens=50), request(30, max_tokens=20)
    subject.add(victim)
    subject.add(other)
    updates = []
    for _ in range(steps):
        updates += subject.step()
    assert subject.abort(victim.id) and not subject.abort(victim.id)
    check_books(subject)
    while subject.has_work:
        updates += subject.step()
        check_books(subject)
    ends = [update for update in by_request(updates, victim) if update.finish_reason]
    assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort")]
    assert [end.request_finished for end in ends] == [False, True]
    tokens = [token for update in by_request(updates, other) for token in update.token_ids]
    assert tokens == reference(other, spec)[0][0]
    assert subject.stats().free_pages == subject.stats().total_pages
    assert not subject.abort("unknown")


# Faults.


class Failing:
    """Raises in the steps in which `bad(step)` holds; `lose` takes the cache along."""

    def __init__(self, bad, lose: bool = False):
        self.bad, self.lose, self.raised = bad, lose, 0
        self.runner: FakeRunner | None = None

    def __call__(self, step: Step) -> None:
        if self.bad(step):
            self.raised += 1
            if self.lose:
                assert self.runner is not None
                self.runner.alive = False
            raise MemoryError(f"out of memory, time {self.raised}")


def faulty(spec, bad, lose: bool = False) -> tuple[Engine, FakeRunner, Failing]:
    failing = Failing(bad, lose)
    runner = failing.runner = FakeRunner(spec, before=failing)
    return Engine(runner, TOKENIZER, eos_token_ids=(EOS,)), runner, failing


def mix() -> list[Request]:
    return [request(length, max_tokens=12) for length in (3, 150, 40, 1, 77)]


@pytest.mark.parametrize("lose", [False, True], ids=["cache kept", "cache lost"])
@pytest.mark.parametrize("when", range(1, 16))
def test_a_step_that_raises_once_is_computed_again(when: int, lose: bool):
    spec = capacity(cp=2, chunk=16, pages=60)
    subject, runner, failing = faulty(spec, lambda step: len(runner.steps) == when, lose)
    requests = mix()
    outputs = run(subject, *requests)
    assert failing.raised == 1 and runner.resets == lose and subject.stats().faults == 1
    for one, output in zip(requests, outputs, strict=True):
        assert output.error is None and answer(output) == reference(one, spec)


@pytest.mark.parametrize("lose", [False, True], ids=["cache kept", "cache lost"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_request_that_always_fails_ends_alone(phase: str, lose: bool):
    spec = capacity(cp=2, chunk=16, pages=60)
    requests = mix()

    def bad(step: Step) -> bool:
        prefilling = [segment.sequence for group in step.prefill for segment in group]
        decoding = [sequence for group in step.decode for sequence in group]
        return any(s.request is requests[2] for s in (prefilling if phase == "prefill" else decoding))

    subject, _, failing = faulty(spec, bad, lose)
    outputs = run(subject, *requests)
    assert failing.raised == 2
    for one, output in zip(requests, outputs, strict=True):
        if one is requests[2]:
            assert output.finish_reason == "error" and output.error == "MemoryError: out of memory, time 2"
            assert answer(output)[0][0] == reference(one, spec)[0][0][: len(output.token_ids)]
        else:
            assert output.error is None and answer(output) == reference(one, spec)


def test_a_device_that_always_fails_ends_every_request_and_the_engine_goes_on():
    spec = capacity(cp=2, chunk=16)
    broken = True
    subject, _, _ = faulty(spec, lambda step: broken, lose=True)
    outputs = run(subject, *mix())
    assert all(output.finish_reason == "error" for output in outputs)
    broken = False
    one = request(30)
    assert answer(run(subject, one)[0]) == reference(one, spec)


def test_after_a_fault_all_run_together_again():
    spec = capacity()
    subject, runner, _ = faulty(spec, lambda step: len(runner.steps) == 4)
    outputs = run(subject, *(request(9, max_tokens=30) for _ in range(4)))
    assert all(len(output.token_ids) == 30 for output in outputs)
    assert sum(len(step.decode[0]) == 4 for step in runner.steps[5:]) > 10


@pytest.mark.parametrize("times", [1, 2])
def test_rows_that_are_not_finite(times: int):
    spec = capacity(cp=2, chunk=16)
    requests = mix()
    count = 0

    def finite(sequence) -> bool:
        nonlocal count
        if sequence.request is requests[1] and sequence.num_output == 3 and count < times:
            count += 1
            return False
        return True

    subject = engine(spec, finite=finite)
    outputs = run(subject, *requests)
    assert count == times == subject.stats().faults
    for one, output in zip(requests, outputs, strict=True):
        if times == 2 and one is requests[1]:
            assert output.finish_reason == "error" and "not finite" in (output.error or "")
            assert output.token_ids == reference(one, spec)[0][0][:3]
        else:
            assert answer(output) == reference(one, spec)


def test_one_failing_sample_ends_its_request_only_once():
    requests = [request(20, n=3, max_tokens=9), request(5, max_tokens=9)]
    subject = engine(capacity(), finite=lambda sequence: sequence.request is not requests[0] or sequence.index != 1)
    outputs = run(subject, *requests)
    assert [one.finish_reason for one in outputs[0].outputs] == ["error"] * 3
    assert outputs[1].finish_reason == "length"
    assert subject.stats().finished == {"error": 3, "length": 1}


def test_end_all_leaves_a_usable_engine():
    spec = capacity(chunk=16)
    subject = engine(spec)
    for one in mix():
        subject.add(one)
    for _ in range(4):
        subject.step()
    updates = subject.end_all("error", "a bug")
    assert sum(update.request_finished for update in updates) == 5 and updates[-1].error == "a bug"
    assert not subject.has_work and subject.stats().free_pages == subject.stats().total_pages
    one = request(30)
    assert answer(run(subject, one)[0]) == reference(one, spec)


def test_frozen_parameters():
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # pyright: ignore[reportAttributeAccessIssue]
