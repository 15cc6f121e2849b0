"""Anchors: where they stand in real text, and that neither steps nor gaps move them apart."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bundled import bundled_folder
from jaxinfer.configs.attention import Hybrid
from jaxinfer.engine.anchors import Anchors, boundary_codes
from jaxinfer.tokenizer import Tokenizer, byte_tokenizer
from tests.selection import slow


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(bundled_folder("jaxinfer-12m"))
    assert loaded is not None
    return loaded


@given(
    ranks=st.lists(st.integers(0, 3), max_size=200),
    gap=st.integers(2, 40),
    boundaries=st.booleans(),
    data=st.data(),
)
def test_any_division_finds_what_the_definition_says(ranks, gap, boundaries, data):
    finder = Anchors(np.arange(4, dtype=np.uint8), gap, boundaries)
    found: list[int] = []
    at = 0
    while at < len(ranks):
        at = min(len(ranks), at + data.draw(st.integers(1, 60)))
        finder.extend(found, ranks[:at])
    assert found == slow.anchors(ranks, gap, boundaries)
    assert all(gap / 2 < b - a <= gap for a, b in itertools.pairwise([-1, *found]))
    assert len(ranks) - (found[-1] if found else -1) <= gap
    assert len(found) <= Hybrid(anchor_gap=gap, anchor_boundaries=boundaries).most_anchors(len(ranks))


def words(tokenizer: Tokenizer, text: str, gap: int) -> list[str]:
    """The text up to each anchor, its last characters."""
    ids = tokenizer.encode(text)
    found: list[int] = []
    Anchors(boundary_codes(tokenizer, tokenizer.vocab_size), gap, True).extend(found, ids)
    return [tokenizer.decode(ids[: at + 1])[-6:] for at in found]


def test_paragraphs_before_sentences_before_lines(tokenizer: Tokenizer):
    sentence = "It was the best of times, said he. "
    assert all(end.rstrip().endswith(".") for end in words(tokenizer, sentence * 40, 64))
    lines = "a line without a stop, which goes on\n"
    assert all(end.endswith("\n") for end in words(tokenizer, lines * 40, 64))
    paragraphs = "One. Two! Three? (Four.)\nFive.\n\nSix. Seven.\n" * 40
    assert all(end.endswith("\n\n") for end in words(tokenizer, paragraphs, 96))


def test_two_line_breaks_in_two_tokens_end_a_paragraph():
    tokenizer = byte_tokenizer()
    text = "ab. cd.\nef\n\ngh. ij. kl\nmnopqrstuvwxy"
    assert words(tokenizer, text, 25) == [".\nef\n\n"]
    finder, ids = Anchors(boundary_codes(tokenizer, 300), 25, True), tokenizer.encode(text)
    for cut in range(len(ids)):  # bos is the first token
        found: list[int] = []
        finder.extend(found, ids[:cut])
        finder.extend(found, ids)
        assert found == [12]


def test_codes():
    tokenizer = byte_tokenizer()
    codes = boundary_codes(tokenizer, 300)
    assert codes[ord(".")] == 2 and codes[ord("a")] == 0 and codes[ord("\n")] == 1 + 4 + 8
    assert not codes[256:].any()
    assert not boundary_codes(None, 50).any()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("。", 2),
        ("?”", 2),
        (".)\n", 2 + 4),
        ("\n", 1 + 4 + 8),
        ("\n    ", 1 + 4 + 8),
        ("\n\n", 3 + 4 + 8),
        ("\r\n\r\n", 3 + 4 + 8),
        ("}\n  \n", 3 + 4),
        ("\nx", 1),
        ("etc", 0),
        ("", 0),
    ],
)
def test_code_of_a_token(text: str, code: int, monkeypatch: pytest.MonkeyPatch):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token: text.encode())
    assert boundary_codes(tokenizer, 1)[0] == code
