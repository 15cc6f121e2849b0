"""The selection again, slow and obvious: loops over Python numbers, float64."""

import math

import numpy as np


def window_start(position: int, window: int, block: int, query_block: int, dense_below: int) -> int:
    start = position - position % query_block
    if start < dense_below:
        return 0
    first = max(start - window, 0)
    while first % block:
        first -= 1
    return first


def group_means(latents: np.ndarray, group: int) -> np.ndarray:
    rows = [latents[i : i + group].astype(np.float64).mean(axis=0) for i in range(0, len(latents), group)]
    return np.array(rows)


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest number that e4m3 holds, of two the one that is even."""
    bits = np.arange(127)
    exponent, mantissa = bits // 8, bits % 8
    held = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))

    def nearest(value: float) -> float:
        return min(zip(held, bits, strict=True), key=lambda pair: (abs(abs(value) - pair[0]), pair[1] % 2))[0]

    x = np.asarray(x, np.float64)
    return np.copysign([nearest(value) for value in x.reshape(-1)], x.reshape(-1)).reshape(x.shape)


def rounded_queries(q: np.ndarray) -> np.ndarray:
    """Queries `[..., d]`, each rounded to e4m3 times the power of two that makes its largest number 14 to 28."""
    rows = []
    for row in q.reshape(-1, q.shape[-1]):
        scale = 2.0 ** math.ceil(math.log2(np.abs(row).max() / 28))
        rows.append(e4m3(row / scale) * scale)
    return np.reshape(rows, q.shape)


def probe_rows(valid: int, count: int) -> list[int]:
    """The last row of each of `count` equal parts of the first `valid` rows."""
    return [max(math.floor(valid * part / count) - 1, 0) for part in range(1, count + 1)]


def log_sum_exp(values: list[float]) -> float:
    values = [value for value in values if value != -math.inf]
    if not values:
        return -math.inf
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def shares(q, index, local_lse, first: int, end: int, group: int, block: int, scale: float) -> np.ndarray:
    per_block = block // group
    num_blocks = len(index) // per_block
    out = np.zeros((*q.shape[:2], num_blocks))
    for p in range(q.shape[0]):
        for v in range(q.shape[1]):
            best = {
                b: max(scale * float(q[p, v] @ index[b * per_block + i]) + math.log(group) for i in range(per_block))
                for b in range(first, end)
            }
            total = log_sum_exp([float(local_lse[p, v]), *best.values()])
            for b in range(first, end):
                out[p, v, b] = math.exp(best[b] - total)
    return out


def candidate_blocks(shares: np.ndarray, first: int, end: int, count: int) -> list[int]:
    """The best of each voter (all of equal ones), then those with the largest sum of shares."""
    votes = shares.max(axis=0)
    best = [sum(vote[b] == max(vote) and vote[b] > 0 for vote in votes) for b in range(votes.shape[1])]
    return sorted(sorted(range(first, end), key=lambda b: (-best[b], -votes[:, b].sum(), b))[:count])


def by_turns(votes: np.ndarray, first: int, end: int, count: int) -> list[int]:
    """Every voter's best, then every voter's second, and so on; within a turn those with the largest sum."""
    taken: list[int] = []
    for turn in range(end - first):
        choices = {sorted(range(first, end), key=lambda b: (-vote[b], b))[turn] for vote in votes}
        taken += sorted(choices - set(taken), key=lambda b: (-votes[:, b].sum(), b))
    return sorted(taken[:count])


def masses(q, context, blocks: list[int], free, local_lse, block: int, scale: float) -> list[float]:
    found = np.zeros((*q.shape[:2], len(blocks)))
    for p in range(q.shape[0]):
        for v in range(q.shape[1]):
            per_block = [
                log_sum_exp([scale * float(q[p, v] @ context[t]) for t in range(b * block, (b + 1) * block) if free[t]])
                for b in blocks
            ]
            total = log_sum_exp([float(local_lse[p, v]), *per_block])
            found[p, v] = [0.0 if value == -math.inf else math.exp(value - total) for value in per_block]
    return list(found.max(axis=0).mean(axis=0))


def retrieved_blocks(masses, candidates, hot, least: int, most: int, mass: float | None) -> list[int]:
    free = sorted(
        ((value, block) for value, block in zip(masses, candidates, strict=True) if block >= 0 and block not in hot),
        key=lambda pair: (-pair[0], pair[1]),
    )
    total, kept, sum_so_far = sum(value for value, _ in free), [], 0.0
    for value, block in free:
        if len(kept) == most or (mass is not None and len(kept) >= least and sum_so_far >= mass * total):
            break
        kept.append(block)
        sum_so_far += value
    return sorted(kept)


def record(masses: np.ndarray, candidates: np.ndarray, count: int) -> list[tuple[int, int]]:
    amounts: dict[int, int] = {}
    for mass, block in zip(masses.ravel(), candidates.ravel(), strict=True):
        if block >= 0:
            amounts[int(block)] = amounts.get(int(block), 0) + int(np.round(np.float32(mass) * 2**14))
    ordered = sorted(((block, amount) for block, amount in amounts.items() if amount), key=lambda p: (-p[1], p[0]))
    return ordered[:count]


def hot_blocks(records: dict[int, list[tuple[int, int]]], epoch: int, first: int, end: int, count: int) -> list[int]:
    """`records` holds for each epoch what all its query blocks left."""
    weights: dict[int, int] = {}
    for age in (1, 2, 3, 4):
        sums: dict[int, int] = {}
        for block, amount in records.get(epoch - age, []):
            sums[block] = sums.get(block, 0) + amount
        for block, amount in sums.items():
            weights[block] = weights.get(block, 0) + amount // 2 ** (age - 1)
    hot = [block for block, weight in weights.items() if weight and first <= block < end]
    return sorted(sorted(hot, key=lambda b: (-weights[b], b))[:count])


def anchors(ranks: list[int], gap: int, boundaries: bool) -> list[int]:
    """The best rank that is more than half a gap and at most a gap behind the last anchor, the latest of equal ones."""
    if not boundaries:
        return list(range(gap - 1, len(ranks), gap))
    found, last = [], -1
    while last + gap < len(ranks):
        places = [place for place in range(last + 1, last + gap + 1) if place - last > gap / 2]
        last = max(places, key=lambda place: (ranks[place], place))
        found.append(last)
    return found
