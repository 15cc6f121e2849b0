"""Whether what a prompt hides is out of reach of hybrid attention's window, sinks and anchors: a black hole without
retrieval."""

import functools

import numpy as np

from jaxinfer.configs.attention import Hybrid
from jaxinfer.engine.anchors import Anchors, boundary_codes
from jaxinfer.tokenizer import Tokenizer

BEFORE, AFTER = 48, 16
"""Tokens around a value that hold no anchor: the sentence that names it, and the end of it."""
_GRID = Hybrid()
_STEP, _STEPS = 100, 40
"""How many tokens apart places are tried, and how many."""


def hidden_depths(depth: float, length: int) -> list[float]:
    """Depths to try in a prompt of `length` tokens, neighbouring ones, for the one that is asked for.

    It is scaled so that even depth 1 lies before the window of the question.
    """
    end = max(0.5, 1 - 2 * _GRID.window / length)
    away = -1 if depth > 0.5 else 1
    return [depth * end + away * step * _STEP / length for step in range(_STEPS)]


def is_between_anchors(ids: list[int], text: str, value: str, tokenizer: Tokenizer) -> bool:
    """Whether no anchor of the default grid, at boundaries or evenly spaced, stands beside a value, nor a sink.

    `ids` are the tokens of `text`; the value stands from its first place in the text to its last.
    """
    anchors = np.concatenate([_anchors(ids, tokenizer, boundaries) for boundaries in (True, False)])
    first = len(tokenizer.encode(text[: text.index(value)])) - BEFORE
    last = len(tokenizer.encode(text[: text.rindex(value) + len(value)])) + AFTER
    return first >= _GRID.sinks and not np.any((anchors >= first) & (anchors < last))


def _anchors(ids: list[int], tokenizer: Tokenizer, boundaries: bool) -> np.ndarray:
    found: list[int] = []
    Anchors(_codes(tokenizer), _GRID.anchor_gap, boundaries).extend(found, ids)
    return np.array(found, int)


@functools.lru_cache(maxsize=2)
def _codes(tokenizer: Tokenizer) -> np.ndarray:
    return boundary_codes(tokenizer, tokenizer.vocab_size)
