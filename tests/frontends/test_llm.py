"""`LLM`: prompts in all forms, errors before anything runs, interrupts."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jaxtyping
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.frontends.fakes import VOCAB, expected_ids, fake_engine

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.from_engine(fake_engine()) as llm:
        yield llm
        stats = llm.engine.stats()
        assert stats.free_pages == stats.total_pages
        assert not llm.engine.has_work


def test_prompts_in_all_forms(llm: LLM) -> None:
    (one,) = llm.generate("abc", GREEDY)
    assert one.token_ids == expected_ids([256, *b"abc"], 5)
    assert one.text == bytes(one.token_ids).decode()
    assert (one.prompt, list(one.prompt_token_ids)) == ("abc", [256, *b"abc"])
    assert (one.finish_reason, one.finished) == ("length", True)
    assert one.metrics.ttft is not None and one.metrics.ttft >= 0
    mixed = llm.generate(["abc", [1, 2, 3], np.array([4, 5])], GREEDY)
    assert [out.token_ids for out in mixed] == [one.token_ids, expected_ids([1, 2, 3], 5), expected_ids([4, 5], 5)]
    assert [out.token_ids for out in llm.generate([1, 2, 3], GREEDY)] == [mixed[1].token_ids]
    assert [out.token_ids for out in llm.generate(np.array([1, 2, 3]), GREEDY)] == [mixed[1].token_ids]
    assert len(llm.generate(np.array([[1, 2], [3, 4]]), GREEDY)) == 2
    assert llm.generate([], GREEDY) == []


def test_parameters_one_for_all_or_one_for_each(llm: LLM) -> None:
    outputs = llm.generate([[1], [2]], [GREEDY, SamplingParams(temperature=0, max_tokens=2, n=2)])
    assert [len(out.token_ids) for out in outputs] == [5, 2]
    assert [completion.index for completion in outputs[1].outputs] == [0, 1]
    assert len(llm.generate([[1], [2]])[1].token_ids) == 16
    with pytest.raises(ValueError, match="one SamplingParams for each of 2 prompts, got 3"):
        llm.generate([[1], [2]], [GREEDY] * 3)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1, 2], []], "empty|at least one"),
        ([[1, 2], [VOCAB]], str(VOCAB)),
        ([[1, 2], [-1]], "-1"),
        (["a", "x" * 9000], "8192"),
        ([1.5, 2.5], "token ids"),
        ([True, False], "token ids"),
        (5, "expected a prompt"),
        ({"prompt": "x"}, "expected a prompt"),
        ([None], "token ids"),
    ],
)
def test_wrong_prompts_raise_before_anything_runs(
    llm: LLM, prompts: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Users have no run-time type checker; here it would speak before the function does.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, GREEDY)
    assert llm.engine.stats().steps == 0


def test_text_needs_a_tokenizer() -> None:
    llm = LLM.from_engine(fake_engine(tokenizer=None))
    with pytest.raises(ValueError, match="no tokenizer: expected token ids, got text"):
        llm.generate("abc")
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])
    assert llm.generate([1, 2], GREEDY)[0].token_ids == expected_ids([1, 2], 5)


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    (out,) = llm.chat(talk, GREEDY)
    assert list(out.prompt_token_ids) == [256, 258, *b"Hi", 261, 259]
    assert out.token_ids == expected_ids(list(out.prompt_token_ids), 5)
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "x"}]], GREEDY)
    assert two[0].token_ids == out.token_ids and len(two) == 2
    with pytest.raises(ValueError, match="wizard"):
        llm.chat([{"role": "wizard", "content": "Hi"}])
    with pytest.raises(ValueError, match="at least one message"):
        llm.chat([])


def test_logits(llm: LLM) -> None:
    ids = list(range(600))
    full = llm.logits([i % VOCAB for i in ids])
    assert (full.shape, full.dtype) == ((600, VOCAB), np.float32)
    np.testing.assert_array_equal(np.floor(full[:, 0]), ids)
    picked = llm.logits([i % VOCAB for i in ids], rows=[-1, 5, 5, 300])
    np.testing.assert_array_equal(picked, full[[599, 5, 5, 300]])
    assert llm.logits([1, 2], rows=[]).shape == (0, VOCAB)
    assert llm.logits("ab").shape == (3, VOCAB)
    with pytest.raises(ValueError, match="rows from -2 to 1, got 2"):
        llm.logits([1, 2], rows=[0, 2])


def test_an_interrupt_aborts_its_requests(llm: LLM) -> None:
    steps = 0

    def interrupt(step: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            raise KeyboardInterrupt

    llm.engine.runner.fail = interrupt  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]] * 3, SamplingParams(max_tokens=100))
    llm.engine.runner.fail = lambda step: None  # pyright: ignore[reportAttributeAccessIssue]
    (out,) = llm.generate([1, 2], GREEDY)
    assert out.token_ids == expected_ids([1, 2], 5)


def test_a_fault_is_reported_in_the_output(llm: LLM) -> None:
    def fail(step: object) -> None:
        raise MemoryError("no room")

    llm.engine.runner.fail = fail  # pyright: ignore[reportAttributeAccessIssue]
    (out,) = llm.generate([1, 2], GREEDY)
    assert out.finish_reason == "error" and out.error is not None and "no room" in out.error
    with pytest.raises(RuntimeError, match="no room"):
        llm.logits([1, 2])


def test_close() -> None:
    llm = LLM.from_engine(fake_engine())
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1])


def test_importing_jaxinfer_does_not_load_jax() -> None:
    code = (
        "import sys, jaxinfer, jaxinfer.batch, jaxinfer.protocol; jaxinfer.SamplingParams; print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        __import__("jaxinfer").nonsense  # noqa: B018
