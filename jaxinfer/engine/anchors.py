"""Anchors: single positions of a text that every later query reads, at the ends of its paragraphs, sentences and lines.

A separator gathers what the text before it says (SepLLM, arXiv 2412.12094), which an arbitrary token does not.
Numpy only.
"""

from collections.abc import Sequence

import numpy as np

from jaxinfer.tokenizer import Tokenizer

_LINE, _SENTENCE, _PARAGRAPH = 1, 2, 3
_RANK = 3
_ENDS_LINE, _BLANK = 4, 8
_STOPS = tuple(".!?…。！？｡؟۔।")
_CLOSERS = "\"'”’»›)]}」』）】"


def boundary_codes(tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """What each token says about ends, uint8 `[vocab_size]`; zeros without a tokenizer.

    The two lowest bits are the rank: 0 nothing, 1 the end of a line, 2 of a sentence, 3 of a paragraph (a blank line
    inside the token).  Bit 2: the token ends a line.  Bit 3: it is white space with a line break.
    """
    codes = np.zeros(vocab_size, np.uint8)
    if tokenizer is not None:
        for token in range(min(vocab_size, tokenizer.vocab_size)):
            if not tokenizer.is_special(token):
                codes[token] = _code(tokenizer.token_bytes(token).decode(errors="ignore"))
    return codes


def _code(text: str) -> int:
    flags = 0
    if text.rstrip(" \t\r").endswith("\n"):
        flags |= _ENDS_LINE
    if "\n" in text and not text.strip():
        flags |= _BLANK
    if text.count("\n") > 1 and "" in (line.strip() for line in text.split("\n")[1:-1]):
        return _PARAGRAPH | flags
    if text.rstrip().rstrip(_CLOSERS).endswith(_STOPS):
        return _SENTENCE | flags
    return (_LINE if "\n" in text else 0) | flags


class Anchors:
    """Finds the anchors of sequences: one in each cell of half a gap, so that no two are further apart than the gap.

    A cell's anchor is its token of the highest rank, the last one of these; a line break after a line's end makes a
    paragraph's end.  With `boundaries=False` there is one at the end of each whole gap.  The cells begin with the
    sequence, and a cell without all its tokens has no anchor yet: what is found never changes.
    """

    def __init__(self, codes: np.ndarray, gap: int, boundaries: bool):
        self._codes, self._boundaries = codes, boundaries
        self.cell = gap // 2 if boundaries else gap
        """Tokens of which one is an anchor."""

    def extend(self, found: list[int], ids: Sequence[int]) -> None:
        """Adds to `found`, the anchors known of a sequence, those of the cells that `ids` has completed since."""
        done, cells = len(found), len(ids) // self.cell
        if cells == done:
            return
        starts = np.arange(done, cells) * self.cell
        if not self._boundaries:
            found.extend((starts + self.cell - 1).tolist())
            return
        first = done * self.cell
        codes = self._codes[np.asarray(ids[max(first - 1, 0) : cells * self.cell])]
        if first == 0:
            codes = np.concatenate((np.zeros(1, np.uint8), codes))
        second_break = (codes[:-1] & _ENDS_LINE > 0) & (codes[1:] & _BLANK > 0)
        ranks = np.where(second_break, _PARAGRAPH, codes[1:] & _RANK).reshape(-1, self.cell)
        last_best = self.cell - 1 - np.argmax(ranks[:, ::-1], axis=1)
        found.extend((starts + last_best).tolist())
