"""Start-up: all shapes compile before the first request, several at a time where there is room, and none twice."""

import pytest

from jaxinfer.build import build_engine
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.engine import runner
from jaxinfer.engine.compilations import CompilationCounter
from jaxinfer.engine.request import Request, SamplingParams


def started(compilers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int, list[int]]:
    """What a start says, how many programs it compiles or loads, and the tokens of an answer after it."""
    monkeypatch.setattr(runner, "_compilers", lambda mesh: compilers)
    said: list[str] = []
    counter = CompilationCounter()
    options = EngineOptions(model="tiny-random", max_context=64, chunk_size=32, page_size=8, max_num_seqs=2)
    engine = build_engine(options, said.append, progress=False)
    count = counter.count
    engine.add(Request(id="one", prompt_ids=list(range(5, 40)), params=SamplingParams(temperature=0, max_tokens=3)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for update in engine.step() for token in update.token_ids]
    assert engine.runner.compilations.count == 0
    return said, count, tokens


def test_shapes_compile_side_by_side(monkeypatch: pytest.MonkeyPatch):
    started(1, monkeypatch)  # what later engines find compiled, such as the making of weights
    said, count, tokens = started(1, monkeypatch)
    others, other_count, other_tokens = started(3, monkeypatch)
    assert (count, tokens) == (other_count, other_tokens) and len(tokens) == 3
    assert said == others
    assert said[-2:] == ["compiling prefill and decode: 3 of 3 shapes ready", "compiling sampling"]


def test_a_program_that_does_not_compile_ends_the_start(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(runner.Programs, "_decode", refuse)
    with pytest.raises(RuntimeError, match="no compiler here"):
        started(2, monkeypatch)
