"""Scores, differences and records."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.engine.request import Logprob, TokenLogprobs
from jaxinfer.evaluation.comparison import Measurement, differences, rows_of
from jaxinfer.evaluation.records import Records
from jaxinfer.evaluation.scoring import Answer, bits_per_byte, contains, score_parts
from jaxinfer.evaluation.tasks import Part, Sample


def test_matching_is_rulers() -> None:
    assert contains("it is 12345.", "12345") and contains("ABC\x00def", "abc") and contains("x\tPMHRO", "pmhro")
    assert not contains("1234", "12345") and not contains("12\x0034", "1234")


def test_parts_are_scored_by_text_by_ids_and_by_rows() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[[0, 1, 2], [3, 4, 5]] = 1
    answer = Answer(text="red and Blue", token_ids=[1, 2, 9], rows=[10, 11, 20], logits=logits)
    parts = [
        Part(depth=0.1, reference="blue"),
        Part(depth=0.2, reference="green"),
        Part(depth=0.3, reference=[1, 2]),
        Part(depth=0.4, reference=[2, 9]),
        Part(depth=0.5, reference=[4, 5], rows=[11, 20]),
        Part(depth=0.6, reference=[3, 5], rows=[10, 11]),
    ]
    assert score_parts(Sample(ids=[0] * 30, answer_tokens=3, parts=parts), answer) == [1, 0, 1, 0, 1, 0]


def test_bits_per_byte() -> None:
    entries = [None] + [
        TokenLogprobs(chosen=Logprob(token_id=0, logprob=-n * math.log(2), token_bytes=b"x" * n)) for n in (1, 3, 4)
    ]
    assert bits_per_byte(entries) == pytest.approx(1.0)


def measurement(ids: list[int], probabilities: list[list[float]]) -> Measurement:
    return Measurement(token_ids=ids, logits=np.log(np.array(probabilities, np.float32)) + 7, score=None)


def test_differences() -> None:
    base = measurement([1, 2, 3, 4], [[0.5, 0.5, 1e-9], [0.75, 0.25, 1e-9]])
    same = differences(base, base)
    assert same == {"same_answer": 1, "same_tokens": 1, "kl": 0, "kl_max": 0, "top1": 1, "max_dlogit": 0}
    other = differences(base, measurement([1, 2, 5, 4], [[0.25, 0.75, 1e-9], [0.75, 0.25, 1e-9]]))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert other["kl_max"] == pytest.approx(kl, rel=1e-5) and other["kl"] == pytest.approx(kl / 2, rel=1e-5)
    assert (other["same_answer"], other["same_tokens"], other["top1"]) == (0, 0.5, 0.5)
    assert other["max_dlogit"] == pytest.approx(math.log(2), rel=1e-5)
    assert differences(base, measurement([1, 2], [[0.5, 0.5, 1e-9]] * 2))["same_tokens"] == 0.5


def test_rows_end_with_the_last() -> None:
    found = Sample(ids=[0] * 100, answer_tokens=1, parts=[])
    assert rows_of(found, 4) == [24, 49, 74, 99]
    assert rows_of(found, 1000) == list(range(100))


def record(sample: int, **fields: object) -> dict[str, object]:
    return {"setting": {"kv": "bf16"}, "task": "kv", "length": 8, "depth": 0.5, "sample": sample, **fields}


def test_records_survive_a_torn_line_and_refuse_another_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    records = Records(path)
    records.add(record(0, score=1.0))
    records.add(record(0, score=1.0, baseline={}))
    with path.open("a") as file:
        file.write(json.dumps(record(1))[:-9])
    again = Records(path)
    assert len(again.all) == 2 and record(0) in again and record(1) not in again
    assert record(0, baseline={"kv": "fp32"}) not in again and record(0, setting={}) not in again
    again.add(record(1))
    assert [r["sample"] for r in Records(path).all] == [0, 0, 1]
    other = tmp_path / "README"
    other.write_text("something\n")
    with pytest.raises(ValueError, match="line 1: expected a record"):
        Records(other)
    assert other.read_text() == "something\n"
