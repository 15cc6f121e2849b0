"""Which heads of a model look for things far away, as a command measured it.  Values without JAX."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROFILE_FILE = "attention_profile.json"
"""Where it lies in a model's folder."""


@dataclass(frozen=True, kw_only=True)
class HeadProfile:
    """The share of its softmax that each head spends on a thing that is asked for, measured with dense attention.

    Raises ValueError for scores that are no shares.
    """

    scores: tuple[tuple[float, ...], ...]
    """`[layers][heads]`, 0 to 1."""
    task: str
    """The task whose answers were looked at (see `jaxinfer.evaluation.tasks`)."""
    length: int
    """Tokens of its prompts."""
    samples: int

    def __post_init__(self):
        widths = {len(row) for row in self.scores}
        if len(widths) != 1 or not all(0 <= score <= 1 for row in self.scores for score in row):
            raise ValueError(f"expected scores from 0 to 1, as many for every layer, got {self.scores!r:.200}")

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path, layers: int, heads: int) -> "HeadProfile":
        """Reads the profile of a model of so many layers and heads.

        Raises ValueError for a file that is none, or that of another model; OSError if it cannot be read.
        """
        try:
            fields: Any = json.loads(path.read_text(encoding="utf-8"))
            profile = HeadProfile(**fields | {"scores": tuple(map(tuple, fields["scores"]))})
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: expected scores, task, length and samples, got {error}") from error
        found = len(profile.scores), len(profile.scores[0])
        if found != (layers, heads):
            raise ValueError(f"{path}: expected scores of {(layers, heads)} layers and heads, got {found}")
        return profile
