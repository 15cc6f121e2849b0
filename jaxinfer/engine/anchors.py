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
    """Finds the anchors of sequences, one after another, further apart than half a gap and never than the gap.

    The next anchor is the token of the highest rank among those that far behind the last one, of equal ones the last,
    as if the first followed one before the sequence; a line break after a line's end makes a paragraph's end.  With
    `boundaries=False` there is one at the end of each whole gap.  An anchor is known when all the tokens are that might
    stand in its place: what is found never changes.
    """

    def __init__(self, codes: np.ndarray, gap: int, boundaries: bool):
        self._codes, self._gap = codes, gap
        self._least = gap // 2 + 1 if boundaries else gap

    def extend(self, found: list[int], ids: Sequence[int]) -> None:
        """Adds to `found`, the anchors known of a sequence, those that `ids` has brought since."""
        last = found[-1] if found else -1
        if last + self._gap >= len(ids):
            return
        # The token behind an anchor is too near to be one.
        first = last + 2
        codes = self._codes[np.asarray(ids[first - 1 :])]
        second_break = (codes[:-1] & _ENDS_LINE > 0) & (codes[1:] & _BLANK > 0)
        ranks = np.where(second_break, _PARAGRAPH, codes[1:] & _RANK)
        while last + self._gap < len(ids):
            eligible = ranks[last + self._least - first : last + self._gap + 1 - first]
            last += self._gap - int(np.argmax(eligible[::-1]))
            found.append(last)
