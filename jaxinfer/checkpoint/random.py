"""Random weights for any configuration, made where they lie.

A value is a hash of the seed, the name of the parameter and the place in it: the same model on every mesh and, up to
rounding, in every type.  (A hash of a few operations instead of `jax.random`: every parameter compiles its own program,
and threefry's takes ten times as long to compile, which at each start would be most of the start.)
"""

import math
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.checkpoint.mapping import TreePath, shapes_of, sources
from jaxinfer.checkpoint.quantize import quantize_stack
from jaxinfer.checkpoint.tree import flatten, unflatten
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.quantized import Quantized, fill_up

# Trailing dimensions of a weight over which it sums: 1 except for the output projection `[layers, d, heads, v]`.
_SUMMED_DIMS = {"o": 2}

# The weights whose products are added to the residual stream, two in each layer.
_ADDED_TO_THE_STREAM = ("o", "down")


def random_parameters(specs: dict[str, Any], config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random weights of `config` in the shapes, types and shardings of `specs`.

    `specs` is a nested dict of `jax.ShapeDtypeStruct` or `Quantized` ones (see `model.transformer.parameter_specs`).

    Scales keep activations of order one through every layer and spread the router's scores and the logits: norms
    1 +- 0.1, embedding 1, router 2 / sqrt(d), router bias 0.1, other matrices 1 / sqrt(inputs), and those that add to
    the residual stream 1 / sqrt(2 layers) of that, so that a stack of any depth adds as much as the embedding (GPT-2's
    initialisation).
    """
    flat, shapes = flatten(specs), shapes_of(sources(config))
    layers = sum(spec.shape[0] for path, spec in flat.items() if path[-1] == "attn_norm")
    return unflatten({path: _random_parameter(seed, path, spec, shapes[path], layers) for path, spec in flat.items()})


def _random_parameter(
    seed: int, path: TreePath, spec: jax.ShapeDtypeStruct | Quantized, shape: tuple[int, ...], layers: int
) -> jax.Array | Quantized:
    mean, deviation = (np.float32(value) for value in _distribution(path, shape, layers))
    salt = np.uint32(zlib.crc32(f"{seed} {'.'.join(path)}".encode()))
    fill = partial(_fill_quantized if isinstance(spec, Quantized) else _fill, shape=shape, spec=spec)
    return jax.jit(fill, out_shardings=jax.tree.map(lambda part: part.sharding, spec))(salt, mean, deviation)


def _distribution(path: TreePath, shape: tuple[int, ...], layers: int) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's values."""
    name = path[-1]
    if name.endswith("norm"):
        return 1.0, 0.1
    if name == "embed":
        return 0.0, 1.0
    if name == "router_bias":
        return 0.0, 0.1
    inputs = math.prod(shape[-_SUMMED_DIMS.get(name, 1) :])
    if name in _ADDED_TO_THE_STREAM:
        inputs *= 2 * layers
    return 0.0, (2.0 if name == "router" else 1.0) / math.sqrt(inputs)


def _fill(
    salt: jax.Array, mean: jax.Array, deviation: jax.Array, *, shape: tuple[int, ...], spec: jax.ShapeDtypeStruct
) -> jax.Array:
    return fill_up(_values(_mix(salt), mean, deviation, shape), spec.shape).astype(spec.dtype)


def _fill_quantized(
    salt: jax.Array, mean: jax.Array, deviation: jax.Array, *, shape: tuple[int, ...], spec: Quantized
) -> Quantized:
    """The values of `_fill`, quantised layer by layer: never is more than one layer there in float32."""

    def layer(index):
        return _values(_next(_mix(salt), index), mean, deviation, shape[1:])

    return quantize_stack(layer, jnp.arange(shape[0], dtype=jnp.uint32), spec)


def _values(bits: jax.Array, mean: jax.Array, deviation: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Values of triangular distribution: the sum of two uniform numbers, one from each half of a 32-bit hash."""
    for dim in range(len(shape)):
        bits = _next(bits, lax.broadcasted_iota(jnp.uint32, shape, dim))
    total = ((bits >> 16) + (bits & np.uint32(0xFFFF))).astype(jnp.float32)
    # Two uniform integers of 0 .. 2^16 - 1 have the mean 2^16 - 1 and the variance (2^32 - 1) / 6 in sum.
    normalised = (total - 65535.0) * math.sqrt(6 / (2**32 - 1))
    return mean + deviation * normalised


def _next(bits: jax.Array, place: jax.Array) -> jax.Array:
    """The hash `bits` of a place, continued by its place in one more dimension."""
    return _mix((bits ^ place) + np.uint32(0x9E3779B9))


def _mix(bits: jax.Array) -> jax.Array:
    """Wellons' 32-bit integer hash of two rounds (https://nullprogram.com/blog/2018/07/31/)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
