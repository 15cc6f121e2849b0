"""Key-value look-ups on token ids: a needle task without words, for models with and without a tokenizer."""

from dataclasses import dataclass

import numpy as np

from jaxinfer.configs.probe import CLUSTERS

VALUE_TOKENS = 4

_HEAD = 8
"""Random tokens before the first pair: the first places of a text have fewer neighbours than the others."""


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """A text of random tokens with key-value pairs in it, and the keys asked for again at its end.

    All but the last key are followed by their value: what a model predicts there, given the right tokens before, is
    what it would answer.  The text ends with the last key.
    """

    ids: list[int]
    values: list[list[int]]
    """The value of each look-up, in the order in which they are asked for."""
    rows: list[list[int]]
    """For all look-ups but the last: the positions whose prediction is a token of the value."""
    depths: list[float]
    """Where in the text each pair stands, 0 to 1."""


def make_lookups(
    rng: np.random.Generator,
    allowed: np.ndarray,
    tokens: int,
    depths: list[float],
    key_tokens: int,
    distractors: float,
) -> Lookups:
    """A text of exactly `tokens` ids from `allowed` (int `[n]`) with a pair at each depth, asked for in random order.

    `distractors` is their number per token of text: places that share all tokens of a key but one, which is replaced
    by another of its cluster (see `configs.probe`).  Every sequence of `key_tokens` tokens before a token of a value
    occurs once in the text.  Raises ValueError if the text is too short.
    """
    pair = key_tokens + VALUE_TOKENS
    room = tokens - len(depths) * pair + VALUE_TOKENS
    if room < _HEAD + 2 * len(depths) * pair:
        raise ValueError(
            f"expected at least {_HEAD + 3 * len(depths) * pair} tokens for {len(depths)} look-ups, got {tokens}"
        )
    text = rng.choice(allowed, room)
    pairs = rng.choice(allowed, (len(depths), pair))
    starts = _starts(depths, room, pair)
    free = np.ones(room, bool)
    free[:_HEAD] = False
    for start, content in zip(starts, pairs, strict=True):
        text[start : start + pair] = content
        free[start : start + pair] = False
    _scatter_distractors(rng, text, free, pairs[:, :key_tokens], allowed, int(distractors * room))
    _make_unique(rng, text, starts, pairs, free, allowed, key_tokens)

    order = rng.permutation(len(depths))
    ids, rows = text.tolist(), []
    for i in order:
        ids.extend(pairs[i, :key_tokens].tolist())
        if len(rows) < len(depths) - 1:
            rows.append(list(range(len(ids) - 1, len(ids) - 1 + VALUE_TOKENS)))
            ids.extend(pairs[i, key_tokens:].tolist())
    values = [pairs[i, key_tokens:].tolist() for i in order]
    return Lookups(ids=ids, values=values, rows=rows, depths=[depths[i] for i in order])


def _starts(depths: list[float], room: int, pair: int) -> list[int]:
    """The place of each pair: at its depth, or behind the one before where they would overlap."""
    starts: dict[int, int] = {}
    last = room - pair
    nearest = _HEAD
    for rank, i in enumerate(np.argsort(depths, kind="stable").tolist()):
        behind = last - (len(depths) - 1 - rank) * pair  # the others still have to fit
        starts[i] = min(max(round(_HEAD + depths[i] * (last - _HEAD)), nearest), behind)
        nearest = starts[i] + pair
    return [starts[i] for i in range(len(depths))]


def _scatter_distractors(rng, text, free, keys, allowed, wanted: int) -> None:
    """Writes keys with one token exchanged for another of its cluster to free places."""
    size = keys.shape[1]
    blocks = np.flatnonzero(free[: len(free) // size * size].reshape(-1, size).all(axis=1))
    places = rng.permutation(blocks)[:wanted] * size
    content = keys[rng.integers(len(keys), size=len(places))]
    exchanged = rng.integers(size, size=len(places))
    each = np.arange(len(places))
    content[each, exchanged] = _other_of_cluster(rng, content[each, exchanged], allowed)
    text[places[:, None] + np.arange(size)] = content


def _other_of_cluster(rng, tokens: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    clusters = [allowed[allowed % CLUSTERS == number] for number in range(CLUSTERS)]
    others = [rng.choice(mates[mates != token]) for token in tokens if len(mates := clusters[token % CLUSTERS]) > 1]
    if len(others) < len(tokens):
        raise ValueError(f"expected at least {2 * CLUSTERS} tokens to choose from, got {len(allowed)}")
    return np.array(others, tokens.dtype)


def _make_unique(rng, text, starts, pairs, free, allowed, size: int) -> None:
    """Draws anew what repeats, by chance, the tokens before a token of a value."""
    base = int(allowed.max()) + 1

    def grams(ids: np.ndarray) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int64), size)
        return windows @ (base ** np.arange(size, dtype=np.int64))

    needed = np.concatenate([grams(content[:-1]) for content in pairs])
    if len(np.unique(needed)) < len(needed):
        raise ValueError(f"expected keys and values without repeated {size}-grams: {len(allowed)} tokens are too few")
    right = np.concatenate([np.arange(start, start + VALUE_TOKENS) for start in starts])
    while True:
        found = np.isin(grams(text), needed)
        found[right] = False
        places = np.flatnonzero(found)
        # Of a repeated sequence at least one token is free: the pairs themselves do not overlap.
        change = [place + i for place in places for i in range(size) if free[place + i]]
        if not change:
            return
        text[change] = rng.choice(allowed, len(change))
