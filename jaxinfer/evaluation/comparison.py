"""The same samples under two settings of the engine: how much the answers and the distributions differ.

The invariance checks are such comparisons too: of chunk sizes, of meshes, and of a prompt alone and among others.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxinfer.evaluation.evaluate import Cell, Setting, batches
from jaxinfer.evaluation.records import Records
from jaxinfer.evaluation.scoring import Answer, ask, score_parts
from jaxinfer.evaluation.tasks import Sample, Settings, make_sample
from jaxinfer.llm import LLM

INVARIANCES = ("invariance_chunk", "invariance_mesh", "invariance_batch")

_INVARIANCE_ANSWER = 16
"""Tokens of the answers that the invariance checks compare."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a model did with a prompt."""

    token_ids: list[int]
    """The greedy answer."""
    logits: np.ndarray
    """Float32 `[rows, vocab]` at positions spread over the prompt, and at those that the task scores."""
    score: float | None
    """As in `evaluate`; None for a task without one."""


def differences(base: Measurement, other: Measurement) -> dict[str, float]:
    """How `other` differs from `base`.

    `same_answer` 1 if the greedy answers agree; `same_tokens` the share of the answer before the first difference;
    `kl` the mean and `kl_max` the largest Kullback-Leibler divergence (nats, base against other) of the next-token
    distributions at the rows; `top1` the share of rows with the same likeliest token; `max_dlogit` the largest
    difference of a logit.
    """
    p, q = _log_softmax(base.logits), _log_softmax(other.logits)
    kl = np.sum(np.exp(p) * (p - q), axis=-1)
    longest = max(len(base.token_ids), len(other.token_ids))
    differing = [i for i, (a, b) in enumerate(zip(base.token_ids, other.token_ids, strict=False)) if a != b]
    first = differing[0] if differing else min(len(base.token_ids), len(other.token_ids))
    return {
        "same_answer": float(base.token_ids == other.token_ids),
        "same_tokens": first / longest if longest else 1.0,
        "kl": float(np.mean(kl)),
        "kl_max": float(np.max(kl)),
        "top1": float(np.mean(base.logits.argmax(axis=-1) == other.logits.argmax(axis=-1))),
        "max_dlogit": float(np.max(np.abs(base.logits - other.logits))),
    }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def rows_of(sample: Sample, count: int) -> list[int]:
    """`count` positions spread evenly over a prompt, the last one among them."""
    count = min(count, len(sample.ids))
    return [round((i + 1) * len(sample.ids) / count) - 1 for i in range(count)]


def measure(llm: LLM, samples: Sequence[Sample], rows: int) -> list[Measurement]:
    """Measures samples, all of them together in the engine."""
    wanted = [rows_of(sample, rows) for sample in samples]
    return [_measurement(*pair) for pair in zip(samples, ask(llm, samples, scored=False, rows=wanted), strict=True)]


def _measurement(sample: Sample, answer: Answer) -> Measurement:
    assert answer.logits is not None
    scores = score_parts(sample, answer)
    score = sum(scores) / len(scores) if scores else None
    return Measurement(token_ids=answer.token_ids, logits=answer.logits, score=score)


class Baseline:
    """The measurements of the baseline on disk: a file a sample, so that one engine at a time need be in memory."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, cell: Cell, setting: Setting) -> Path:
        text = json.dumps(cell.key(setting), sort_keys=True)
        return self._folder / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.npz"

    def has(self, cell: Cell, setting: Setting) -> bool:
        return self._path(cell, setting).is_file()

    def save(self, cell: Cell, setting: Setting, measured: Measurement) -> None:
        path = self._path(cell, setting)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            score = np.nan if measured.score is None else measured.score
            np.savez(file, token_ids=np.array(measured.token_ids, np.int64), logits=measured.logits, score=score)
        unfinished.rename(path)

    def load(self, cell: Cell, setting: Setting) -> Measurement:
        with np.load(self._path(cell, setting)) as file:
            score = float(file["score"])
            ids, logits = file["token_ids"].tolist(), file["logits"]
        return Measurement(token_ids=ids, logits=logits, score=None if np.isnan(score) else score)


type Open = Callable[[], LLM]


def compare(
    baseline: tuple[Setting, Open],
    others: Sequence[tuple[Setting, Open]],
    todo: Sequence[Cell],
    sample_of: Callable[[Cell, LLM], Sample],
    rows: int,
    folder: Path,
    records: Records,
) -> None:
    """Compares other settings with a baseline on the same samples; each setting comes with how to open its model.

    The baseline's measurements go to `folder`; a model is opened only if something is missing that needs it.  Every
    sample is measured by itself, so that nothing but the setting differs.
    """
    base, open_base = baseline
    missing = {i: [c for c in todo if c.key(other, base) not in records] for i, (other, _) in enumerate(others)}
    store = Baseline(folder)
    wanted = [c for c in todo if any(c in cells for cells in missing.values()) and not store.has(c, base)]
    if wanted:
        with open_base() as llm:
            for cell in tqdm(wanted, desc="baseline", dynamic_ncols=True):
                store.save(cell, base, measure(llm, [sample_of(cell, llm)], rows)[0])
    for i, (other, open_other) in enumerate(others):
        if not missing[i]:
            continue
        with open_other() as llm:
            for cell in tqdm(missing[i], desc=f"setting {i + 1} of {len(others)}", dynamic_ncols=True):
                measured = measure(llm, [sample_of(cell, llm)], rows)[0]
                records.add(cell.key(other, base) | _compared(store.load(cell, base), measured))


def _alone_and_together(setting: Setting) -> tuple[Setting, Setting]:
    return setting | {"batch": "alone"}, setting | {"batch": "among others"}


def without_record(todo: Sequence[Cell], setting: Setting, records: Records) -> list[Cell]:
    """The cells that `compare_batches` has not recorded."""
    alone, together = _alone_and_together(setting)
    return [cell for cell in todo if cell.key(together, alone) not in records]


def compare_batches(
    llm: LLM,
    setting: Setting,
    todo: Sequence[Cell],
    sample_of: Callable[[Cell], Sample],
    rows: int,
    records: Records,
) -> None:
    """Compares each prompt alone with the same prompt among others in the engine: the rest of its batch, one of them
    cut to half."""
    alone, together = _alone_and_together(setting)
    with tqdm(total=len(todo), desc="batches", dynamic_ncols=True) as bar:
        for batch in batches(todo, llm.engine.capacity):
            samples = [sample_of(cell) for cell in batch]
            half = replace(samples[0], ids=samples[0].ids[: len(samples[0].ids) // 2], parts=[])
            crowd = measure(llm, [half, *samples], rows)[1:]
            for cell, sample, measured in zip(batch, samples, crowd, strict=True):
                base = measure(llm, [sample], rows)[0]
                records.add(cell.key(together, alone) | _compared(base, measured))
                bar.update()


def _compared(base: Measurement, other: Measurement) -> dict[str, Any]:
    found: dict[str, Any] = dict(differences(base, other))
    return found | {"baseline_score": base.score, "score": other.score}


def invariance_sample(cell: Cell, settings: Settings) -> Sample:
    """A prompt of the length for the invariance checks: text of the haystack, or ids where there is no tokenizer."""
    if settings.tokenizer is None:
        return replace(make_sample("kv", cell.length, 0.5, cell.sample, settings), parts=[])
    excerpt = make_sample("ppl", cell.length - _INVARIANCE_ANSWER + 1, None, cell.sample, settings)
    return replace(excerpt, answer_tokens=_INVARIANCE_ANSWER)
