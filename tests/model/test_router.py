"""Expert selection against loops over tokens, with the traps of each router."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.configs.presets import preset
from jaxinfer.kernels import dispatch
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.model.moe import MoE, select_experts
from tests.kernels.products import lower_for_cuda

BASE = dataclasses.replace(
    preset("tiny-random"),
    num_experts=12,
    experts_per_token=3,
    num_groups=4,
    groups_per_token=2,
    routed_scaling_factor=2.5,
)


def expected(logits: np.ndarray, bias: np.ndarray | None, config) -> tuple[list[list[int]], np.ndarray]:
    experts, weights = [], []
    for row in logits.astype(np.float64):
        sigmoid = config.router == "sigmoid_noaux_tc"
        scores = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        choice = scores + (bias if bias is not None else 0)
        if config.router != "softmax_greedy":
            groups = np.split(np.arange(len(row)), config.num_groups)
            worth = [sum(sorted(choice[g])[-2:]) if sigmoid else choice[g].max() for g in groups]
            kept = sorted(range(len(groups)), key=lambda g: -worth[g])[: config.groups_per_token]
            allowed = np.concatenate([groups[g] for g in kept])
            choice = np.where(np.isin(np.arange(len(row)), allowed), choice, -np.inf if sigmoid else 0.0)
        best = sorted(range(len(row)), key=lambda e: (-choice[e], e))[: config.experts_per_token]
        weight = scores[best]
        if config.norm_topk_prob:
            weight = weight / weight.sum()
        experts.append(best)
        weights.append(weight * config.routed_scaling_factor)
    return experts, np.array(weights)


@pytest.mark.parametrize("router", ["softmax_greedy", "softmax_group_limited", "sigmoid_noaux_tc", "one group"])
def test_routers(router: str):
    rng = np.random.default_rng(0)
    config = dataclasses.replace(BASE, router=router if router != "one group" else "sigmoid_noaux_tc")
    if router == "one group":
        config = dataclasses.replace(config, num_groups=1, groups_per_token=1)
    if router.startswith("softmax"):
        config = dataclasses.replace(config, norm_topk_prob=False)
    logits = rng.normal(size=(200, 12)).astype(np.float32) * 2
    bias = None if router.startswith("softmax") else rng.normal(size=12).astype(np.float32)
    experts, weights = select_experts(jnp.asarray(logits), None if bias is None else jnp.asarray(bias), config)
    wanted_experts, wanted_weights = expected(logits, bias, config)
    np.testing.assert_array_equal(experts, wanted_experts)
    np.testing.assert_allclose(weights, wanted_weights, rtol=2e-5)


def test_groups_with_negative_biases_are_masked_not_zeroed():
    """With all biased scores negative, a mask of 0 would select experts of the groups that lost."""
    config = dataclasses.replace(BASE, router="sigmoid_noaux_tc")
    logits = np.zeros((1, 12), np.float32)
    bias = -2.0 - np.arange(12, dtype=np.float32) / 10
    experts, weights = select_experts(jnp.asarray(logits), jnp.asarray(bias), config)
    np.testing.assert_array_equal(experts, [[0, 1, 2]])
    # The bias selects but never weighs: three equal scores share the scaling factor.
    np.testing.assert_allclose(weights, np.full((1, 3), 2.5 / 3), rtol=1e-6)


def test_a_float32_model_multiplies_in_float32(monkeypatch: pytest.MonkeyPatch):
    """Also where there is a Hopper GPU, on which the other models take the kernel."""
    monkeypatch.setattr(dispatch, "_no_hopper", lambda: None)
    config = dataclasses.replace(BASE, router="softmax_greedy", hidden_size=64)
    rng = np.random.default_rng(0)
    x, norm, router = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((256, 64), 64, (12, 64)))

    def route(dtype, x, norm):
        return MoE.route(SimpleNamespace(config=config, dtype=jnp.dtype(dtype), router=router), x, norm)  # pyright: ignore[reportArgumentType]

    logits = jnp.einsum("td,ed->te", rms_norm(x, norm, config.rms_norm_eps), router, precision=lax.Precision.HIGHEST)
    for got, wanted in zip(route(jnp.float32, x, norm), select_experts(logits, None, config), strict=True):
        np.testing.assert_array_equal(got, wanted)
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(norm.shape, norm.dtype)
    for dtype, name in ((jnp.float32, "HIGHEST"), (jnp.bfloat16, "router_logits")):
        lowered = lower_for_cuda(lambda x, norm, dtype=dtype: route(dtype, x, norm), *shapes)
        assert name in lowered and ("mosaic_gpu" in lowered) == (dtype == jnp.bfloat16)
