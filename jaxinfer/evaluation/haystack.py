"""Text to hide things in, words to name them with, and how much of it makes a prompt of a wanted length."""

import functools
import hashlib
import json
import lzma
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The haystack of the passkey task (arXiv 2305.16300), repeated."""


class Haystack:
    """A text as words, each with the space behind it; it begins anew after its end."""

    def __init__(self, text: str):
        self.words = re.findall(r"\S+\s+", text.rstrip() + "\n")
        if not self.words:
            raise ValueError("expected a text with words in it, got none")
        ends = [i + 1 for i, word in enumerate(self.words) if word.rstrip().endswith((".", "?", "!"))]
        self._ends = np.array(ends or [len(self.words)])
        """Numbers of words after which a sentence is complete."""

    def with_sentences(self, start: int, count: int, places: Sequence[float], sentences: Sequence[str]) -> str:
        """`count` words from word `start` on, with each sentence put in after the sentence nearest to its place.

        A place is a share of the words, 0 to 1. Sentences that meet keep their order.
        """
        cuts = [self._border(start, count, place) for place in places]
        pieces, at = [], 0
        for i in sorted(range(len(cuts)), key=lambda i: cuts[i]):
            pieces += [self._slice(start + at, cuts[i] - at), sentences[i], " "]
            at = cuts[i]
        return "".join([*pieces, self._slice(start + at, count - at)]).strip()

    def _border(self, start: int, count: int, place: float) -> int:
        """The end of a sentence, in words from `start`, that is nearest to a place among `count` words."""
        wanted = round(place * count)
        period = len(self.words)
        turn, within = divmod(start + wanted, period)
        nearest = int(np.searchsorted(self._ends, within))
        around = [self._ends[nearest - 1] - (period if nearest == 0 else 0)]
        around.append(self._ends[nearest % len(self._ends)] + (period if nearest == len(self._ends) else 0))
        borders = [0, count, *(int(end) + turn * period - start for end in around)]
        return min((b for b in borders if 0 <= b <= count), key=lambda b: abs(b - wanted))

    def _slice(self, start: int, count: int) -> str:
        period = len(self.words)
        start %= period
        turns, stop = divmod(start + count, period)
        if turns == 0:
            return "".join(self.words[start:stop])
        return "".join(self.words[start:]) + "".join(self.words) * (turns - 1) + "".join(self.words[:stop])


@functools.cache
def king_james() -> Haystack:
    """The King James Version (1769; public domain), a paragraph a chapter."""
    packed = resources.files("jaxinfer.evaluation").joinpath("data/kjv.txt.xz").read_bytes()
    text = lzma.decompress(packed).decode()
    return Haystack(re.sub(r"(?<!\n)\n(?!\n)", " ", text).replace("\n\n", "\n"))


def from_file(path: Path) -> Haystack:
    """A text of the user's own.  Raises ValueError if it holds no words, OSError if it cannot be read."""
    return Haystack(path.read_text(encoding="utf-8"))


@functools.cache
def noise() -> Haystack:
    """The repeated sentences about grass and sky."""
    return Haystack(NOISE)


class Words:
    """Adjectives and nouns from WordNet 3.0.

    Names are made from a fifth of them, chosen by a hash: the training of the bundled model, which splits words by the
    same rule, has never seen these in a key.
    """

    def __init__(self) -> None:
        lists = json.loads(resources.files("jaxinfer.evaluation").joinpath("data/words.json").read_text())
        self.all: list[str] = sorted({*lists["adjectives"], *lists["nouns"]})
        self._adjectives = [word for word in lists["adjectives"] if is_held_out(word)]
        self._nouns = [word for word in lists["nouns"] if is_held_out(word)]

    def names(self, rng: np.random.Generator, count: int) -> list[str]:
        """Different names "adjective-noun".  Raises ValueError if there are not as many."""
        pairs = len(self._adjectives) * len(self._nouns)
        if count > pairs:
            raise ValueError(f"expected at most {pairs} names, got {count}")
        chosen = rng.choice(pairs, count, replace=False).tolist()
        nouns = len(self._nouns)
        return [f"{self._adjectives[pair // nouns]}-{self._nouns[pair % nouns]}" for pair in chosen]


def is_held_out(word: str) -> bool:
    """Whether a word is among the fifth that names in the evaluation are made from."""
    return hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 5 == 0


@functools.cache
def words() -> Words:
    """The bundled word lists."""
    return Words()


def fit[T](make: Callable[[int], T], tokens: Callable[[T], int], budget: int) -> T:
    """The largest of `make(0)`, `make(1)`, ... that is not above `budget` tokens.

    A secant search: sizes are added at the rate of tokens that the last step had. `make` must grow with its argument.
    Raises ValueError if `make(0)` is too large already.
    """
    best, size = make(0), 0
    used = tokens(best)
    if used > budget:
        raise ValueError(f"expected a length of at least {used} tokens for this task, got {budget}")
    limit: int | None = None
    rate = 4.0
    while limit is None or size + 1 < limit:
        more = max(1, int((budget - used) / rate))
        if limit is not None:
            more = min(more, limit - 1 - size)
        longer = make(size + more)
        needed = tokens(longer)
        rate = max((needed - used) / more, 0.25)
        if needed <= budget:
            best, size, used = longer, size + more, needed
        else:
            limit = size + more
    return best
