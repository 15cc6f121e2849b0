"""Runs tasks over lengths and depths, a record for each sample."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from jaxinfer.configs.engine import EngineOptions
from jaxinfer.engine.reads import SOURCES
from jaxinfer.engine.step import Capacity
from jaxinfer.evaluation.records import Records
from jaxinfer.evaluation.scoring import Answer, ask, bits_per_byte, score_parts
from jaxinfer.evaluation.tasks import TASKS, Sample, Settings, make_sample
from jaxinfer.llm import LLM

type Setting = dict[str, Any]
"""What a result depends on besides task, length, depth and sample, as JSON values; defaults are left out."""

_NO_EFFECT = ("max_context", "max_num_seqs", "memory_fraction")
"""Engine options that the results do not depend on."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One sample to take."""

    task: str
    length: int
    depth: float | None
    sample: int

    def key(self, setting: Setting, baseline: Setting | None = None) -> dict[str, Any]:
        """The fields of the record that identify it."""
        fields = {"setting": setting, "task": self.task, "length": self.length}
        fields |= {"depth": self.depth, "sample": self.sample}
        return fields if baseline is None else fields | {"baseline": baseline}


def cells(tasks: Sequence[str], lengths: Sequence[int], depths: int, samples: int) -> list[Cell]:
    """Short lengths first; within a length and task every depth once before any twice.

    Depths are spread evenly from 0 to 1 (a single one is 0.5).  Tasks without a depth get as many samples in all.
    """
    levels = [round(i / (depths - 1), 4) for i in range(depths)] if depths > 1 else [0.5]
    found = []
    for length in sorted(lengths):
        for task in tasks:
            if task in TASKS and TASKS[task].has_depth:
                places = [(depth, number) for number in range(samples) for depth in levels]
            else:
                places = [(None, number) for number in range(samples * depths)]
            found += [Cell(task=task, length=length, depth=d, sample=n) for d, n in places]
    return found


def setting_of(options: EngineOptions, settings: dict[str, Any]) -> Setting:
    """The setting of an engine and of the samples (`settings`: those that are not as by default)."""
    found: Setting = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _NO_EFFECT and value != field.default and value != {}:
            found[field.name] = dict(value) if field.name == "overrides" else value
    return found | settings


def evaluate(llm: LLM, setting: Setting, todo: Sequence[Cell], settings: Settings, records: Records) -> None:
    """Takes the samples of `todo` that have no record yet.

    Raises ValueError for a task that the model or the length does not allow, RuntimeError if the engine fails on a
    sample.
    """
    missing = [cell for cell in todo if cell.key(setting) not in records]
    with (
        tqdm(total=len(todo), initial=len(todo) - len(missing), desc="samples", dynamic_ncols=True) as bar,
        ExitStack() as stack,
    ):
        pool = ThreadPoolExecutor()  # tokenizers work outside of Python's lock
        # After an interrupt nothing is waited for that has not begun.
        stack.callback(pool.shutdown, cancel_futures=True)

        def prepare(batch: list[Cell]) -> list[Future[Sample]]:
            return [pool.submit(make_sample, c.task, c.length, c.depth, c.sample, settings) for c in batch]

        todo_batches = [*batches(missing, llm.engine.capacity)]
        prepared = [prepare(batch) for batch in todo_batches[:1]]
        for number, batch in enumerate(todo_batches):
            bar.set_postfix_str(f"{batch[0].task}, {batch[0].length} tokens")
            samples = [future.result() for future in prepared.pop()]
            before = llm.engine.stats().reads
            # The next batch is written while the model answers this one.
            prepared += [prepare(following) for following in todo_batches[number + 1 : number + 2]]
            answers = ask(llm, samples)
            read = attention_read(before, llm.engine.stats().reads)
            for cell, sample, answer in zip(batch, samples, answers, strict=True):
                records.add(cell.key(setting) | _result(sample, answer) | read)
            bar.update(len(batch))


def batches(todo: Sequence[Cell], capacity: Capacity) -> Iterator[list[Cell]]:
    """Cells of one length and task that go to the engine together: what its pages hold, so that few results are lost
    when a run is stopped."""
    batch: list[Cell] = []
    for cell in todo:
        fit = max(1, min(capacity.pool_tokens // cell.length, capacity.max_num_seqs)) * capacity.replicas
        if batch and (len(batch) >= fit or (batch[0].task, batch[0].length) != (cell.task, cell.length)):
            yield batch
            batch = []
        batch.append(cell)
    if batch:
        yield batch


def attention_read(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What hybrid attention read between two of an engine's statistics, on the mean of queries and layers: keys, and
    the share of the softmax mass of sampled queries that lies in them (see `engine.reads`).  Empty for dense
    attention."""
    found = {name: after[name] - before.get(name, 0.0) for name in after}
    means = {}
    if queries := found.get("queries"):
        means["keys_per_query"] = sum(found.get(source, 0.0) for source in SOURCES) / queries
    if sampled := found.get("sampled"):
        means["captured_mass"] = found["captured"] / sampled
    return means


def _result(sample: Sample, answer: Answer) -> dict[str, Any]:
    """The part of a record that says how it went."""
    result: dict[str, Any] = {"prompt_tokens": len(sample.ids), "seconds": answer.seconds}
    if not sample.parts:
        assert answer.prompt_logprobs is not None
        return result | {"bits_per_byte": bits_per_byte(answer.prompt_logprobs)}
    scores = score_parts(sample, answer)
    return result | {
        "score": sum(scores) / len(scores),
        "parts": [
            {"depth": part.depth, "score": score, "reference": part.reference}
            for part, score in zip(sample.parts, scores, strict=True)
        ],
        "answer": answer.text if sample.text is not None else answer.token_ids,
    }
