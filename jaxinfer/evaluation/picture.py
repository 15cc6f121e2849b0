"""A picture of the records of an evaluation: depth by length.  Needs matplotlib (the extra `eval`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxinfer.evaluation.report import Record, by_key, length_name, parts_with_depth, setting_name


def draw(records: Sequence[Record], path: Path) -> None:
    """Draws a map of depth by length for each setting and task that has depths; without any, nothing is written."""
    panels = [
        (f"{task}\n{name}", parts)
        for name, group in by_key(records, lambda r: setting_name(r["setting"]) if "parts" in r else None)
        for task, parts in parts_with_depth(group)
    ]
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, parts) in zip(axes, panels, strict=False):
        lengths = sorted({part["length"] for part in parts})
        depths = sorted({part["depth"] for part in parts})
        scores = np.full((len(depths), len(lengths)), np.nan)
        for i, depth in enumerate(depths):
            for j, length in enumerate(lengths):
                cell = [part["score"] for part in parts if (part["depth"], part["length"]) == (depth, length)]
                if cell:
                    scores[i, j] = 100 * sum(cell) / len(cell)
                    colour = "white" if abs(scores[i, j] - 50) > 35 else "black"
                    ax.text(j, i, f"{scores[i, j]:.0f}", ha="center", va="center", fontsize=8, color=colour)
        image = ax.imshow(scores, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        ax.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        ax.set_xlabel("length in tokens")
        ax.set_ylabel("depth")
        ax.set_title(title, fontsize=9, wrap=True)
        figure.colorbar(image, ax=ax, label="score in percent")
    figure.savefig(path, dpi=110)
