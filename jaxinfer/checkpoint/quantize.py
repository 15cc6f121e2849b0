"""Quantising parameters that exist, or are made, in a plain type."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from jaxinfer.kernels.quantized import Quantized, quantize_weight_like


def quantized_parameter(value: Any, spec: Quantized) -> Quantized:
    """A parameter stacked over its layers, quantised to the shapes, types and shardings of `spec`.

    `value` is an array of any float type; its trailing dimensions may be smaller than those of `spec`, which are filled
    up with zeros.
    """
    shardings = jax.tree.map(lambda part: part.sharding, spec)
    return jax.jit(partial(quantize_stack, lambda layer: layer, spec=spec), out_shardings=shardings)(value)


def quantize_stack(weight: Callable[[Any], jax.Array], layers: Any, spec: Quantized) -> Quantized:
    """Quantises `weight(layer)` for each of the stacked `layers`, one after the other, to the form of `spec`."""
    like = replace(
        spec,
        values=jax.ShapeDtypeStruct(spec.values.shape[1:], spec.values.dtype),
        scale=jax.ShapeDtypeStruct(spec.scale.shape[1:], spec.scale.dtype),
    )
    return lax.map(lambda layer: quantize_weight_like(weight(layer), like), layers)
