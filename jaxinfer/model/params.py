"""Declaring weights: shape, logical axes and type in one line, before any memory exists."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.sharding.rules import Plan, Rules

Tree = dict[str, Any]


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> Any:
    """A weight of one layer: its shape, what its dimensions are called (see `sharding.rules`) and its type.

    An `nnx.Param` in the description of a model, an array in a module that `use` has given its weights.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


def _is_param(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def axes_of(module: nnx.Module) -> Tree:
    """The logical axes of every weight of a module, as a nested dict of tuples."""
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.replace(p.axes), nnx.state(module), is_leaf=_is_param))


def shapes_of(module: nnx.Module) -> Tree:
    """Shape and type of every weight of a module, as a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(module))


def use(module: nnx.Module, weights: Tree, plan: Plan) -> nnx.Module:
    """The module with these weights, gathered as `plan` wants them: how a traced function comes by its layer."""
    axes, shapes = axes_of(module), shapes_of(module)
    gathered = jax.tree.map(
        lambda array, names, shape: plan.gather(array, names, shape.shape),
        weights,
        axes,
        shapes,
    )
    return nnx.as_pure(nnx.merge(nnx.graphdef(module), nnx.State(gathered)))


def specs(module: nnx.Module, layers: int | None, rules: Rules, mesh: Mesh) -> Tree:
    """What `module`'s weights look like on the mesh, `layers` of them stacked on a leading axis (None: not stacked)."""
    lead = () if layers is None else (layers,)

    def spec(shape: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        full = lead + shape.shape
        sharding = rules.sharding(mesh, (None,) * len(lead) + tuple(names), full)
        return jax.ShapeDtypeStruct(full, shape.dtype, sharding=sharding)

    return jax.tree.map(spec, shapes_of(module), axes_of(module))
