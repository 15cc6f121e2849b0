"""Generated tasks as token sequences with a mask on the answers: copies and lists of keys.  No jax here.

Every function takes a random generator, the number of tokens wanted and the vocabulary, and returns a `Sample` of
exactly that many tokens, which begins with bos.
"""

from typing import NamedTuple

import numpy as np

from launch.bundled_model.vocabulary import BOS, Ids, Vocabulary
from launch.bundled_model.wordings import LISTS, NOISE

ABSENT_SHARE = 0.05
"""Of the questions about a list: those about a key that is not in it; the answer is "none"."""


class Sample(NamedTuple):
    """One sequence."""

    tokens: np.ndarray
    """uint16 `[n]`."""
    answer: np.ndarray
    """uint16 `[n]`: 0 where a token is not scored, else the number (from 1) of the answer it belongs to."""
    cuts: np.ndarray
    """int `[m]`: places where positions may skip without going through anything that has to be found."""


class Draft:
    """A sample being written."""

    def __init__(self, tokens: int):
        self.wanted = tokens
        self.tokens: list[int] = [BOS]
        self.answer: list[int] = [0]
        self.cuts: list[int] = []
        self.answers = 0

    @property
    def room(self) -> int:
        return self.wanted - len(self.tokens)

    def add(self, ids: Ids | list[int]):
        """Tokens that are not scored."""
        self.tokens.extend(ids)
        self.answer.extend([0] * len(ids))

    def add_answer(self, ids: Ids | list[int]):
        """Tokens that are scored, as one answer."""
        self.answers += 1
        self.tokens.extend(ids)
        self.answer.extend([self.answers] * len(ids))

    def cut(self):
        self.cuts.append(len(self.tokens))

    def finish(self, filler: np.ndarray | None = None) -> Sample:
        """The sample; missing tokens are taken from `filler`, and an answer that was cut off is not scored."""
        if self.room > 0:
            if filler is None or len(filler) < self.room:
                raise ValueError(f"expected {self.room} more tokens to fill the sample")
            self.cut()
            # A place that depends on the sample, so that not all end with the same text.
            start = sum(self.tokens) % (len(filler) - self.room + 1)
            self.add(filler[start : start + self.room].tolist())
        answer = np.array(self.answer, np.uint16)
        if len(answer) > self.wanted and answer[self.wanted] == answer[self.wanted - 1]:
            answer[answer == answer[self.wanted - 1]] = 0
        cuts = np.array([cut for cut in self.cuts if 0 < cut < self.wanted], np.int64)
        return Sample(np.array(self.tokens[: self.wanted], np.uint16), answer[: self.wanted], cuts)


def repeat_copy(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Spans of 32 to 512 tokens, random or natural, then the same spans again in another order.

    The first two tokens of a repeated span cannot be known and are not scored.
    """
    draft = Draft(tokens)
    separator = vocabulary.ids("\n")
    while draft.room > 200:
        longest = min(512, draft.room // 3)
        budget = int(np.exp(rng.uniform(np.log(longest), np.log(max(draft.room // 2, longest + 1)))))
        spans: list[list[int]] = []
        while budget > 0:
            size = min(int(np.exp(rng.uniform(np.log(32), np.log(longest)))), max(budget, 32))
            if rng.random() < 0.7:
                spans.append(rng.choice(vocabulary.ordinary, size).tolist())
            else:
                start = rng.integers(len(text) - size)
                spans.append(text[start : start + size].tolist())
            budget -= size + 1
        for span in spans:
            draft.cut()
            draft.add(separator)
            draft.add(span)
        for i in rng.permutation(len(spans)):
            draft.cut()
            draft.add(separator)
            draft.add(spans[i][:2])
            draft.add_answer(spans[i][2:])
    return draft.finish(text)


def key_values(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Lists of keys and values, and keys again whose values are asked for, between the pairs and after them."""
    draft = Draft(tokens)
    while draft.room > 300:
        before, between, after = (vocabulary.ids(part) for part in LISTS[rng.integers(len(LISTS))])
        key_tokens = int(rng.integers(1, 4))
        digits = int(rng.integers(5, 8))
        per_pair = len(before) + len(between) + len(after) + key_tokens + digits + 1
        room = draft.room // per_pair
        pairs = int(np.exp(rng.uniform(np.log(8), np.log(max(room * 0.8, 9)))))
        queries = int(min(room - pairs, max(16, min(128, pairs))))
        keys = _keys(rng, pairs + 1, key_tokens, vocabulary)
        values = _values(rng, pairs, digits, vocabulary)
        pairs = min(pairs, len(keys) - 1)
        absent = keys[pairs]
        question = rng.random() < 0.5
        # When each query comes: half of them some pairs after theirs (log-uniform), the others behind the list.
        targets = rng.permutation(pairs)[:queries] if queries <= pairs else rng.integers(0, pairs, queries)
        distance = np.exp(rng.uniform(0, np.log(pairs + 1), len(targets))).astype(int)
        times = np.where(rng.random(len(targets)) < 0.5, targets + distance, pairs)
        by_time: dict[int, list[int]] = {}
        for target, time in zip(targets.tolist(), np.minimum(times, pairs).tolist(), strict=True):
            by_time.setdefault(time, []).append(target)
        draft.cut()
        draft.add(vocabulary.ids("\n\n"))
        for pair in range(pairs):
            for target in by_time.get(pair, ()):
                _ask_value(draft, vocabulary, before, between, after, keys[target], values[target], question)
            draft.cut()
            draft.add([*before, *keys[pair], *between, *values[pair], *after])
        last = by_time.get(pairs, [])
        for i in rng.permutation(len(last)):
            target = last[i]
            draft.cut()
            if question and rng.random() < ABSENT_SHARE:
                _ask_value(draft, vocabulary, before, between, after, absent, vocabulary.ids(" none"), question)
            _ask_value(draft, vocabulary, before, between, after, keys[target], values[target], question)
    return draft.finish(text)


def _ask_value(draft, vocabulary, before, between, after, key, value, question: bool):
    if question:
        draft.add([*vocabulary.ids("What is the value of"), *vocabulary.ids(' "'), *key, *vocabulary.ids('"?')])
        draft.add_answer([*value, *vocabulary.ids("\n")])
    else:
        draft.add([*before, *key, *between])
        draft.add_answer([*value, after[0]])
        draft.add(after[1:])


def _keys(rng: np.random.Generator, count: int, size: int, vocabulary: Vocabulary) -> list[list[int]]:
    """Different keys of `size` tokens; half of the lists share few beginnings, so that one token does not decide."""
    first = rng.choice(vocabulary.starts, (2 * count, 1))
    rest = rng.choice(vocabulary.spaced, (2 * count, size - 1))
    if size > 1 and rng.random() < 0.5:
        shared = int(rng.integers(1, max(count // 8, 2)))
        group = rng.integers(0, shared, 2 * count)
        first = first[:shared][group]
        rest[:, : size - 2] = rest[:shared, : size - 2][group]
    found = dict.fromkeys(map(tuple, np.concatenate((first, rest), axis=1).tolist()))
    return [list(key) for key in list(found)[:count]]


def _values(rng: np.random.Generator, count: int, digits: int, vocabulary: Vocabulary) -> list[list[int]]:
    space = vocabulary.ids(" ")[0]
    numbers = np.array([vocabulary.ids(str(digit))[0] for digit in range(10)])
    if rng.random() < 0.2:
        return rng.choice(vocabulary.spaced, (count, 2)).tolist()
    drawn = numbers[rng.integers(0, 10, (count, digits))]
    drawn[:, 0] = numbers[rng.integers(1, 10, count)]
    return np.concatenate((np.full((count, 1), space), drawn), axis=1).tolist()


def haystack(
    rng: np.random.Generator, size: int, vocabulary: Vocabulary, text: np.ndarray, noise_share: float
) -> np.ndarray:
    """`size` tokens to hide facts in, uint16: natural text or, in `noise_share` of cases, the repeated sentences."""
    if rng.random() < noise_share:
        noise = np.array(vocabulary.ids(NOISE), np.uint16)
        return np.tile(noise, -(-size // len(noise)))[:size]
    start = rng.integers(len(text) - size)
    hay = text[start : start + size].copy()
    hay[hay < 7] = vocabulary.ids("\n")[0]  # borders of documents
    return hay


def sentence_end(place: float, ends: np.ndarray, size: int) -> int:
    """The next end of a sentence behind a place, of those in `ends`."""
    if place >= size:
        return size
    at = int(np.searchsorted(ends, place))
    return int(ends[at]) if at < len(ends) else size
