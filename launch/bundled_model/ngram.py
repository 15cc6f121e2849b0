"""An n-gram model over tokens, with modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3), in sorted arrays.

The tokens before a gram's last are its context; a gram of k tokens is known by its rank among all seen grams of k
tokens.  So the key of a longer gram is (rank of its first k tokens, last token), which fits 64 bits at any order.
"""

from typing import NamedTuple

import numpy as np


class _Order(NamedTuple):
    """The grams of k tokens, `n` of them, and their contexts (the grams of k - 1 tokens), `m` of them."""

    keys: np.ndarray
    """int64 `[n]`, ascending: rank of the context times the vocabulary, plus the last token."""
    discounted: np.ndarray
    """float32 `[n]`: count less discount."""
    total: np.ndarray
    """float32 `[m]`: sum of the counts that follow the context."""
    backoff: np.ndarray
    """float32 `[m]`: share of the probability that is left to the order below; 1 where nothing follows."""


class NgramModel:
    """Counts of a stream of tokens, smoothed."""

    def __init__(self, tokens: np.ndarray, order: int, vocabulary: int):
        """`tokens` is an integer array `[T]` below `vocabulary`, `order` the most tokens of a gram.

        Raises ValueError if there are fewer tokens than a gram has.
        """
        if len(tokens) < order:
            raise ValueError(f"expected at least {order} tokens, got {len(tokens)}")
        self.order, self.vocabulary = order, vocabulary
        self._orders: list[_Order] = []
        tables = self._tables(tokens)
        counts = tables[-1][1]
        suffixes = self._suffix_ranks([keys for keys, _ in tables])
        for k in range(order, 0, -1):
            keys = tables[k - 1][0]
            contexts = len(tables[k - 2][0]) if k > 1 else 1
            self._orders.insert(0, _smooth(keys, counts, contexts, vocabulary))
            if k > 1:
                # Below the highest order a gram counts once for every token that it has been seen behind.
                counts = np.bincount(suffixes[k - 1], minlength=len(tables[k - 2][0]))

    def _tables(self, tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and counts of the grams of 1, 2, ... tokens."""
        tables = []
        ranks = np.zeros(len(tokens), np.int64)
        for k in range(1, self.order + 1):
            keys = ranks[: len(tokens) - k + 1] * self.vocabulary + tokens[k - 1 :]
            unique, ranks, counts = np.unique(keys, return_inverse=True, return_counts=True)
            tables.append((unique, counts))
        return tables

    def _suffix_ranks(self, keys: list[np.ndarray]) -> list[np.ndarray]:
        """For the grams of each number of tokens: the rank of the gram without its first token, among the shorter."""
        suffixes = [np.zeros(len(keys[0]), np.int64)]
        for k in range(1, self.order):
            context, last = np.divmod(keys[k], self.vocabulary)
            wanted = suffixes[k - 1][context] * self.vocabulary + last
            suffixes.append(np.searchsorted(keys[k - 1], wanted))  # always there: the end of a gram is a gram
        return suffixes

    def log2_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Binary logarithm of the probability of each token after those before it, float64 `[T]`; all are finite."""
        tokens = tokens.astype(np.int64)
        probability = np.full(len(tokens), 1 / self.vocabulary)
        # ranks[i]: rank of the gram of k - 1 tokens that ends before token i; -1 if it was never seen.
        for k, order in enumerate(self._orders, 1):
            ranks = self._context_ranks(tokens, k - 1)
            known = ranks >= 0
            context = np.where(known, ranks, 0)
            found, at = _find(order.keys, context * self.vocabulary + tokens)
            seen = np.where(found & known, order.discounted[at], 0.0)
            total = np.maximum(order.total[context], 1.0)
            mixed = seen / total + order.backoff[context] * probability
            probability = np.where(known, mixed, probability)
        return np.log2(probability)

    def _context_ranks(self, tokens: np.ndarray, size: int) -> np.ndarray:
        """The rank of the gram of `size` tokens before each token, int64 `[T]`; -1 if it was never seen or is cut."""
        ranks = np.zeros(len(tokens), np.int64)
        ranks[:size] = -1
        for k in range(size):
            earlier = np.concatenate(
                (np.zeros(min(size - k, len(tokens)), np.int64), tokens[: max(len(tokens) - size + k, 0)])
            )
            found, at = _find(self._orders[k].keys, np.maximum(ranks, 0) * self.vocabulary + earlier)
            ranks = np.where(found & (ranks >= 0), at, -1)
        return ranks


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each key is there, and where (anywhere if it is not)."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return keys[at] == wanted, at


def _smooth(keys: np.ndarray, counts: np.ndarray, contexts: int, vocabulary: int) -> _Order:
    """One order: three discounts, for counts of one, two and more, from the numbers of grams with counts 1 to 4."""
    ones, twos, threes, fours = (int((counts == n).sum()) for n in (1, 2, 3, 4))
    y = ones / max(ones + 2 * twos, 1)
    ratios = (twos / max(ones, 1), threes / max(twos, 1), fours / max(threes, 1))
    # Tiny streams give discounts outside of [0, n]; the estimate is only meant for large ones.
    discounts = np.array([0.0, *(np.clip(n - (n + 1) * y * ratio, 0.1, n) for n, ratio in enumerate(ratios, 1))])
    taken = discounts[np.minimum(counts, 3)]
    context = keys // vocabulary
    total = np.bincount(context, weights=counts, minlength=contexts)
    left = np.bincount(context, weights=taken, minlength=contexts)
    backoff = np.where(total > 0, left / np.maximum(total, 1), 1.0)
    return _Order(keys, (counts - taken).astype(np.float32), total.astype(np.float32), backoff.astype(np.float32))
