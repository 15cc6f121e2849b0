"""The command lines of serve and batch, as far as they go without a model."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(module: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", f"jaxinfer.{module}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("serve", ["--prot=5"], "Unknown command line flag 'prot'"),
        ("serve", ["stray"], "expected flags only, got ['stray']"),
        ("serve", ["--port=70000"], "port: expected 0 to 65535, got 70000"),
        ("serve", ["--port=0", "--api-key="], "api_key: expected a non-empty text"),
        ("serve", ["--port=0", "--memory-fraction=2"], "memory_fraction"),
        ("serve", ["--port=0", "--overrides", "{"], "expected --overrides to be a JSON object"),
        ("serve", ["--port=0", "--model", "no-such-model"], "cannot start: expected a model folder, a bundled model"),
        ("batch", ["--output=x"], "--input"),
        ("batch", ["--input=no-such-file", "--output=x"], "--input: there is no file no-such-file"),
        ("batch", ["--input=README.md", "--output=x", "--max-in-flight=-1"], "max_in_flight"),
    ],
)
def test_wrong_command_lines_are_refused_with_the_reason(module: str, arguments: list[str], words: str) -> None:
    code, text = run(module, *arguments)
    assert code == 1
    assert words in text


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = run("serve", f"--port={port}")
    assert code == 1
    assert text.strip() == (
        f"jaxinfer.serve: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port"
    )


@pytest.mark.parametrize("module", ["serve", "batch", "eval"])
def test_help_shows_the_flags_of_the_engine(module: str) -> None:
    _, text = run(module, "--help")
    assert "  --mesh: devices to use" in text and "  --max_context: most tokens of a request" in text
