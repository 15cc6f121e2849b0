"""Parameters in the form in which they are held: filled up with zeros to whole blocks, and quantised."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from jaxinfer.kernels.quantize import BLOCK
from jaxinfer.kernels.quantized import Quantized, fill_up, quantize_weight_like


def fits(shape: tuple[int, ...], held: tuple[int, ...]) -> bool:
    """Whether a parameter of `shape` may be held in the shape `held`: the same, or filled up to multiples of 128."""
    if len(shape) != len(held):
        return False
    return all(size in (wanted, -(-wanted // BLOCK) * BLOCK) for wanted, size in zip(shape, held, strict=True))


def held_as(value: Any, spec: jax.ShapeDtypeStruct | Quantized) -> Any:
    """A parameter, an array of any float type, in the shapes (see `fits`), types and shardings of `spec`."""

    def convert(value):
        if isinstance(spec, Quantized):
            return quantize_stack(lambda layer: layer, value, spec)
        return fill_up(value, spec.shape).astype(spec.dtype)

    return jax.jit(convert, out_shardings=jax.tree.map(lambda part: part.sharding, spec))(value)


def quantize_stack(weight: Callable[[Any], jax.Array], layers: Any, spec: Quantized) -> Quantized:
    """Quantises `weight(layer)` for each of the stacked `layers`, one after the other, to the form of `spec`."""
    like = replace(
        spec,
        values=jax.ShapeDtypeStruct(spec.values.shape[1:], spec.values.dtype),
        scale=jax.ShapeDtypeStruct(spec.scale.shape[1:], spec.scale.dtype),
    )
    return lax.map(lambda layer: quantize_weight_like(weight(layer), like), layers)
