"""Draws a training: `python -m launch.bundled_model.curve METRICS.jsonl [METRICS.jsonl ...] CURVE.png`.

Several files are runs that each began with the weights of the one before.  Needs the extra `eval`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from launch.bundled_model.data import PARTS


def series(runs: list[list[dict[str, Any]]]) -> tuple[dict[str, list], dict[str, list], list[float]]:
    """Cross-entropies of the training by source and length, held-out bits per byte by part: (minute, value); and the
    minutes at which runs ended."""
    training: dict[str, list] = {}
    held: dict[str, list] = {}
    ends = [0.0]
    for lines in runs:
        minute = ends[-1]
        for line in lines:
            minute = ends[-1] + line["minutes"] if "minutes" in line else minute
            for name, values in line.items():
                if name.startswith("ce_"):
                    for source, value in values.items():
                        key = f"{source} {name.removeprefix('ce_')}"
                        training.setdefault(key, []).append((minute, float(value.partition("/")[0])))
            if line.get("event") == "held-out" and minute > 0 and line["length"] == 2048:
                for part in PARTS:
                    held.setdefault(part, []).append((minute, line[part]["bits_per_byte"]))
        ends.append(minute)
    return training, held, ends[1:]


def main():
    *sources, target = map(Path, sys.argv[1:])
    training, held, ends = series([[json.loads(line) for line in run.read_text().splitlines()] for run in sources])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colors = dict(zip(sorted({key.split()[0] for key in training}), matplotlib.color_sequences["tab10"], strict=False))
    for key, points in training.items():
        name, length = key.split()
        axes = left if name in PARTS else middle
        style = {"2048": ":", "8192": "--"}.get(length, "-")
        axes.plot(*zip(*points, strict=True), style, color=colors[name], label=key, linewidth=1)
    for part, points in held.items():
        right.plot(*zip(*points, strict=True), "o-", color=colors[part], label=part, markersize=3)
    middle.set_yscale("log")
    for axes, title in (
        (left, "text, nats a token"),
        (middle, "answers, nats a token"),
        (right, "held out, bits a byte"),
    ):
        axes.set(title=title, xlabel="minutes of training")
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
        for end in ends[:-1]:
            axes.axvline(end, color="gray", linewidth=0.8)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
