"""Quantisation, bit for bit against recorded patterns of the reference recipes, and its odd cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import quantize as kernel
from tests.oracles import FIXTURES

ORACLE = np.load(FIXTURES / "quant_oracle.npz")


def bits(q) -> np.ndarray:
    return np.asarray(q).view(np.uint8)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_blocks_match_the_recorded_bits(scales: str, jitted: bool):
    def quantize(x):
        return kernel.quantize(x, scheme="block", power_of_two=scales == "ue8m0")

    q, scale = (jax.jit(quantize) if jitted else quantize)(jnp.asarray(ORACLE["x"]))
    np.testing.assert_array_equal(np.asarray(scale).T, ORACLE[f"fp8_b128_{scales}_s"])
    np.testing.assert_array_equal(bits(q), ORACLE[f"fp8_b128_{scales}_q"])


@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_weights_match_the_recorded_bits(scales: str):
    q, scale = kernel.quantize_weight(jnp.asarray(ORACLE["W"]), scheme="block", power_of_two=scales == "ue8m0")
    np.testing.assert_array_equal(scale, ORACLE[f"w_{scales}_s"])
    np.testing.assert_array_equal(bits(q), ORACLE[f"w_{scales}_q"])
