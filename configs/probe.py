"""The dials of the built-in model `retrieval-probe`, whose weights are constructed at load."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROBE = "retrieval-probe"

CLUSTERS = 64
"""Tokens whose ids agree modulo this number are a cluster: their codes resemble each other, as `correlation` says."""

_SIZES = ("vocab_size", "max_positions", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class ProbeDials:
    """How hard the look-up is.  Raises ValueError for values that are not possible."""

    key_tokens: int = 3
    """Tokens that a place must share with the end of the text to be found: 2 or 3."""
    beta: float = 24.0
    """What one shared token adds to the attention score (natural logarithm of the weight)."""
    correlation: float = 0.0
    """Cosine of the codes of two tokens of one cluster, in [0, 1)."""

    def __post_init__(self):
        if self.key_tokens not in (2, 3):
            raise ValueError(f"expected key_tokens to be 2 or 3, got {self.key_tokens!r}")
        if not self.beta > 0:
            raise ValueError(f"expected a positive beta, got {self.beta!r}")
        if not 0 <= self.correlation < 1:
            raise ValueError(f"expected a correlation in [0, 1), got {self.correlation!r}")


def split_dials(overrides: Mapping[str, Any]) -> tuple[ProbeDials, dict[str, Any]]:
    """The dials among the overrides of `retrieval-probe`, and the rest: sizes that its construction leaves free.

    Raises ValueError for any other name.
    """
    dials = [field.name for field in dataclasses.fields(ProbeDials)]
    unknown = sorted(set(overrides) - {*dials, *_SIZES})
    if unknown:
        raise ValueError(
            f"expected overrides of {PROBE} among {', '.join((*dials, *_SIZES))}, got {', '.join(unknown)}"
        )
    rest = {name: value for name, value in overrides.items() if name not in dials}
    return ProbeDials(**{name: overrides[name] for name in dials if name in overrides}), rest
