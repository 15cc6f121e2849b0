"""A tiny model of the same architecture learns to copy with the recipe's loss and optimiser."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.model import ModelConfig
from launch.bundled_model import checkpoint, export, loss, model, optimizer
from launch.bundled_model.data import SOURCES, Batch

SPAN = 12


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return dataclasses.replace(
        export.bundled_config(),
        vocab_size=64,
        hidden_size=64,
        num_layers=3,
        num_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
    )


def copy_batch(rng: np.random.Generator, rows: int = 32) -> Batch:
    """A random span, then the span again; the second is scored."""
    span = rng.integers(8, 64, (rows, SPAN))
    tokens = np.concatenate((np.zeros((rows, 1)), span, span, np.zeros((rows, 1))), axis=1)
    answer = np.zeros_like(tokens)
    answer[:, SPAN + 1 : -1] = 1
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    source = np.full(rows, SOURCES.index("copy"))
    return Batch(
        tokens.astype(np.uint16), answer.astype(np.uint16), positions.astype(np.int32), source.astype(np.int32)
    )


@pytest.mark.slow
def test_learns_to_copy_and_keeps_the_experts_busy(config, tmp_path):
    state = optimizer.initial_state(config, 0)
    step = jax.jit(
        partial(optimizer.train_step, config=config, dtype=jnp.float32, attention="blocked"), donate_argnums=0
    )
    rng = np.random.default_rng(0)
    knobs = optimizer.Knobs(np.float32(1), np.float32(1e-2), np.float32(0.3))
    losses, loads = [], []
    for number in range(200):
        if number == 150:
            # Continues from a checkpoint as if nothing had happened.
            checkpoint.save(tmp_path / "c.npz", state, {"trained": 1.5})
            restored = checkpoint.restore(tmp_path / "c.npz", optimizer.initial_state(config, 1))
            assert restored is not None and restored[1] == {"trained": 1.5}
            assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all() and a.dtype == b.dtype, state, restored[0]))
            state = restored[0]
        state, report, _ = step(state, copy_batch(rng), knobs)
        copy = SOURCES.index("copy")
        losses.append(float(report.scores.nll[copy] / report.scores.count[copy]))
        loads.append(report.load)
    assert losses[0] > 3.5
    assert np.mean(losses[-10:]) < 1.0
    load = np.sum(loads[-20:], axis=0)
    assert (load.max(axis=1) / load.mean(axis=1)).max() < 2.0
    assert int(state.step) == 200


@pytest.mark.slow
def test_gradient_of_the_chunked_loss(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", 16)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, table = jax.random.normal(keys[0], (48, 8)), jax.random.normal(keys[1], (20, 8))
    targets = jax.random.randint(keys[2], (48,), 0, 20)
    weights, source = jnp.linspace(0, 0.1, 48), jnp.arange(48) % 3

    def plain(hidden, table):
        logits = hidden @ table.T
        lse = jax.nn.logsumexp(logits, axis=-1)
        nll = lse - logits[jnp.arange(48), targets]
        return jnp.sum(weights * (nll + loss.Z_LOSS * lse**2))

    def chunked(hidden, table):
        return 3.0 * loss.cross_entropy(hidden, table, targets, weights, source)[0]

    value, gradients = jax.value_and_grad(plain, (0, 1))(hidden, table)
    chunked_value, chunked_gradients = jax.value_and_grad(chunked, (0, 1))(hidden, table)
    np.testing.assert_allclose(chunked_value, 3 * value, rtol=1e-5)
    for ours, expected in zip(chunked_gradients, gradients, strict=True):
        np.testing.assert_allclose(ours, 3 * expected, atol=1e-5)
    _, sums = loss.cross_entropy(hidden, table, targets, weights, source)
    assert sums.count.tolist()[:3] == [15, 16, 16]  # the first token has no weight


def test_sources_weigh_what_they_should():
    answer = jnp.array([[1, 1, 1, 1], [0, 0, 0, 5], [0, 1, 1, 0]])
    source = jnp.array([SOURCES.index("prose"), SOURCES.index("kv"), SOURCES.index("kv")])
    weights = loss.token_weights(answer, source)
    prose, kv = (loss.SOURCE_WEIGHTS[SOURCES.index(name)] for name in ("prose", "kv"))
    assert float(weights.sum()) == pytest.approx(1.0)
    np.testing.assert_allclose(weights[0], prose / (prose + kv) / 4, rtol=1e-6)
    np.testing.assert_allclose(weights[1:], np.array([[0, 0, 0, 1], [0, 1, 1, 0]]) * kv / (prose + kv) / 3, rtol=1e-6)


def test_every_matrix_is_given_to_muon(config):
    shapes = model.parameter_shapes(config)
    leaves = jax.tree.leaves_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    params = {jax.tree_util.keystr(path): shape for path, shape in leaves}
    state = optimizer.initial_state(config, 0)
    muon = {
        jax.tree_util.keystr(path): np.shape(leaf)
        for path, leaf in jax.tree.leaves_with_path(state.optimizer[1].inner_states["muon"].inner_state[0].mu)
    }
    others = set(params) - set(muon)
    assert {name.split("'")[-2] for name in others} == {
        "embed", "final_norm", "attn_norm", "mlp_norm", "q_a_norm", "kv_a_norm", "router", "router_bias",
        "enorm", "hnorm", "norm",
    }  # fmt: skip
