"""Muon for matrices, AdamW for the embedding, routers and norms, and the balance of the routers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxinfer.configs.model import ModelConfig
from launch.bundled_model import loss, model

# Learning rates at the plateau.
MUON_RATE = 5e-3
EMBEDDING_RATE = 4e-3
OTHER_RATE = 2e-3
MUON_DECAY = 0.1
CLIP = 1.0

# Of a stacked weight: which dimensions are the inputs and which the outputs of its matrix; others are stacked matrices.
_MATRICES = {
    "q_a": MuonDimensionNumbers(2, 1),
    "q_b": MuonDimensionNumbers(3, (1, 2)),
    "kv_a": MuonDimensionNumbers(2, 1),
    "k_b": MuonDimensionNumbers(3, (1, 2)),
    "v_b": MuonDimensionNumbers(3, (1, 2)),
    "o": MuonDimensionNumbers((2, 3), 1),
    "proj": MuonDimensionNumbers(1, 0),
}


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(key.key for key in path)


def _dimension_numbers(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
    name = _path(path)[-1]
    if name == "gate_up":
        return MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)
    if name == "down":
        return MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)
    return _MATRICES.get(name)


def make_optimizer() -> optax.GradientTransformation:
    """Updates at a learning rate of 1; `Trainer.step` multiplies them by the rate of each parameter."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        muon(
            1.0,
            weight_decay=MUON_DECAY,
            adam_b1=0.9,
            adam_b2=0.95,
            muon_weight_dimension_numbers=lambda tree: jax.tree.map_with_path(_dimension_numbers, tree),
            consistent_rms=0.2,
        ),
    )


def learning_rate(path: tuple[str, ...]) -> float:
    """The rate of a parameter at the plateau."""
    if path[-1] == "router_bias":
        return 0.0
    if path[-1] == "embed":
        return EMBEDDING_RATE
    return MUON_RATE if path[-1] in (*_MATRICES, "gate_up", "down") else OTHER_RATE


class State(NamedTuple):
    """Everything that training changes."""

    params: model.Tree
    optimizer: Any
    step: jax.Array


class Knobs(NamedTuple):
    """What the schedule sets at each step, float32 each."""

    rate: jax.Array
    """Factor on all learning rates."""
    bias_rate: jax.Array
    """Step of the routers' biases (arXiv 2412.19437, section 2.1.2)."""
    mtp_weight: jax.Array


def initial_state(config: ModelConfig, seed: int) -> State:
    """Random parameters and an empty optimiser state."""
    params = model.initial_parameters(config, jax.random.key(seed))
    return State(params, make_optimizer().init(params), jnp.int32(0))


def train_step(
    state: State, batch: Any, knobs: Knobs, *, config: ModelConfig, dtype: Any, attention: model.Attention
) -> tuple[State, loss.Report, jax.Array]:
    """One step; also returns the norm of the gradient."""

    def compute(params):
        return loss.training_loss(params, batch, knobs.mtp_weight, config=config, dtype=dtype, attention=attention)

    (_, report), gradient = jax.value_and_grad(compute, has_aux=True)(state.params)
    updates, optimizer = make_optimizer().update(gradient, state.optimizer, state.params)
    params = jax.tree.map_with_path(
        lambda path, p, u: p + knobs.rate * learning_rate(_path(path)) * u, state.params, updates
    )
    load = report.load
    push = knobs.bias_rate * jnp.sign(jnp.mean(load, axis=1, keepdims=True) - load)
    params["moe"]["moe"]["router_bias"] += push[:-1]
    params["mtp"]["block"]["moe"]["router_bias"] += push[-1:]
    return State(params, optimizer, state.step + 1), report, optax.tree.norm(gradient)
