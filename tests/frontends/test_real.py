"""The commands with the smallest built-in model, as a user runs them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["--max-context=4096", "--chunk-size=64", "--max-num-seqs=2"]
TEXT = "It was the best of times, it was the worst of times. "


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "jaxinfer.serve", "--model=tiny-random", "--port=0", *SMALL]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("jaxinfer: serving tiny-random on http://127.0.0.1:"), line or process.communicate()[1]
    yield line.rsplit(" ", 1)[1].removesuffix("/v1\n")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors


def test_every_endpoint_answers(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
        body = {"prompt": TEXT * 20, "max_tokens": 3, "stream": True, "logprobs": 2, "echo": True}
        stream = client.post("/v1/completions", json=body).text
        assert ": prefill 64/1061" in stream and stream.endswith("data: [DONE]\n\n")
        assert client.post("/v1/completions", json={"prompt": "x" * 5000}).status_code == 400
        assert client.delete("/v1/requests/none").status_code == 404
        assert "jaxinfer_compilations_after_ready_total 0.0" in client.get("/metrics").text


def test_openais_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        model = client.models.list().data[0].id
        ask = {"model": model, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "seed": 1}
        whole = client.chat.completions.create(**ask)
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        score = {"model": model, "prompt": TEXT, "echo": True, "logprobs": 1}
        one = client.completions.create(**score, max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
        logprobs = one.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 1 + len(TEXT) + 8
        # The same tokens as a prompt have the same scores: prefill and decode agree.
        ids = client.completions.create(**score, max_tokens=8, temperature=0, extra_body={"return_token_ids": True})
        extra = ids.choices[0].model_extra or {}
        again = client.completions.create(
            model=model, prompt=extra["prompt_token_ids"] + extra["token_ids"], echo=True, logprobs=1, max_tokens=0
        )
        scores = again.choices[0].logprobs
        assert scores is not None and scores.token_logprobs is not None
        assert scores.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=2e-4)


def test_batch(tmp_path: Path) -> None:
    body = {"prompt": TEXT, "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"custom_id": str(i)} | line) + "\n" for i in range(4)) + "{broken\n")
    command = [sys.executable, "-m", "jaxinfer.batch", "--input", source, "--output", output, *SMALL]
    for expected in ("4 answered, 1 failed, 0 answered before", "0 answered, 0 failed, 5 answered before"):
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and expected in done.stdout, f"{time.monotonic() - started} s: {done.stderr}"
        assert len(output.read_text().splitlines()) == 5
