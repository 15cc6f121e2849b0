"""Tables, in Markdown, of the records of an evaluation."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxinfer.evaluation.evaluate import Setting

type Record = dict[str, Any]

_MEASURES = {
    "same_answer": "{:.1%}",
    "same_tokens": "{:.1%}",
    "top1": "{:.1%}",
    "kl": "{:.2e}",
    "kl_max": "{:.2e}",
    "max_dlogit": "{:.2e}",
}
_WORST = {"kl_max": max, "max_dlogit": max}
"""Measures of which a table shows the largest; of the others the mean."""

_READ = (
    ("keys_per_query", "Keys that a query read, mean over prompt, answer and layers", "{:,.0f}"),
    ("captured_mass", "Share of the softmax mass that hybrid attention read, mean of sampled queries", "{:.3f}"),
)
"""Fields of a record, their tables' titles and formats."""


def length_name(length: int) -> str:
    """8192 as 8K."""
    for factor, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if length % factor == 0:
            return f"{length // factor}{letter}"
    return str(length)


def setting_name(setting: Setting) -> str:
    """A setting on one line."""
    shown = {name: value for name, value in setting.items() if name != "model"}
    parts = [f"{k}={v if isinstance(v, str) else json.dumps(v, sort_keys=True)}" for k, v in sorted(shown.items())]
    return ", ".join([setting.get("model", "bundled model"), *parts])


def markdown(records: Sequence[Record]) -> str:
    """All tables, one section for each setting and one for each pair of settings compared."""
    lines = ["# Evaluation", ""]
    for name, group in by_key(records, lambda r: None if "baseline" in r else setting_name(r["setting"])):
        lines += [f"## {name}", "", *_scores(group)]
    for name, group in by_key(records, lambda r: _pair_name(r) if "baseline" in r else None):
        lines += [f"## {name}", "", *_comparison(group)]
    return "\n".join(lines).rstrip() + "\n"


def _pair_name(record: Record) -> str:
    return f"{setting_name(record['setting'])} against {setting_name(record['baseline'])}"


def by_key[K](records: Iterable[Record], key: Callable[[Record], K | None]) -> list[tuple[K, list[Record]]]:
    """Records by key, in the order in which the keys come; those without a key are left out."""
    groups: dict[K, list[Record]] = {}
    for record in records:
        found = key(record)
        if found is not None:
            groups.setdefault(found, []).append(record)
    return list(groups.items())


def _scores(records: Sequence[Record]) -> list[str]:
    scored = [record for record in records if "score" in record]
    lines = []
    if scored:
        lines += ["Score in percent, number of samples:", ""]
        lines += [*_table("task", scored, lambda r: r["task"], _mean_score), ""]
    perplexity = [record for record in records if "bits_per_byte" in record]
    if perplexity:
        lines += ["Bits per byte of held-out text:", ""]
        lines += _table(
            "task", perplexity, lambda r: r["task"], lambda g: f"{_mean(g, 'bits_per_byte'):.3f} ({len(g)})"
        )
        lines += [""]
    for name, title, form in _READ:
        read = [record for record in records if name in record]
        if read:
            lines += [f"{title}:", "", *_table("task", read, lambda r: r["task"], _mean_of(name, form)), ""]
    for task, parts in parts_with_depth(scored):
        lines += [f"{task} by depth:", "", *_table("depth", parts, lambda p: f"{p['depth']:.0%}", _mean_score), ""]
    return lines


def _mean_score(group: Sequence[Record]) -> str:
    return f"{100 * _mean(group, 'score'):.1f} ({len(group)})"


def _mean_of(name: str, form: str) -> Callable[[Sequence[Record]], str]:
    return lambda group: form.format(_mean(group, name))


def _mean(group: Sequence[Record], name: str) -> float:
    return sum(record[name] for record in group) / len(group)


def parts_with_depth(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """For each task, what was scored, as records of their own: length, score, the nearest of the depths asked for."""
    found = []
    for task, group in by_key(records, lambda r: r["task"]):
        levels = np.array(sorted({record["depth"] for record in group if record["depth"] is not None}))
        parts = [
            {"length": record["length"], "score": part["score"], "depth": _nearest(levels, part["depth"])}
            for record in group
            for part in record["parts"]
            if part["depth"] is not None
        ]
        if parts:
            found.append((task, sorted(parts, key=lambda part: part["depth"])))
    return found


def _nearest(levels: np.ndarray, depth: float) -> float:
    return float(levels[np.argmin(np.abs(levels - depth))])


def _comparison(records: Sequence[Record]) -> list[str]:
    lines = []
    for task, group in by_key(records, lambda r: r["task"]):
        rows = [("samples", lambda g: str(len(g))), *((name, _measure(name)) for name in _MEASURES)]
        if all(record["score"] is not None for record in group):
            rows.append(("score", lambda g: f"{100 * _mean(g, 'score'):.1f}"))
            rows.append(("score of the baseline", lambda g: f"{100 * _mean(g, 'baseline_score'):.1f}"))
        lengths = by_key(sorted(group, key=lambda r: r["length"]), lambda r: r["length"])
        lines += [f"{task}:", ""]
        lines += _grid("", [length_name(length) for length, _ in lengths], rows, [g for _, g in lengths])
        lines += [""]
    return lines


def _measure(name: str) -> Callable[[Sequence[Record]], str]:
    def show(group: Sequence[Record]) -> str:
        values = [record[name] for record in group]
        value = max(values) if name in _WORST else sum(values) / len(values)
        return _MEASURES[name].format(value)

    return show


def _table(
    corner: str, records: Sequence[Record], row: Callable[[Record], str], cell: Callable[[Sequence[Record]], str]
) -> list[str]:
    """A table of rows by `row` and columns by length."""
    lengths = sorted({record["length"] for record in records})
    groups: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[row(record)][record["length"]].append(record)
    lines = [f"| {corner} | " + " | ".join(map(length_name, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    for name, by_length in groups.items():
        shown = [cell(by_length[length]) if by_length[length] else "" for length in lengths]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def _grid(
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Callable[[Sequence[Record]], str]]],
    groups: Sequence[Sequence[Record]],
) -> list[str]:
    """A table of one function a row, applied to the group of each column."""
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {name} | " + " | ".join(show(group) for group in groups) + " |" for name, show in rows]
