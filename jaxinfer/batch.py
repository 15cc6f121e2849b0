"""`python -m jaxinfer.batch --input F --output F`: answers a file of requests in OpenAI's Batch format, resumably.

Every input line is `{"custom_id", "method": "POST", "url", "body"}`; `url` is /v1/completions or /v1/chat/completions.
Every line gives one output line, in the order in which the answers are ready. A request that is refused has its 4xx in
`response`; a line that is no request has `error`, with the number of the line. Lines that the output files answer
already are skipped, whatever the answer was: to have a failed one tried again, delete its line.
"""

import contextlib
import json
import queue
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from absl import app, flags
from tqdm import tqdm

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, RequestOutput, Update
from jaxinfer.flags import define_engine_flags, engine_options_from_flags, parse_flags
from jaxinfer.protocol import ENDPOINTS, ApiError, Call, Prompt, load_json, parse_call
from jaxinfer.protocol.call import Answer
from jaxinfer.resume import whole_lines

FLAGS = flags.FLAGS


class LineError(Exception):
    """An input line that is no request. `code` is a stable name of the reason."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True)
class Done:
    """What earlier runs have answered: requests by their custom_id, and by their numbers lines that are no requests."""

    custom_ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


@dataclass
class Summary:
    """Counts of one run."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


def read_done(path: Path) -> Done:
    """Reads an output file of an earlier run, and cuts off a last line that was not written to its end.

    Raises ValueError if another line is no output line: the file may be something else, and is left alone.
    """
    done = Done()
    if path.exists():
        for number, line in whole_lines(path):
            _note_done(done, line, f"{path}, line {number}")
    return done


def _note_done(done: Done, line: bytes, where: str) -> None:
    try:
        record = json.loads(line)
        custom_id, error = record["custom_id"], record["error"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"{where}: expected a line of batch output, got {line[:60]!r}; will not append to it"
        ) from None
    if error is not None and "line" in error:
        done.lines.add(error["line"])
    else:
        done.custom_ids.add(custom_id)


@dataclass(frozen=True, kw_only=True)
class Line:
    """An input line that is a request, with its body still unchecked."""

    custom_id: str
    url: str
    body: object


def parse_line(data: bytes) -> Line:
    """Reads an input line. Raises LineError."""
    try:
        record = load_json(data)
    except ApiError as error:
        raise LineError("invalid_json", error.message.replace("the body", "the line")) from None
    if not isinstance(record, dict):
        raise LineError("invalid_line", "expected a JSON object")
    custom_id = record.pop("custom_id", None)
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(
            "invalid_custom_id", f"custom_id: expected a non-empty string, got {json.dumps(custom_id)[:60]}"
        )
    method, url, body = record.pop("method", None), record.pop("url", None), record.pop("body", None)
    if method != "POST":
        raise LineError("invalid_method", f'method: expected "POST", got {json.dumps(method)[:60]}', custom_id)
    if url not in ENDPOINTS:
        raise LineError(
            "invalid_url", f"url: expected one of {', '.join(ENDPOINTS)}, got {json.dumps(url)[:60]}", custom_id
        )
    if record:
        raise LineError("unknown_field", f"unknown fields: {', '.join(sorted(record))}", custom_id)
    return Line(custom_id=custom_id, url=url, body=body)


class _Pending:
    """A request that is with the engine."""

    def __init__(self, line: Line, call: Call, prompts: list[Prompt], model: str) -> None:
        self.line = line
        self.call = call
        self.prompts = prompts
        self.answer = Answer(name=uuid.uuid4().hex, model=model)
        self.requests: list[Request] = call.requests(self.answer.name, prompts)
        self._accumulators = [Accumulator(request) for request in self.requests]
        self._unfinished = len(self.requests)

    @property
    def tokens(self) -> int:
        """Prompt tokens."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The answers, by prompt."""
        return [accumulator.output for accumulator in self._accumulators]

    def add(self, prompt: int, update: Update) -> bool:
        """Takes an update; True when it was the last one."""
        self._accumulators[prompt].add(update)
        self._unfinished -= update.request_finished
        return not self._unfinished

    def result(self) -> tuple[int, dict[str, object]]:
        """Status and body of the answer. Raises RuntimeError if the engine gave up: that is no answer to keep."""
        errors = [output.error for output in self.outputs if output.error is not None]
        if any(completion.finish_reason == "abort" for output in self.outputs for completion in output.outputs):
            raise RuntimeError("the engine's thread has ended; the same command goes on where this one stopped")
        if errors:
            return 500, ApiError(500, f"the engine failed on this request: {errors[0]}", code="engine_error").body()
        return 200, self.call.response(self.answer, self.prompts, self.outputs)


class Batch:
    """One run over an input file.

    Reading and tokenising happen in the calling thread while the engine computes in its own. At most `max_in_flight`
    requests are with the engine, and no more prompt tokens than twice what its cache holds: that keeps it busy, and the
    memory bounded however long the file is.
    """

    def __init__(self, engine: Engine, write: Callable[[dict[str, object]], None], max_in_flight: int) -> None:
        """`write` takes the output lines."""
        capacity = engine.capacity
        self.summary = Summary()
        self._engine = engine
        self._write = write
        self._max_in_flight = max_in_flight
        self._max_tokens = 2 * capacity.replicas * capacity.pool_tokens
        self._loop = EngineLoop(engine)
        self._events: queue.SimpleQueue[tuple[_Pending, int, Update]] = queue.SimpleQueue()
        self._pending: set[_Pending] = set()
        self._bar: Any = None

    def run(self, lines: Iterator[bytes], total: int, done: Done) -> Summary:
        """Processes all lines; `total` is their number, for the progress bar."""
        seen: set[str] = set()
        self._loop.start()
        try:
            with tqdm(total=total, desc="requests", dynamic_ncols=True) as self._bar:
                for number, data in enumerate(lines, start=1):
                    if data.strip():
                        self._take(number, data, seen, done)
                    else:
                        self._bar.update()
                    while self._full():
                        self._wait()
                while self._pending:
                    self._wait()
        finally:
            # After an interrupt this ends the running requests too; they have no line, so the next run does them.
            self._loop.stop()
        return self.summary

    def _full(self) -> bool:
        waiting = sum(pending.tokens for pending in self._pending)
        return len(self._pending) >= self._max_in_flight or waiting >= self._max_tokens

    def _take(self, number: int, data: bytes, seen: set[str], done: Done) -> None:
        """Starts the request of a line, or writes why it cannot be."""
        if number in done.lines:
            self._skip()
            return
        try:
            line = parse_line(data)
            if line.custom_id in seen:
                raise LineError("duplicate_custom_id", "custom_id: an earlier line has the same", line.custom_id)
        except LineError as error:
            record = {"code": error.code, "message": f"line {number}: {error}", "line": number}
            self._finish(error.custom_id, None, record)
            return
        seen.add(line.custom_id)
        if line.custom_id in done.custom_ids:
            self._skip()
            return
        try:
            self._start(line)
        except ApiError as error:
            self._finish(line.custom_id, _response(error.status, uuid.uuid4().hex, error.body()), None)

    def _start(self, line: Line) -> None:
        """Gives a request to the engine. Raises ApiError."""
        call = parse_call(line.url, line.body)
        if call.stream:
            raise ApiError(400, "stream: a batch has no streams", param="stream")
        if call.model is not None and call.model != self._engine.model_name:
            message = f"model: expected {self._engine.model_name!r}, the model that runs, got {call.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        pending = _Pending(line, call, call.encode(self._engine.tokenizer), self._engine.model_name)
        submitted: list[Request] = []
        try:
            for prompt, request in enumerate(pending.requests):
                self._loop.submit(request, partial(self._put, pending, prompt))
                submitted.append(request)
        except ValueError as error:
            for request in submitted:
                self._loop.abort(request.id)
            raise ApiError(400, str(error)) from None
        self._pending.add(pending)

    def _put(self, pending: _Pending, prompt: int, update: Update) -> None:
        self._events.put((pending, prompt, update))

    def _wait(self) -> None:
        """Takes one update from the engine, and writes the answer that it ends."""
        pending, prompt, update = self._events.get()
        if update.prefill is not None:
            self._bar.set_postfix_str(f"prefill {update.prefill[0]}/{update.prefill[1]}")
        if pending in self._pending and pending.add(prompt, update):
            self._pending.remove(pending)
            status, body = pending.result()
            for output in pending.outputs:
                self.summary.prompt_tokens += len(output.prompt_token_ids)
                self.summary.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            self._finish(pending.line.custom_id, _response(status, pending.answer.name, body), None)

    def _skip(self) -> None:
        self.summary.skipped += 1
        self._bar.update()

    def _finish(
        self, custom_id: str | None, response: dict[str, object] | None, error: dict[str, object] | None
    ) -> None:
        good = response is not None and response["status_code"] == 200
        self.summary.answered += good
        self.summary.failed += not good
        self._write(
            {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
        )
        self._bar.update()


def _response(status: int, name: str, body: dict[str, object]) -> dict[str, object]:
    return {"status_code": status, "request_id": name, "body": body}


def run_files(
    engine: Engine, source: Path, output: Path, errors: Path | None = None, max_in_flight: int = 0
) -> Summary:
    """Answers the requests of file `source` in file `output` (failed ones in `errors`, if given).

    `max_in_flight` 0 stands for twice the sequences that the engine decodes at once. Raises ValueError if two of the
    files are one, or an existing output file is not one.
    """
    paths = [source, output] + ([errors] if errors is not None else [])
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"expected different files for input, output and errors, got {', '.join(map(str, paths))}")
    done = read_done(output)
    if errors is not None:
        failed = read_done(errors)
        done = Done(done.custom_ids | failed.custom_ids, done.lines | failed.lines)
    total = sum(1 for _ in _lines(source))
    in_flight = max_in_flight or 2 * engine.capacity.replicas * engine.capacity.max_num_seqs
    with contextlib.ExitStack() as stack:
        output_file = stack.enter_context(output.open("ab"))
        errors_file = output_file if errors is None else stack.enter_context(errors.open("ab"))

        def write(record: dict[str, Any]) -> None:
            good = record["response"] is not None and record["response"]["status_code"] == 200
            file = output_file if good else errors_file
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            file.flush()

        return Batch(engine, write, in_flight).run(_lines(source), total, done)


def _lines(path: Path) -> Iterator[bytes]:
    file: BinaryIO
    with path.open("rb") as file:
        yield from file


def _define_flags() -> None:
    define_engine_flags()
    flags.DEFINE_string("input", None, "File of requests: OpenAI Batch JSONL.", required=True)
    flags.DEFINE_string(
        "output", None, "File of answers; lines are appended, and what it answers is skipped.", required=True
    )
    flags.DEFINE_string("errors", None, "File for failed requests. Default: they go to --output too.")
    flags.DEFINE_integer(
        "max_in_flight",
        0,
        "Most requests in the engine at once. 0: twice the sequences it decodes at once.",
        lower_bound=0,
    )


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0 when every line has been processed, 130 after an interrupt."""
    from jaxinfer.build import build_engine  # starts JAX: not for --help

    if len(arguments) > 1:
        raise app.UsageError(f"expected flags only, got {arguments[1:]}")
    source = Path(FLAGS.input)
    if not source.is_file():
        raise app.UsageError(f"--input: there is no file {source}")
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    errors = Path(FLAGS.errors) if FLAGS.errors else None
    try:
        engine = build_engine(engine_options_from_flags())
        summary = run_files(engine, source, Path(FLAGS.output), errors, FLAGS.max_in_flight)
    except KeyboardInterrupt:
        print("jaxinfer.batch: interrupted; the same command goes on where this one stopped")
        return 130
    except (ValueError, OSError) as error:
        print(f"jaxinfer.batch: {error}")
        return 1
    print(
        f"jaxinfer.batch: {summary.answered} answered, {summary.failed} failed, {summary.skipped} answered before; "
        f"{summary.prompt_tokens} prompt tokens, {summary.output_tokens} generated, {time.monotonic() - started:.1f} s"
    )
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=parse_flags)
