"""Declaring weights: shape, logical axes and type in one line, before any memory exists."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.kernels.quantize import BLOCK
from jaxinfer.kernels.quantized import Quantized
from jaxinfer.sharding.rules import Plan, Rules

Tree = dict[str, Any]


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype, in_place: bool = False) -> Any:
    """A weight of one layer: its shape, what its dimensions are called (see `sharding.rules`) and its type.

    An `nnx.Param` in the description of a model, an array in a module that `use` has given its weights; `in_place`: the
    array of all layers, stacked, where the layer's kernels read their own from (see `apart`).
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, in_place=in_place)


def _is_param(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def axes_of(module: nnx.Module) -> Tree:
    """The logical axes of every weight of a module, as a nested dict of tuples."""
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.replace(p.axes), nnx.state(module), is_leaf=_is_param))


def shapes_of(module: nnx.Module) -> Tree:
    """Shape and type of every weight of a module, as a nested dict of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(module))


def apart(module: nnx.Module, weights: Tree) -> tuple[Tree, Tree]:
    """The weights of stacked layers that are taken layer by layer, and those that are read in place; None elsewhere.

    A scan hands its body slices, and those that an inner loop or branch needs have to be copied out of the stack.
    """
    marks = nnx.to_pure_dict(jax.tree.map(lambda p: p.replace(p.in_place), nnx.state(module), is_leaf=_is_param))
    sliced = jax.tree.map(lambda in_place, array: None if in_place else array, marks, weights)
    whole = jax.tree.map(lambda in_place, array: array if in_place else None, marks, weights)
    return sliced, whole


def together(sliced: Tree, whole: Tree) -> Tree:
    """Inverse of `apart`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, sliced, whole, is_leaf=lambda leaf: not isinstance(leaf, dict)
    )


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

    shapes, axes = shapes_of(module), axes_of(module)
    _check_blocks(shapes, axes, rules)
    return jax.tree.map(spec, shapes, axes)


def _check_blocks(shapes: Tree, axes: Tree, rules: Rules) -> None:
    """Raises ValueError if the mesh would cut through 128x128 blocks that share a scale."""

    def check(path, shape, names) -> None:
        if not isinstance(shape, Quantized) or shape.scheme == "row":
            return
        split = len(shape.shape) - shape.columns
        for part, dim in ((slice(shape.lead, split), -2), (slice(split, None), -1)):
            sizes = shape.shape[part]
            cut = [rules.axes(name, size) for name, size in zip(names.values[part], sizes, strict=True)]
            pieces = math.prod(rules.size(over) for over in cut)
            of_scale = rules.size(rules.axes(names.scale[dim], shape.scale.shape[dim]))
            if pieces != of_scale or (pieces > 1 and math.prod(sizes) // pieces % BLOCK):
                raise ValueError(
                    f"expected a mesh that leaves the 128x128 blocks of {jax.tree_util.keystr(path)} "
                    f"{list(shape.shape)} whole, got {rules.mesh}, which would cut {list(sizes)} into {pieces}"
                )

    jax.tree.map_with_path(check, shapes, axes, is_leaf=lambda leaf: isinstance(leaf, Quantized))
