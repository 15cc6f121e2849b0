"""The command line, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.eval import parse_length

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "jaxinfer.eval", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def test_lengths_are_read() -> None:
    assert [parse_length(text) for text in ("512", "8k", "128K", "1m")] == [512, 8192, 131072, 1048576]
    for text in ("", "k", "-1", "0", "8kk", "1.5k"):
        with pytest.raises(ValueError, match="expected a length"):
            parse_length(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks=niah"], "expected lengths and tasks of niah_single"),
        (["--lengths=4q"], "expected a length such as 512, 8k or 1m, got '4q'"),
        (["--lengths=8k", "--max-context=4096"], "expected max_context of at least 8192, got 4096"),
        (["--text=no-such-file"], "no-such-file"),
        (["--against=kw=int8"], "expected name=value with a name of model"),
        (["--kv=bf16,fp32", "--against=kv=fp32"], "expected one --attention and one --kv"),
        (["--tasks=invariance_mesh"], "expected a --mesh or --invariance_mesh of several devices"),
        (["--kv=int3"], "expected kv to be one of"),
        (["stray"], "expected flags only"),
    ],
)
def test_wrong_command_lines_are_refused_with_the_reason(tmp_path: Path, arguments: list[str], words: str) -> None:
    code, text = run(f"--out={tmp_path}", *arguments)
    assert code == 1 and words in text
    assert not list(tmp_path.glob("report*"))


def test_a_run_and_its_continuation(tmp_path: Path) -> None:
    arguments = ["--model=tiny-random", f"--out={tmp_path}", "--lengths=512,1k", "--depths=2", "--kv=fp32,bf16"]
    arguments += ["--max-num-seqs=2", "--answer-tokens=4"]
    code, text = run("--tasks=passkey,kv,ppl", *arguments)
    assert code == 0, text
    for expected in ("| passkey | 0.0 (2) | 0.0 (2) |", "Bits per byte", "kv=bf16", "kv=fp32", "kv by depth"):
        assert expected in text
    results = tmp_path / "results.jsonl"
    whole = results.read_text()
    records = [json.loads(line) for line in whole.splitlines()]
    assert len(records) == 2 * 2 * 3 * 2
    # Random weights predict bytes at random.
    perplexity = [record["bits_per_byte"] for record in records if record["task"] == "ppl"]
    assert all(7 < value < 14 for value in perplexity)
    results.write_text(whole[: len(whole) // 2])
    code, again = run("--tasks=passkey,kv,ppl", *arguments)
    assert code == 0 and again.split("# Evaluation")[1] == text.split("# Evaluation")[1]
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.slow
def test_comparisons_and_invariances(tmp_path: Path) -> None:
    checks = "invariance_chunk,invariance_mesh,invariance_batch"
    arguments = ["--model=tiny-random", f"--out={tmp_path}", "--lengths=512", "--depths=1", "--max-num-seqs=4"]
    arguments += ["--samples=2", "--nopicture"]
    code, text = run(f"--tasks={checks}", "--mesh=cp=2", "--invariance-mesh=cp=1", "--invariance-mesh=cp=4", *arguments)
    assert code == 0 and text.count("| same_answer | 100.0% |") == 5
    code, text = run("--tasks=passkey,kv", "--against=precision=fp32", "--against=mesh=cp=2", *arguments)
    assert code == 0, text
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(records) == 10 + 2 * 2 * 2
    assert max(record["max_dlogit"] for record in records[:10]) < 1e-4
    # Another type of arithmetic shows; another mesh hardly.
    by_precision = [record["kl"] for record in records if record["setting"].get("precision") == "fp32"]
    by_mesh = [record["kl"] for record in records[10:] if "mesh" in record["setting"]]
    assert len(by_precision) == len(by_mesh) == 4
    assert all(1e-6 < kl < 0.05 for kl in by_precision) and all(kl < 1e-4 for kl in by_mesh)
