"""Batch files: every line is answered once, whatever happens."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.batch import Summary, run_files
from jaxinfer.engine.engine import Engine
from tests.frontends.fakes import expected_ids, fake_engine

COMPLETIONS = "/v1/completions"


def line(custom_id: object, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    if url == COMPLETIONS:
        body = {"prompt": f"prompt {custom_id}", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    assert path.read_text().endswith("\n")
    return [json.loads(item) for item in path.read_text().splitlines()]


def run(tmp_path: Path, engine: Engine | None = None, **kw: Any) -> Summary:
    return run_files(engine or fake_engine(), tmp_path / "in.jsonl", tmp_path / "out.jsonl", **kw)


def test_lines_are_answered_in_openais_form(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = line("c", "/v1/chat/completions", messages=messages, max_tokens=3, temperature=0)
    write(tmp_path / "in.jsonl", line("a"), "", chat, line("b", prompt=["x", "y"], n=2))
    summary = run(tmp_path)
    assert (summary.answered, summary.failed, summary.skipped) == (3, 0, 0)
    records = {record["custom_id"]: record for record in read(tmp_path / "out.jsonl")}
    assert set(records) == {"a", "b", "c"}
    for record in records.values():
        assert set(record) == {"id", "custom_id", "response", "error"} and record["error"] is None
        assert set(record["response"]) == {"status_code", "request_id", "body"}
        assert record["response"]["status_code"] == 200
    answer = records["a"]["response"]["body"]
    assert answer["choices"][0]["text"] == bytes(expected_ids([256, *b"prompt a"], 4)).decode()
    assert [choice["index"] for choice in records["b"]["response"]["body"]["choices"]] == [0, 1, 2, 3]
    assert records["c"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert summary.prompt_tokens == 9 + 6 + 4 and summary.output_tokens == 4 + 3 + 16


BAD = [
    ("{broken", "invalid_json"),
    ("[1]", "invalid_line"),
    ('"text"', "invalid_line"),
    ({**line("x"), "custom_id": None}, "invalid_custom_id"),
    ({**line("x"), "custom_id": 5}, "invalid_custom_id"),
    (line("m", method="GET"), "invalid_method"),
    (line("u", url="/v1/embeddings"), "invalid_url"),
    ({**line("f"), "extra": 1}, "unknown_field"),
    (line("good"), "duplicate_custom_id"),
]
REFUSED = [
    (line("long", prompt="x" * 9000), "8192"),
    (line("tokens", max_tokens=9000), "9000"),
    (line("field", temprature=1), "temprature"),
    (line("stream", stream=True), "stream"),
    (line("model", model="other"), "expected 'fake'"),
    ({**line("body"), "body": None}, "expected a JSON object"),
    (line("empty", prompt=[]), "prompt"),
]


def test_bad_lines_are_reported_and_stop_nothing(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("good"), *[b for b, _ in BAD], *[r for r, _ in REFUSED], line("last"))
    summary = run(tmp_path, errors=tmp_path / "errors.jsonl")
    assert (summary.answered, summary.failed) == (2, len(BAD) + len(REFUSED))
    assert {record["custom_id"] for record in read(tmp_path / "out.jsonl")} == {"good", "last"}
    errors = read(tmp_path / "errors.jsonl")
    by_line = {record["error"]["line"]: record for record in errors if record["error"]}
    for number, (_, code) in enumerate(BAD, start=2):
        assert by_line[number]["error"]["code"] == code
        assert f"line {number}" in by_line[number]["error"]["message"] and by_line[number]["response"] is None
    responses = {record["custom_id"]: record["response"] for record in errors if record["response"]}
    for request, words in REFUSED:
        response = responses[request["custom_id"]]
        assert response["status_code"] in (400, 404) and words in response["body"]["error"]["message"]
    again = run(tmp_path, errors=tmp_path / "errors.jsonl")
    assert (again.answered, again.failed, again.skipped) == (0, 0, 2 + len(errors))
    assert read(tmp_path / "errors.jsonl") == errors


def test_without_an_errors_file_they_go_to_the_output(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", "{broken", line("a"), line("b", temperature=-1))
    assert run(tmp_path).failed == 2
    assert len(read(tmp_path / "out.jsonl")) == 3
    assert run(tmp_path).skipped == 3
    assert len(read(tmp_path / "out.jsonl")) == 3


def test_goes_on_where_it_stopped_and_drops_a_torn_line(tmp_path: Path) -> None:
    requests = [line(str(i)) for i in range(20)]
    write(tmp_path / "in.jsonl", *requests)
    run(tmp_path)
    whole = {record["custom_id"]: record["response"]["body"]["choices"] for record in read(tmp_path / "out.jsonl")}
    data = (tmp_path / "out.jsonl").read_bytes()
    kept = data.index(b"\n", len(data) // 2) + 1
    (tmp_path / "out.jsonl").write_bytes(data[: kept + 30])
    summary = run(tmp_path)
    assert summary.skipped == data[:kept].count(b"\n")
    assert summary.answered == 20 - summary.skipped > 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(data[:kept])
    records = read(tmp_path / "out.jsonl")
    assert len(records) == 20
    assert {record["custom_id"]: record["response"]["body"]["choices"] for record in records} == whole


def test_an_interrupt_loses_no_line_and_leaves_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in.jsonl", *[line(str(i), max_tokens=20) for i in range(40)])
    engine = fake_engine(0.002)
    steps = 0

    def fail(step: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 60:
            signal_main()

    def signal_main() -> None:
        import _thread

        _thread.interrupt_main()

    engine.runner.fail = fail  # pyright: ignore[reportAttributeAccessIssue]
    # Shells start what runs in the background with interrupts ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, engine, max_in_flight=4)
    finally:
        signal.signal(signal.SIGINT, handler)
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages
    assert threading.active_count() < 10
    path = tmp_path / "out.jsonl"
    before = [json.loads(item) for item in path.read_text().splitlines()]
    assert 0 < len(before) < 40
    summary = run(tmp_path)
    assert (summary.skipped, summary.answered) == (len(before), 40 - len(before))
    assert len({record["custom_id"] for record in read(path)}) == 40


def test_the_number_of_requests_in_flight_is_bounded(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *[line(str(i)) for i in range(30)])
    engine = fake_engine(0.001)
    most = 0

    def look(step: object) -> None:
        nonlocal most
        stats = engine.stats()
        most = max(most, stats.running + stats.prefilling + stats.waiting)

    engine.runner.fail = look  # pyright: ignore[reportAttributeAccessIssue]
    assert run(tmp_path, engine, max_in_flight=3).answered == 30
    assert 1 < most <= 3


def test_an_engine_fault_ends_only_its_request(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("bad", prompt="boom"), line("c"))
    engine = fake_engine()

    def fail(step: Any) -> None:
        if any(sequence.request.prompt == "boom" for sequence in step.sequences()):
            raise MemoryError("no room")

    engine.runner.fail = fail  # pyright: ignore[reportAttributeAccessIssue]
    summary = run(tmp_path, engine)
    assert (summary.answered, summary.failed) == (2, 1)
    records = {record["custom_id"]: record["response"] for record in read(tmp_path / "out.jsonl")}
    assert records["bad"]["status_code"] == 500
    assert "no room" in records["bad"]["body"]["error"]["message"]


def test_files_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    write(tmp_path / "out.jsonl", "my diary", "page two")
    with pytest.raises(ValueError, match="line 1: expected a line of batch output"):
        run(tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == "my diary\npage two\n"
    with pytest.raises(ValueError, match="different files"):
        run_files(fake_engine(), tmp_path / "in.jsonl", tmp_path / "in.jsonl")


def test_an_input_without_a_last_newline_and_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(line("a")))
    assert run(tmp_path).answered == 1
    (tmp_path / "in.jsonl").write_text("")
    assert run(tmp_path) == Summary()
