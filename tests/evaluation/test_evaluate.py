"""Whole runs over models that read the prompt themselves, and over one that does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.configs.engine import EngineOptions
from jaxinfer.evaluation.comparison import compare, compare_batches, invariance_sample, without_record
from jaxinfer.evaluation.evaluate import Cell, attention_read, cells, evaluate, setting_of
from jaxinfer.evaluation.haystack import king_james
from jaxinfer.evaluation.picture import draw
from jaxinfer.evaluation.records import Records
from jaxinfer.evaluation.report import length_name, markdown, parts_with_depth
from jaxinfer.evaluation.tasks import Settings, make_sample, ordinary_tokens
from jaxinfer.llm import LLM
from jaxinfer.tokenizer import byte_tokenizer
from tests.evaluation.readers import VOCAB, reader

BYTES = byte_tokenizer()
SETTINGS = Settings(tokenizer=BYTES, ordinary=ordinary_tokens(BYTES, VOCAB), haystack=king_james())
NEEDLES = ["passkey", "niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery"]


def test_cells() -> None:
    found = cells(["passkey", "vt"], [4096, 2048], depths=3, samples=2)
    assert len(found) == 2 * (6 + 6)
    assert [(c.length, c.task, c.depth, c.sample) for c in found[:4]] == [
        (2048, "passkey", 0.0, 0),
        (2048, "passkey", 0.5, 0),
        (2048, "passkey", 1.0, 0),
        (2048, "passkey", 0.0, 1),
    ]
    assert [c.depth for c in cells(["kv"], [64], depths=1, samples=2)] == [0.5, 0.5]


def test_perfect_and_short_memory_show_in_the_tables(tmp_path: Path) -> None:
    records = Records(tmp_path / "results.jsonl")
    todo = cells(NEEDLES, [2048, 4096], depths=3, samples=1)
    evaluate(reader(), {"model": "perfect"}, todo, SETTINGS, records)
    perfect = list(records.all)
    assert len(perfect) == len(todo) and all(record["score"] == 1 for record in perfect)
    evaluate(reader(reach=1200), {"model": "short"}, todo, SETTINGS, records)
    short = records.all[len(todo) :]
    for task, parts in parts_with_depth(short):
        for part in parts:
            if part["depth"] != 0.5:
                assert part["score"] == part["depth"], (task, part)
    text = markdown(records.all)
    assert "## perfect" in text and "## short" in text
    assert "| passkey | 100.0 (3) | 100.0 (3) |" in text.split("## short")[0]
    assert "| 0% | 0.0 (1) | 0.0 (1) |" in text.split("## short")[1]
    draw(records.all, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    records = Records(tmp_path / "results.jsonl")
    todo = cells(["passkey"], [2048], depths=4, samples=2)
    llm = reader()
    evaluate(llm, {}, todo[:3], SETTINGS, records)
    steps = llm.engine.stats().steps
    evaluate(llm, {}, todo[:3], SETTINGS, records)
    assert llm.engine.stats().steps == steps
    evaluate(llm, {}, todo, SETTINGS, Records(tmp_path / "results.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(r["depth"], r["sample"]) for r in lines] == [(c.depth, c.sample) for c in todo]
    assert all(r["prompt_tokens"] + 24 > 2048 - 20 and r["seconds"] >= 0 for r in lines)


def test_perplexity_is_measured_by_the_models_own_scores(tmp_path: Path) -> None:
    records = Records(tmp_path / "results.jsonl")
    evaluate(reader(), {}, cells(["ppl"], [512], depths=1, samples=1), SETTINGS, records)
    (record,) = records.all
    # The stand-in gives token i of the prompt the logprob -i, and every token but the first is a byte.
    expected = sum(range(1, record["prompt_tokens"])) / (record["prompt_tokens"] - 1) / 0.6931471805599453
    assert record["bits_per_byte"] == pytest.approx(expected)
    assert "Bits per byte" in markdown(records.all)


def test_comparison_opens_each_model_once_and_only_if_needed(tmp_path: Path) -> None:
    records = Records(tmp_path / "results.jsonl")
    opened: list[str] = []

    def opener(name: str, reach: int | None):
        def open_it() -> LLM:
            opened.append(name)
            return reader(reach)

        return {"model": name}, open_it

    def sample_of(cell: Cell, llm: LLM):
        return make_sample(cell.task, cell.length, cell.depth, cell.sample, SETTINGS)

    todo = cells(["passkey"], [2048], depths=3, samples=1)
    arguments = (opener("full", None), [opener("short", 600), opener("twin", None)], todo, sample_of, 8)
    compare(*arguments, tmp_path / "baseline", records)
    assert opened == ["full", "short", "twin"]
    short, twin = records.all[:3], records.all[3:]
    assert all(r["same_answer"] == 1 and r["score"] == 1 and r["kl"] == 0 for r in twin)
    assert [r["same_answer"] for r in short] == [0, 0, 1] and [r["score"] for r in short] == [0, 0, 1]
    assert all(r["baseline_score"] == 1 and r["max_dlogit"] == 0 for r in short)
    compare(*arguments, tmp_path / "baseline", Records(tmp_path / "results.jsonl"))
    assert opened == ["full", "short", "twin"]
    assert "| same_answer | 33.3% |" in markdown(records.all)


def test_batch_invariance_runs_prompts_together_and_alone(tmp_path: Path) -> None:
    records = Records(tmp_path / "results.jsonl")
    llm, todo = reader(), cells(["invariance_batch"], [700], depths=1, samples=3)
    assert without_record(todo, {}, records) == todo
    together: list[int] = []
    llm.engine.runner.before = lambda step: together.append(len(step.sequences()))
    compare_batches(llm, {}, todo, lambda cell: invariance_sample(cell, SETTINGS), 8, records)
    assert max(together) > 3
    assert [r["same_answer"] for r in records.all] == [1, 1, 1]
    assert without_record(todo, {}, records) == []
    without = replace(SETTINGS, tokenizer=None)
    assert len(invariance_sample(todo[0], without).ids) == 696


def test_settings_hold_what_results_depend_on() -> None:
    options = EngineOptions(model="m", kv="bf16", max_context=999, max_num_seqs=3, overrides={})
    assert setting_of(options, {"chat": True}) == {"model": "m", "kv": "bf16", "chat": True}
    assert (length_name(8192), length_name(1 << 20), length_name(1000)) == ("8K", "1M", "1000")


def test_what_attention_read_is_of_the_queries_between() -> None:
    before = {"queries": 10.0, "window": 900.0, "all": 5.0, "captured": 1.0, "sampled": 2.0}
    after = {"queries": 14.0, "window": 1000.0, "all": 5.0, "hot": 60.0, "captured": 2.5, "sampled": 4.0}
    assert attention_read(before, after) == {"keys_per_query": 40.0, "captured_mass": 0.75}
    assert attention_read({}, {}) == {}
    assert attention_read(after, after) == {}
