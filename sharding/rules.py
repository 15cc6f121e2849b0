"""Logical axes: which mesh axes divide which dimension of which array.

Arrays name their dimensions (`("heads", None, "q_rank")`); the table here says over which mesh axes a name may be
divided.  A dimension is divided over the largest set of those axes whose size divides it; what does not divide is
replicated.  Two dimensions of one array on the same mesh axis are a mistake and raise.
"""

import math
from dataclasses import dataclass, replace
from itertools import combinations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.sharding.mesh import MeshShape

TABLE: dict[str, tuple[str, ...]] = {
    # activations and cache
    "replica": ("dp", "ep"),
    "context": ("cp",),
    "pages": ("dp", "ep", "cp"),
    # weights
    "vocab": ("cp", "ep", "tp"),
    "embedding": ("cp", "ep", "tp"),
    "experts": ("cp", "ep"),
    "expert_mlp": ("tp",),
    "heads": ("tp",),
    "mlp": ("tp",),
    "latent": (),
}

DENSE_AT_REST = ("heads", "mlp", "latent")
"""Names of the attention and dense feed-forward weights that can be divided over cp at rest as well."""


@dataclass(frozen=True)
class Rules:
    """The table of logical axes for one mesh.

    `shard_dense` divides the attention and dense feed-forward weights over cp where they lie.  `gathered` describes
    those weights after they have been gathered over cp for use in prefill.
    """

    mesh: MeshShape
    shard_dense: bool = False
    gathered: bool = False

    def axes(self, name: str | None, size: int) -> tuple[str, ...]:
        """The mesh axes (of size > 1) that divide a dimension of `size` called `name`, outermost first.

        A name such as "mlp/128" is divided like "mlp", but in multiples of 128 only.
        """
        if name is None:
            return ()
        name, _, unit = name.partition("/")
        if unit:
            size = size // int(unit) if size % int(unit) == 0 else 1
        if name not in TABLE:
            raise ValueError(f"expected a logical axis of {sorted(TABLE)}, got {name!r}")
        allowed = TABLE[name]
        at_rest = self.shard_dense and name in DENSE_AT_REST
        if at_rest:
            allowed += ("cp",)
        chosen = self._dividing(allowed, size)
        return tuple(axis for axis in chosen if axis != "cp") if at_rest and self.gathered else chosen

    def _dividing(self, allowed: tuple[str, ...], size: int) -> tuple[str, ...]:
        present = [axis for axis in allowed if self.mesh.sizes[axis] > 1]
        subsets = [subset for n in range(len(present) + 1) for subset in combinations(present, n)]
        fitting = [subset for subset in subsets if size % self.size(subset) == 0]
        return max(fitting, key=self.size)

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along `axes` together."""
        return math.prod(self.mesh.sizes[axis] for axis in axes)

    def spec(self, names: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The partition of an array whose dimensions are called `names`.

        Raises ValueError if the numbers of names and dimensions differ, or if two dimensions collide on a mesh axis.
        """
        if len(names) != len(shape):
            raise ValueError(f"expected a name for each dimension of {shape}, got {names}")
        entries = [self.axes(name, size) for name, size in zip(names, shape, strict=True)]
        used = [axis for entry in entries for axis in entry]
        collisions = sorted({axis for axis in used if used.count(axis) > 1})
        if collisions:
            raise ValueError(f"dimensions {names} of {shape} collide on mesh axes {collisions}")
        return PartitionSpec(*(entry or None for entry in entries))

    def sharding(self, mesh: Mesh, names: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, self.spec(names, shape))

    def replicated_because(self, name: str, size: int) -> str | None:
        """Why a dimension is divided less than the mesh allows, for the start-up log; None if it is not."""
        allowed = tuple(axis for axis in TABLE[name.partition("/")[0]] if self.mesh.sizes[axis] > 1)
        chosen = self.axes(name, size)
        if self.size(chosen) >= self.size(allowed):
            return None
        return f"{name}={size} does not divide over {allowed} ({self.size(allowed)}): divided over {chosen or 'none'}"


@dataclass(frozen=True)
class Plan:
    """How one kind of step is spread over the mesh: static while tracing.

    In prefill the tokens of a step are divided over cp (within a request) and ep (requests); in decode over ep only,
    and every cp rank holds all the queries.
    """

    rules: Rules
    token_axes: tuple[str, ...]

    @staticmethod
    def prefill(rules: Rules) -> "Plan":
        return Plan(replace(rules, gathered=True), ("cp", "ep"))

    @staticmethod
    def decode(rules: Rules) -> "Plan":
        return Plan(rules, ("ep",))

    def axes(self, name: str | None, size: int) -> tuple[str, ...]:
        return self.rules.axes(name, size)

    def gather(self, weight: jax.Array, names: tuple[str | None, ...], shape: tuple[int, ...]) -> jax.Array:
        """A weight as this step uses it: gathered over cp where it is divided at rest and the step wants it whole."""
        for dim, (name, size) in enumerate(zip(names, shape, strict=True)):
            at_rest = replace(self.rules, gathered=False).axes(name, size)
            if at_rest != self.axes(name, size):
                weight = jax.lax.all_gather(weight, "cp", axis=dim, tiled=True)
        return weight
