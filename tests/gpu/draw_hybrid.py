"""Draws what `check_hybrid` found: `python -m tests.gpu.draw_hybrid PICTURE.png EVENTS.json ...`.  Needs matplotlib.

Of several runs the one that followed a prompt furthest counts, for each policy.
"""

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CHUNK = 8192
COLOURS = {"dense": "tab:red", "hybrid": "tab:blue"}


def longest(events: list[dict]) -> list[float]:
    """Seconds of each chunk of the prompt that was followed furthest."""
    return max((event["chunks"] for event in events if event["event"] == "row"), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("events", type=Path, nargs="+")
    arguments = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in arguments.events]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    of_chunks, of_prompts = figure.subplots(1, 2)
    for policy, colour in COLOURS.items():
        seconds = longest([event for events in runs for event in events.get(policy, [])])
        ends = [(index + 1) * CHUNK / 1024 for index in range(len(seconds))]
        totals = [sum(seconds[: index + 1]) for index in range(len(seconds))]
        of_chunks.plot(ends, [1e3 * second for second in seconds], color=colour, label=policy)
        of_prompts.plot(ends, totals, color=colour, label=policy)
    of_chunks.set(xlabel="position in the prompt, K tokens", ylabel="ms for 8,192 tokens, four layers")
    of_prompts.set(xlabel="prompt, K tokens", ylabel="s to its end, four layers", yscale="log")
    for axes in (of_chunks, of_prompts):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
