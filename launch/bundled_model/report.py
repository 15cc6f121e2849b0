"""Turns what steps report into lines: speed, loss by source, accuracy, expert load."""

from typing import Any

import numpy as np

from launch.bundled_model.data import PARTS, SOURCES, Batch
from launch.bundled_model.loss import Report


class Tally:
    """Sums over the steps between two lines."""

    def __init__(self):
        self.tokens: dict[int, int] = {}
        self.nll: dict[int, np.ndarray] = {}
        self.correct: dict[int, np.ndarray] = {}
        self.count: dict[int, np.ndarray] = {}
        self.mtp = np.zeros(2)
        self.mtp_correct = 0.0
        self.load: np.ndarray | float = 0.0
        self.norms: list[float] = []
        self.losses: list[float] = []

    def add(self, length: int, report: Report, norm: Any, rows: dict[int, int]):
        """Adds a step of `rows[length]` sequences of `length` tokens."""
        length = int(length)
        self.tokens[length] = self.tokens.get(length, 0) + rows[length] * length
        for sums, values in zip((self.nll, self.correct, self.count), report.scores, strict=True):
            sums[length] = sums.get(length, 0) + np.asarray(values, np.float64)
        self.mtp += np.array([report.mtp_scores.nll.sum(), report.mtp_scores.count.sum()])
        self.mtp_correct += report.mtp_scores.correct.sum()
        self.load = self.load + np.asarray(report.load, np.float64)
        self.norms.append(float(norm))
        self.losses.append(float(report.loss))

    def line(self, seconds: float) -> dict[str, Any]:
        """The values of a log line for `seconds` of training.  Cross-entropies in nats a token."""
        if not self.losses:
            return {"tokens_per_s": 0, "loss": 0.0}
        sources = {}
        for length in sorted(self.count):
            parts = {}
            for i, name in enumerate(SOURCES):
                count = self.count[length][i]
                if count:
                    accuracy = "" if name in PARTS else f"/{100 * self.correct[length][i] / count:.1f}%"
                    parts[name] = f"{self.nll[length][i] / count:.3f}{accuracy}"
            sources[f"ce_{length}"] = parts
        load = np.asarray(self.load)
        balance = load.max(axis=1) / load.mean(axis=1)
        return {
            "tokens_per_s": round(sum(self.tokens.values()) / seconds),
            "loss": float(np.mean(self.losses)),
            **sources,
            "mtp_ce": float(self.mtp[0] / self.mtp[1]),
            "mtp_top1": float(self.mtp_correct / self.mtp[1]),
            "load": float(balance.max()),
            "grad": float(np.mean(self.norms)),
        }


def held_out_report(batch: Batch, right: np.ndarray, nll: np.ndarray, sizes: dict[str, float]) -> dict[str, Any]:
    """Bits per byte of natural text by part, and for each task how many answers are right in every token.

    Args: `right`, `nll` `[B, T]` of the targets of a held-out batch; `sizes` bytes a token of each part.
    """
    length = right.shape[1]
    answer = batch.answer[:, 1 : length + 1]
    parts: dict[str, Any] = {}
    for i, name in enumerate(SOURCES):
        rows = np.flatnonzero(batch.source == i)
        scored = answer[rows] > 0
        if not scored.any():
            continue
        if name in PARTS:
            bits = nll[rows][scored].mean() / np.log(2)
            parts[name] = {"bits_per_byte": round(float(bits / sizes[name]), 3)}
            continue
        whole = total = 0
        for row in rows:
            wrong = np.bincount(answer[row], weights=~right[row])[1:]
            there = np.bincount(answer[row])[1:] > 0
            whole += int((wrong[there] == 0).sum())
            total += int(there.sum())
        parts[name] = {"answers": round(whole / total, 3), "of": total}
    return parts
