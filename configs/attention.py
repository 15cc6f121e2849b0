"""Attention policies: which cached positions a query reads.  Values without JAX, hashable, static in a traced step."""

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.configs.layers import layer_range

_MOST_PROBES = 32
"""Of a query block, where few heads vote: as many as the kernels of retrieval take."""


@dataclass(frozen=True)
class Dense:
    """Every query reads every earlier position."""


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Sparse attention without training: a window, sinks, anchors, and blocks that are retrieved or lately hot.

    Everything lies on a grid that begins with the sequence, so that the division of a prompt into steps does not
    show.  The lists of `kernels.selection` say how each part is chosen.  Raises ValueError for values that are not
    possible, naming what was expected and what came.
    """

    window: int = 4096
    """Tokens before its query block that a query reads at least; rounded up to whole key blocks."""
    sinks: int = 128
    """The first tokens of the sequence, which every query reads."""
    anchor_gap: int = 512
    """Two neighbouring anchors are never further apart, nor, at boundaries, nearer than half of it.  Every query reads
    all anchors before its window."""
    anchor_boundaries: bool = True
    """Anchors stand at ends of paragraphs, sentences and lines where there are any; False: every `anchor_gap`
    tokens."""
    block: int = 128
    """Tokens of a key block, the unit of retrieval."""
    group: int = 4
    """Tokens of a group, whose mean stands for them in the first level of retrieval."""
    index_dim: int = 128
    """Numbers that the mean is reduced to (see `kernels.selection.index`), all of a latent at most."""
    query_block: int = 32
    """Neighbouring queries of one sequence that share their lists of blocks."""
    head_groups: int = 4
    """Groups of neighbouring heads with lists of their own, in prefill; decode has one list for all heads."""
    probes: int = 4
    """Queries of a query block that speak for it; more in models of fewer heads than `voters`, so that as many pairs
    of query and head speak, 32 at most."""
    voters: int = 32
    """Heads, of all groups together, that speak for their group; where there are fewer, all do.  Those that look far
    away most, where the model has a head profile (`python -m jaxinfer.profile`), else evenly spread."""
    local_below: float = 0.0
    """Groups of heads none of which scored as much in the head profile read no retrieved or hot blocks."""
    candidates: int = 64
    """Blocks that the first level hands to the second, which scores them exactly; decode reads them all."""
    retrieve_blocks: int = 16
    """Blocks that are read of the candidates."""
    retrieve_mass: float | None = None
    """Instead of a fixed count, the fewest blocks that hold this share of the candidates' softmax mass, though at
    least half and at most twice `retrieve_blocks`."""
    hot_blocks: int = 2
    """Blocks that are read because queries of earlier epochs often retrieved them; decode counts the running epoch as
    well, and reads `retrieve_blocks` more."""
    hot_epoch: int = 4096
    """Tokens of an epoch, in which all queries read the same hot blocks."""
    dense_below: int = 16384
    """Query blocks that begin before this position read every earlier position."""
    layers: tuple[tuple[int, int, "Dense | Hybrid"], ...] = ()
    """(first, end, policy): layers `first .. end - 1` follow a policy of their own."""

    def __post_init__(self):
        for name in (
            "window",
            "sinks",
            "anchor_gap",
            "block",
            "group",
            "query_block",
            "index_dim",
            "head_groups",
            "probes",
        ):
            self._expect_integer(name, 1)
        for name in ("voters", "candidates", "retrieve_blocks", "hot_epoch"):
            self._expect_integer(name, 1)
        for name in ("hot_blocks", "dense_below"):
            self._expect_integer(name, 0)
        for name, unit in (
            ("block", "group"),
            ("block", "query_block"),
            ("sinks", "block"),
            ("hot_epoch", "block"),
            ("voters", "head_groups"),
        ):
            if getattr(self, name) % getattr(self, unit):
                raise ValueError(
                    f"expected {name} to be a multiple of {unit}={getattr(self, unit)}, got {getattr(self, name)}"
                )
        if self.anchor_gap < 2:
            raise ValueError(f"expected an anchor_gap of at least 2, got {self.anchor_gap}")
        if self.anchor_gap > self.window:  # an anchor before the window is known when its window begins
            raise ValueError(f"expected an anchor_gap of at most window={self.window}, got {self.anchor_gap}")
        if not isinstance(self.anchor_boundaries, bool):
            raise ValueError(f"expected anchor_boundaries to be true or false, got {self.anchor_boundaries!r}")
        if self.probes > self.query_block:
            raise ValueError(f"expected probes of at most query_block={self.query_block}, got {self.probes}")
        if not 0 <= self.local_below <= 1:
            raise ValueError(f"expected local_below in [0, 1], got {self.local_below!r}")
        if self.retrieve_mass is not None and not 0 < self.retrieve_mass <= 1:
            raise ValueError(f"expected retrieve_mass in (0, 1], got {self.retrieve_mass!r}")
        needed = self.max_retrieved + self.hot_blocks
        if self.candidates < needed:
            raise ValueError(
                f"expected candidates of at least {needed} (retrieved and hot blocks), got {self.candidates}"
            )
        if self.candidates < self.voters // self.head_groups + self.hot_blocks:
            raise ValueError(
                f"expected candidates of at least {self.voters // self.head_groups + self.hot_blocks} (each voter's "
                f"best and the hot blocks), got {self.candidates}"
            )
        for entry in self.layers:
            if len(entry) != 3 or not 0 <= entry[0] < entry[1] or not isinstance(entry[2], Dense | Hybrid):
                raise ValueError(f"expected layers as (first, end, policy) with first < end, got {entry!r}")
            if isinstance(entry[2], Hybrid) and (entry[2].layers or entry[2]._grid != self._grid):
                raise ValueError(f"expected layers of one grid {self._grid} without layers of their own, got {entry!r}")

    def _expect_integer(self, name: str, least: int):
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"expected {name} to be an integer of at least {least}, got {value!r}")

    @property
    def _grid(self) -> dict[str, Any]:
        """What layers share: the lists that are made once a step, and what lies beside the cache."""
        names = ("sinks", "anchor_gap", "anchor_boundaries", "block", "group", "index_dim", "query_block", "hot_epoch")
        return {name: getattr(self, name) for name in names}

    @property
    def min_retrieved(self) -> int:
        """Blocks retrieved at least, where there are as many."""
        return self.retrieve_blocks if self.retrieve_mass is None else max(1, self.retrieve_blocks // 2)

    @property
    def max_retrieved(self) -> int:
        """Blocks retrieved at most."""
        return self.retrieve_blocks if self.retrieve_mass is None else 2 * self.retrieve_blocks

    def most_anchors(self, tokens: int) -> int:
        """Anchors of so many tokens at most: at boundaries they are more than half a gap apart, else a whole one."""
        return tokens // (self.anchor_gap // 2 + 1 if self.anchor_boundaries else self.anchor_gap)

    def of_layer(self, layer: int) -> "Dense | Hybrid":
        """The policy of a layer: the last entry of `layers` that names it, or this one."""
        for first, end, policy in reversed(self.layers):
            if first <= layer < end:
                return policy
        return replace(self, layers=())

    def for_model(self, heads: int, latent_dim: int) -> "Hybrid":
        """The policy for a model of so many heads and numbers of a latent.

        It has as many groups of heads as divide both, an index of no more numbers than there are, and the more probes
        the fewer heads can vote.
        """
        entries = tuple(
            (first, end, policy.for_model(heads, latent_dim) if isinstance(policy, Hybrid) else policy)
            for first, end, policy in self.layers
        )
        groups, size = math.gcd(self.head_groups, heads), min(self.index_dim, latent_dim)
        voters = min(self.voters, heads)
        probes = max(self.probes, min(self.query_block, _MOST_PROBES, self.probes * (self.voters // voters)))
        return replace(self, head_groups=groups, index_dim=size, voters=voters, probes=probes, layers=entries)


type Policy = Dense | Hybrid

DENSE = Dense()

PRESETS: dict[str, Hybrid] = {
    "fast": Hybrid(
        group=8, index_dim=64, candidates=48, probes=2, voters=16, head_groups=1, retrieve_blocks=12, hot_blocks=2
    ),
    "balanced": Hybrid(),
    "accurate": Hybrid(index_dim=256, candidates=128, voters=64, head_groups=8, retrieve_blocks=48, hot_blocks=8),
}
"""Budgets by name: about 7.2, 7.7 and 12.5 thousand keys a query on the mean of a prompt of a million tokens."""

AUTO_DENSE_BELOW: int | None = 24576
"""The position from which on `auto` reads sparsely on a GPU; None: nowhere.

From there a prompt's chunks are faster (`python -m tests.gpu.check_hybrid`, an H200, V3's width), and *balanced* finds
what dense attention finds (docs/benchmarks/hybrid.md)."""


def automatic_policy(max_context: int, dense_below: int | None = AUTO_DENSE_BELOW) -> Policy:
    """What `auto` means on a GPU for contexts of up to `max_context` tokens: dense below a position, then balanced.

    Dense altogether where no context is longer, as with every model that has no positions for more.
    """
    if dense_below is None or max_context <= dense_below:
        return DENSE
    return replace(PRESETS["balanced"], dense_below=dense_below)


POLICY_FORMS = (
    "dense, hybrid, fast, balanced or accurate, and after a colon changes separated by commas: "
    "hybrid:window=2048,retrieve_blocks=8,0-3=dense,4-7.retrieve_blocks=64"
)


def parse_policy(text: str) -> Policy:
    """Reads "dense", "hybrid" (which is "balanced"), the name of a preset, and any of the latter with changes.

    A change is `field=value`; `0-3=dense` makes layers 0 to 3 dense, and `4-7.field=value` changes a field for layers 4
    to 7 only.  Raises ValueError for anything else, saying what was expected.
    """
    name, colon, changes = text.partition(":")
    if name == "dense" and not colon:
        return Dense()
    base = PRESETS.get("balanced" if name == "hybrid" else name)
    if base is None or (colon and not changes):
        raise ValueError(f"expected an attention policy ({POLICY_FORMS}), got {text!r}")
    own: dict[str, Any] = {}
    layers: dict[tuple[int, int], dict[str, Any] | None] = {}
    for change in filter(None, changes.split(",")):
        left, equals, value = (part.strip() for part in change.partition("="))
        place, dot, field = left.rpartition(".")
        if not equals:
            raise ValueError(f"expected field=value in an attention policy, got {change!r}")
        if not dot and not left[:1].isdigit():
            own[left] = _value(left, value)
            continue
        span = layer_range(place or left)
        if not dot:
            if value != "dense":
                raise ValueError(f"expected {left}=dense or {left}.field=value, got {change!r}")
            layers[span] = None
        else:
            changed = layers.setdefault(span, {})
            if changed is None:
                raise ValueError(f"layers {place} are dense: expected no other change of them, got {change!r}")
            changed[field] = _value(field, value)
    policy = replace(base, **own)
    entries = tuple((*span, Dense() if of is None else replace(policy, **of)) for span, of in layers.items())
    return replace(policy, layers=entries)


def _value(field: str, text: str) -> Any:
    types = {item.name: item.type for item in dataclasses.fields(Hybrid) if item.name != "layers"}
    if field not in types:
        raise ValueError(f"expected a field of the hybrid policy ({', '.join(types)}), got {field!r}")
    if types[field] is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"expected {field} to be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return int(text) if types[field] is int else float(text)
    except ValueError:
        kind = "an integer" if types[field] is int else "a number"
        raise ValueError(f"expected {field} to be {kind}, got {text!r}") from None
