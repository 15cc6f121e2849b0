"""Random weights: the same on every mesh and in every process, with the spread that keeps activations of order one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import random_parameters
from jaxinfer.checkpoint.tree import flatten
from jaxinfer.configs.presets import preset
from tests.checkpoints import assert_trees_equal, specs_on


@pytest.mark.parametrize("mesh", ["cp=8", "tp=2,cp=4"])
def test_the_same_values_on_every_mesh(mesh: str):
    config = preset("tiny-random")
    specs = specs_on(mesh, config)
    params = random_parameters(specs, config, seed=3)
    assert_trees_equal(params, random_parameters(specs_on("cp=1", config), config, seed=3))
    assert jax.tree.map(lambda spec: spec.sharding, specs) == jax.tree.map(lambda array: array.sharding, params)


def test_values_do_not_change_from_version_to_version():
    """Recorded: a prompt's greedy answer by the built-in model stays what it was."""
    config = preset("tiny-random")
    params = random_parameters(specs_on("cp=1", config), config)
    embed = np.asarray(params["embed"])
    np.testing.assert_allclose(embed[0, :4], [0.7037574, -1.5539923, -0.4442541, 0.7699507], rtol=1e-6)


def test_seed_and_name_change_the_values():
    config = preset("tiny-random")
    specs = specs_on("cp=1", config)
    first, second = random_parameters(specs, config, seed=0), random_parameters(specs, config, seed=1)
    assert not np.array_equal(first["embed"], second["embed"])
    assert not np.array_equal(first["embed"], np.asarray(first["head"]) * 8)


def test_lower_precision_is_the_rounded_value():
    config = preset("tiny-random")
    full = random_parameters(specs_on("cp=1", config), config)
    half = random_parameters(specs_on("cp=1", config, jnp.bfloat16), config)
    assert half["embed"].dtype == jnp.bfloat16
    assert_trees_equal(half, jax.tree.map(lambda array, like: array.astype(like.dtype), full, half))


def test_spread_of_each_kind_of_parameter():
    config = preset(
        "tiny-random", {"hidden_size": 256, "num_experts": 64, "num_layers": 8, "moe_intermediate_size": 96}
    )
    params = {
        ".".join(path): np.asarray(value)
        for path, value in flatten(random_parameters(specs_on("cp=1", config), config)).items()
    }
    expected = {
        "embed": 1.0,
        "head": 256**-0.5,
        "moe.moe.router": 2 * 256**-0.5,
        "moe.moe.router_bias": 0.1,
        "moe.moe.gate_up": 256**-0.5,
        "moe.moe.down": (96 * 16) ** -0.5,  # two products in each of eight layers add to the residual stream
        "moe.attention.o": (4 * 16 * 16) ** -0.5,
        "moe.attention.v_b": 32**-0.5,
        "dense.mlp.down": (128 * 16) ** -0.5,
    }
    for name, deviation in expected.items():
        assert params[name].std() == pytest.approx(deviation, rel=0.05), name
        assert abs(params[name].mean()) < 5 * deviation / params[name].size ** 0.5, name
    norms = np.concatenate([value.ravel() for name, value in params.items() if name.endswith("norm")])
    assert norms.mean() == pytest.approx(1, abs=0.01)
    assert norms.std() == pytest.approx(0.1, rel=0.05)


def test_neighbours_are_independent():
    """Rows, columns, layers and experts do not repeat or follow one another."""
    config = preset("tiny-random", {"num_layers": 5})
    gate_up = np.asarray(random_parameters(specs_on("cp=1", config), config)["moe"]["moe"]["gate_up"], np.float64)
    for axis in range(gate_up.ndim):
        ahead = np.moveaxis(gate_up, axis, 0)
        correlation = np.corrcoef(ahead[1:].ravel(), ahead[:-1].ravel())[0, 1]
        assert abs(correlation) < 5 / ahead[1:].size ** 0.5, axis
    singular = np.linalg.svd(gate_up[0, 0, 0] * 8, compute_uv=False)
    assert singular.max() < 2.2 * 8  # Marchenko-Pastur: 2 sqrt(n) for a square matrix of independent values
