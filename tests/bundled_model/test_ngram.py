"""The n-gram baseline: probabilities that add up, and the definition computed naively."""

from collections import Counter

import numpy as np
import pytest

from launch.bundled_model.ngram import NgramModel

VOCABULARY = 7


def _stream(length: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    tokens = [0, 1, 2]
    for _ in range(length - 3):
        tokens.append(int(rng.integers(VOCABULARY - 1)) if rng.random() < 0.3 else (tokens[-1] + tokens[-3]) % 6)
    return np.array(tokens, np.uint16)


@pytest.mark.parametrize("context", [[], [3], [2, 5], [6, 6, 1, 2], [0, 1, 2, 3, 4, 5], [6]])
def test_probabilities_add_up(context: list[int]):
    model = NgramModel(_stream(400), 4, VOCABULARY)
    total = sum(2 ** model.log2_probabilities(np.array([*context, token]))[-1] for token in range(VOCABULARY))
    assert total == pytest.approx(1, abs=1e-6)


def _naive(tokens: list[int], order: int, context: tuple[int, ...], token: int) -> float:
    """Modified Kneser-Ney by its definition."""

    def grams(k: int) -> Counter:
        seen = Counter(tuple(tokens[i : i + k]) for i in range(len(tokens) - k + 1))
        return seen if k == order else Counter(gram[1:] for gram in {tuple(g) for g in _grams(tokens, k + 1)})

    def probability(context: tuple[int, ...]) -> float:
        k = len(context) + 1
        lower = probability(context[1:]) if k > 1 else 1 / VOCABULARY
        counts = grams(k)
        n = [sum(count == c for count in counts.values()) for c in range(5)]
        y = n[1] / max(n[1] + 2 * n[2], 1)
        discount = [0.0] + [float(np.clip(c - (c + 1) * y * n[c + 1] / max(n[c], 1), 0.1, c)) for c in (1, 2, 3)]
        following = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        if not following:
            return lower
        total = sum(following.values())
        kept = following.get(token, 0) - discount[min(following.get(token, 0), 3)]
        return kept / total + sum(discount[min(c, 3)] for c in following.values()) / total * lower

    return probability(context)


def _grams(tokens: list[int], k: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + k]) for i in range(len(tokens) - k + 1)]


def test_is_modified_kneser_ney():
    stream = _stream(3000)
    model = NgramModel(stream, 3, VOCABULARY)
    for context in ((1, 2), (5, 5), (0, 6), (4, 3)):
        for token in range(VOCABULARY):
            ours = 2 ** model.log2_probabilities(np.array([*context, token]))[-1]
            assert ours == pytest.approx(_naive(stream.tolist(), 3, context, token), abs=1e-6)


def test_refuses_streams_that_are_too_short():
    with pytest.raises(ValueError, match="at least 5 tokens, got 3"):
        NgramModel(np.array([1, 2, 3]), 5, VOCABULARY)
