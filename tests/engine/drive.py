"""Runs engines in tests: to their end, with checks of the page book-keeping, and against a naive reference."""

import codecs
import itertools
from collections.abc import Callable

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, RequestOutput, SamplingParams, Sequence, Update, sequence_seed
from jaxinfer.engine.step import Capacity
from jaxinfer.tokenizer import byte_tokenizer
from tests.engine.fake_runner import FakeRunner, check_pages, text_token

EOS = 257
TOKENIZER = byte_tokenizer()
_ids = itertools.count()


def engine(capacity: Capacity, **runner) -> Engine:
    return Engine(FakeRunner(capacity, **runner), TOKENIZER, eos_token_ids=(EOS,))


def request(prompt, *, id: str | None = None, logit_rows: tuple[int, ...] | None = None, **params) -> Request:
    """A greedy request; the prompt is text, or a number of tokens."""
    if isinstance(prompt, int):
        prompt = [(7 * i + prompt) % 256 for i in range(prompt)]
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    params = SamplingParams(**{"temperature": 0.0, **params})
    return Request(id=f"r{next(_ids)}" if id is None else id, prompt_ids=ids, params=params, logit_rows=logit_rows)


def check_books(engine: Engine) -> None:
    """Asserts that no page has two owners, and that every page that is not free has one that is unfinished."""
    owned: list[list[set[int]]] = [[set() for _ in range(engine.capacity.layout.cp)] for _ in engine._scheduler._queues]
    sequences = list(engine._scheduler)
    for sequence in sequences:
        check_pages(sequence, sequence.num_computed, engine.capacity, owned[sequence.replica])
    held = sum(len(pages) for ranks in owned for pages in ranks)
    stats = engine.stats()
    assert stats.free_pages + held == stats.total_pages
    assert stats.waiting + stats.prefilling + stats.running == len(sequences)
    outstanding = sum(sequence.final_length - sequence.num_computed for sequence in sequences)
    assert sum(queues.outstanding for queues in engine._scheduler._queues) == outstanding


def run(
    engine: Engine, *requests: Request, each_step: Callable[[int], None] = lambda step: None
) -> list[RequestOutput]:
    """Adds the requests and steps until all is done; `each_step(number)` comes before each step and may add more."""
    accumulators = {one.id: Accumulator(one) for one in requests}
    for one in requests:
        engine.add(one)
    for step in itertools.count():
        each_step(step)
        if not engine.has_work:
            break
        for update in engine.step():
            if update.request_id in accumulators:
                accumulators[update.request_id].add(update)
        check_books(engine)
        assert step < 20_000, "no end"
    assert engine.stats().free_pages == engine.stats().total_pages
    assert all(accumulator.finished for accumulator in accumulators.values())
    return [accumulator.output for accumulator in accumulators.values()]


def visible(ids: list[int]) -> str:
    """The text of byte-level ids, without an incomplete character at the end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(token for token in ids if token < 256))


def reference(
    request: Request, capacity: Capacity, next_token=text_token
) -> list[tuple[list[int], str, str, str | int | None]]:
    """What each sample must be, computed the simplest way: (ids, text, finish_reason, stop_reason)."""
    params, answers = request.params, []
    for index in range(params.n):
        sequence = Sequence(
            request=request,
            index=index,
            token_ids=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
            max_new_tokens=0,
            seed=sequence_seed(params.seed or 0, index),
        )
        limit = params.max_tokens or capacity.max_context - len(request.prompt_ids)
        answers.append(
            _continue(sequence, limit, params, lambda s: next_token(np.array(s.token_ids), s, capacity.vocab_size))
        )
    return answers


def _continue(
    sequence: Sequence, limit: int, params: SamplingParams, sample
) -> tuple[list[int], str, str, str | int | None]:
    unwatched = 0
    while True:
        sequence.token_ids.append(sample(sequence))
        ids = sequence.output_ids
        if len(ids) > params.min_tokens:
            if ids[-1] in params.stop_token_ids:
                return ids, visible(ids[:-1]), "stop", ids[-1]
            if ids[-1] == EOS and not params.ignore_eos:
                return ids, visible(ids[:-1]), "stop", None
            text = visible(ids)
            # Character by character: the stop string that is complete first.
            for end in range(unwatched + 1, len(text) + 1):
                for stop in sorted(params.stop_strings, key=len, reverse=True):
                    if text[unwatched:end].endswith(stop):
                        return ids, text[: end - len(stop)], "stop", stop
        else:
            unwatched = len(visible(ids))
        if len(ids) == limit:
            return ids, visible(ids), "length", None


def answer(output: RequestOutput) -> list[tuple[list[int], str, str | None, str | int | None]]:
    """The samples of an output in the form of `reference`."""
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def by_request(updates: list[Update], request: Request) -> list[Update]:
    return [update for update in updates if update.request_id == request.id]
