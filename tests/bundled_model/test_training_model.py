"""The training forward pass computes what transformers and the engine compute."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.configs.huggingface import from_hf
from jaxinfer.model.moe import select_experts
from launch.bundled_model import export, model
from tests.oracles import oracle


@pytest.fixture(scope="module")
def mtp_model():
    folder = oracle("deepseek_v3_mtp")
    config = from_hf(json.loads((folder / "config.json").read_text()))
    params = jax.tree.map(jnp.asarray, export.parameters(config, folder))
    return config, params, load_file(folder / "model.safetensors"), np.load(folder / "reference.npz")


@pytest.mark.parametrize("block", [70, 35])
def test_equals_transformers(mtp_model, monkeypatch, block):
    config, params, tensors, reference = mtp_model
    monkeypatch.setattr(model, "QUERY_BLOCK", block)
    tokens = jnp.asarray(reference["input_ids"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with jax.default_matmul_precision("highest"):
        hidden, routing = model.hidden_states(config, params, tokens, positions, "blocked")
        logits = hidden @ tensors["lm_head.weight"].T
    np.testing.assert_allclose(logits, reference["logits"], atol=5e-5)
    assert routing.load.shape == (config.num_moe_layers, config.num_experts)
    assert float(routing.load.sum()) == tokens.size * config.experts_per_token * config.num_moe_layers


def test_multi_token_prediction_equals_transformers(mtp_model):
    config, params, tensors, reference = mtp_model
    tokens = jnp.asarray(reference["input_ids"])[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(1, 70), tokens.shape)
    with jax.default_matmul_precision("highest"):
        hidden, _ = model.mtp_hidden_states(
            config, params, jnp.asarray(reference["main_hidden"])[:, :69], tokens, positions, "blocked"
        )
        logits = hidden @ tensors["model.layers.4.shared_head.head.weight"].T
    np.testing.assert_allclose(logits, reference["mtp_logits"], atol=5e-5)


def test_gates_are_those_of_the_engine(mtp_model):
    config, params, _, _ = mtp_model
    config = dataclasses.replace(config, num_groups=4, groups_per_token=2, experts_per_token=2)
    x = jax.random.normal(jax.random.key(1), (2, 50, config.hidden_size))
    weights = {name: params["moe"]["moe"][name][0] for name in ("router", "router_bias")}
    weights["router_bias"] = jnp.linspace(-0.3, 0.3, config.num_experts)
    dense, _, chosen = model.gates(config, weights, x)
    assert (np.asarray(dense > 0) == np.asarray(chosen)).all()
    flat = x.reshape(100, -1)
    logits = jnp.einsum("td,ed->te", flat, weights["router"], precision="highest")
    experts, amounts = select_experts(logits, weights["router_bias"], config)
    expected = np.zeros((100, config.num_experts), np.float32)
    np.put_along_axis(expected, np.asarray(experts), np.asarray(amounts), axis=1)
    np.testing.assert_allclose(dense.reshape(100, -1), expected, atol=1e-6)


@pytest.mark.slow
def test_clipping_bounds_the_scores(mtp_model):
    config, params, _, reference = mtp_model
    tokens = jnp.asarray(reference["input_ids"])[:1]
    positions = jnp.arange(tokens.shape[1])[None]
    first = config.num_dense_layers
    before = model.largest_scores(config, params, tokens, positions)
    limit = float(jnp.sort(before[0])[1])
    clipped = model.clip_queries_and_keys(config, params, before, limit)
    after = model.largest_scores(config, clipped, tokens, positions)
    # The first layer's inputs do not change, so its scores are exactly what they are scaled to.
    np.testing.assert_allclose(after[0], jnp.minimum(before[0], limit), rtol=1e-4)
    unclipped = np.asarray(before[first:] <= limit)
    same = np.all(np.asarray(clipped["moe"]["attention"]["q_b"] == params["moe"]["attention"]["q_b"]), axis=(2, 3))
    np.testing.assert_array_equal(same, unclipped)


def test_rows_without_skips_see_relative_positions_only(mtp_model):
    config, params, _, reference = mtp_model
    tokens = jnp.asarray(reference["input_ids"])[:1]
    positions = jnp.arange(tokens.shape[1])[None]
    plain, _ = model.hidden_states(config, params, tokens, positions, "blocked")
    shifted, _ = model.hidden_states(config, params, tokens, positions + 1000, "blocked")
    np.testing.assert_allclose(plain, shifted, atol=2e-3)
