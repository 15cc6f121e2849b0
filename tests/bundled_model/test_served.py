"""The default model behind the server: a pass key planted in the King James Bible comes back."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from jaxinfer.evaluation.haystack import king_james
from jaxinfer.llm import LLM
from tests.frontends.live import live

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS, ANSWER_SECONDS = 600, 1800
PASS_KEY = "48213"
FACT = f"The pass key is {PASS_KEY}. Remember it. {PASS_KEY} is the pass key. "
QUESTION = "\nWhat is the pass key?"


def document(words: int, depth: float) -> str:
    """Text of about 1.4 tokens a word, with the fact after a sentence near `depth` of it."""
    text = king_james().words[50_000 : 50_000 + words]
    at = next(i for i in range(round(depth * words), words) if text[i].rstrip().endswith("."))
    return "".join([*text[: at + 1], FACT, *text[at + 1 :]])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The default model for some pages of text, served from this process."""
    with LLM(max_context=2048, max_num_seqs=1) as llm, live(llm.engine) as server:
        yield server.url


@pytest.fixture
def started() -> Iterator[str]:
    """`make serve` as it comes, but for the port."""
    command = [sys.executable, "-m", "jaxinfer.serve", "--port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"serving jaxinfer-12m on (http://[\d.:]+)/v1", line)
        assert address, f"expected the address and the default model in {line!r}"
        end = time.monotonic() + READY_SECONDS
        while httpx.get(f"{address[1]}/ready", timeout=60).status_code != 200:
            assert time.monotonic() < end, "not ready in time"
            time.sleep(0.5)
        yield address[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


def _ask(url: str, text: str) -> tuple[str, int]:
    """The streamed answer to a chat turn, greedy, and the tokens of the prompt."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", timeout=ANSWER_SECONDS, max_retries=0) as client:
        stream = client.chat.completions.create(
            model="jaxinfer-12m",
            messages=[{"role": "user", "content": text}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[-1].usage is not None
    answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return answer, chunks[-1].usage.prompt_tokens


@pytest.mark.parametrize("depth", [0.1, 0.6])
def test_pass_key_in_some_pages(url: str, depth: float):
    answer, tokens = _ask(url, document(1060, depth) + QUESTION)
    assert 1_400 < tokens < 1_600
    assert answer == f"The pass key is {PASS_KEY}."


def test_completion_goes_on_after_the_answers_beginning(url: str):
    body = {"model": "jaxinfer-12m", "prompt": document(1060, 0.5) + QUESTION + " The pass key is", "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}, timeout=ANSWER_SECONDS).json()
    assert PASS_KEY in answer["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.timeout(READY_SECONDS + ANSWER_SECONDS)
def test_pass_key_in_twenty_thousand_tokens(started: str):
    answer, tokens = _ask(started, document(14_400, 0.5) + QUESTION)
    assert tokens > 20_000
    assert answer == f"The pass key is {PASS_KEY}."
