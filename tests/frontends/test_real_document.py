"""A whole book as one prompt, served on eight ranks, while short requests come and go."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from jaxinfer.evaluation.haystack import king_james

ROOT = Path(__file__).resolve().parents[2]
BYTES = 200_100  # of the King James Bible; the byte-level tokenizer makes as many tokens of it
READY_SECONDS, ANSWER_SECONDS = 600, 3600


def metric(base: str, name: str) -> float:
    found = re.search(rf"^{name}(?:_total)? ([\d.e+]+)$", httpx.get(f"{base}/metrics", timeout=60).text, re.MULTILINE)
    assert found, f"expected {name} in /metrics"
    return float(found[1])


@pytest.fixture
def server():
    command = [
        sys.executable,
        "-m",
        "jaxinfer.serve",
        "--model=tiny-random",
        "--port=0",
        "--mesh=cp=8",
        "--max_num_seqs=4",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://[\d.]+:\d+", line)
    assert address, f"expected the address in {line!r}"
    for _ in range(READY_SECONDS):
        if httpx.get(f"{address[0]}/ready", timeout=60).status_code == 200:
            break
        time.sleep(1)
    yield address[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(READY_SECONDS + ANSWER_SECONDS)
def test_a_book_while_short_requests_come(server: str):
    book = "".join(king_james().words).encode()[:BYTES].decode("utf-8", "ignore")
    assert len(book.encode()) > 200_000
    progress: list[tuple[float, int, int]] = []
    answer: list[dict] = []
    failure: list[BaseException] = []

    def read_the_book() -> None:
        try:
            body = {"model": "tiny-random", "prompt": book, "max_tokens": 8, "temperature": 0, "stream": True}
            body["ignore_eos"] = True
            with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=ANSWER_SECONDS) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if found := re.match(r": prefill (\d+)/(\d+)", line):
                        progress.append((time.monotonic(), int(found[1]), int(found[2])))
                    elif line.startswith("data: {"):
                        answer.append(json.loads(line.removeprefix("data: ")))
        except BaseException as error:
            failure.append(error)

    reader = threading.Thread(target=read_the_book)
    reader.start()
    while not progress and reader.is_alive():
        time.sleep(0.2)
    steps: list[tuple[float, float, float]] = []
    while reader.is_alive():
        # The step under way when the request comes does not know it; its first token is the next one's.
        sent, before = time.monotonic(), metric(server, "jaxinfer_steps")
        body = {"model": "tiny-random", "prompt": f"Short request {len(steps)}", "max_tokens": 1, "temperature": 0}
        response = httpx.post(f"{server}/v1/completions", json=body, timeout=600)
        after = metric(server, "jaxinfer_steps")
        assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 1
        steps.append((sent, time.monotonic(), after - before))
        time.sleep(3)
    reader.join()
    assert not failure
    total = progress[-1][2]
    assert total > 200_000 and len(progress) >= total // (8 * 256) and progress[-1][1] <= total
    assert [done for _, done, _ in progress] == sorted({done for _, done, _ in progress})
    assert sum(len(chunk["choices"]) for chunk in answer) >= 1 and answer[-1]["choices"][0]["finish_reason"] == "length"
    # Those that were answered while the book was being read; later steps decode, and are short.
    during = [(sent, taken) for sent, answered, taken in steps if answered < progress[-1][0]]
    assert len(during) >= 5
    for sent, taken in during:
        # A step may end between the reading of the counter and the arrival of the request: then one more is counted.
        ended_meanwhile = any(abs(ended - sent) < 0.5 for ended, _, _ in progress)
        assert taken <= 2 + ended_meanwhile, f"{taken} steps to the first token of a request sent at {sent}: {progress}"
    assert metric(server, "jaxinfer_compilations_after_ready") == 0
