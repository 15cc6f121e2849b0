"""The index of the first level: what projections keep of a product, and that they follow from the weights alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint.random import random_parameters
from jaxinfer.configs.model import ModelConfig
from jaxinfer.configs.presets import preset
from jaxinfer.kernels.selection.index import TYPE, group_index, projections, query_index
from jaxinfer.model.index import _moments, index_projections
from jaxinfer.model.precision import Precision
from jaxinfer.model.transformer import parameter_specs
from jaxinfer.sharding.mesh import make, parse
from jaxinfer.sharding.rules import Rules
from tests.selection import slow


def sample(seed: int, count: int, size: int) -> np.ndarray:
    """Vectors `[count, size]` of which some directions are longer than others."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, size)) @ np.diag(0.9 ** np.arange(size)) @ rng.standard_normal((size, size))


def test_a_whole_index_keeps_every_product():
    q, k = sample(0, 300, 24), sample(1, 300, 24)
    keys, queries = projections(q.T @ q, k.T @ k, 24)
    np.testing.assert_allclose((q @ queries) @ (k @ keys).T, q @ k.T, rtol=1e-6, atol=1e-6 * np.abs(q @ k.T).max())


@pytest.mark.parametrize("size", [2, 8])
def test_a_part_is_off_least_of_all_products_of_its_rank(size: int):
    q, k = sample(2, 400, 24), sample(3, 400, 24)
    keys, queries = projections(q.T @ q, k.T @ k, size)
    exact = q @ k.T
    left, singular, right = np.linalg.svd(exact)
    best = (left[:, :size] * singular[:size]) @ right[:size]
    np.testing.assert_allclose((q @ queries) @ (k @ keys).T, best, atol=1e-6 * np.abs(exact).max())


def test_directions_that_nobody_uses_are_left_out():
    q, k = sample(4, 100, 16), sample(5, 100, 16)
    q[:, 6:] = 0
    k[:, 3:6] = 0
    keys, queries = projections(q.T @ q, k.T @ k, 8)
    assert keys[:, :3].any() and queries[:, :3].any() and not keys[:, 3:].any() and not queries[:, 3:].any()
    np.testing.assert_allclose((q @ queries) @ (k @ keys).T, q @ k.T, atol=1e-6 * np.abs(q @ k.T).max())
    assert not np.concatenate(projections(np.zeros((4, 4)), np.eye(4), 2)).any()


def test_groups_are_means_of_projected_latents():
    rng = np.random.default_rng(6)
    latents, projection = rng.standard_normal((5, 24, 12)), rng.standard_normal((12, 4))
    found = group_index(jnp.asarray(latents, jnp.float32), jnp.asarray(projection, jnp.float32), 8)
    wanted = slow.e4m3((latents @ projection).reshape(5, 3, 8, 4).mean(axis=2))
    assert found.dtype == TYPE
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted)


def test_what_e4m3_cannot_hold_is_its_largest():
    latents = jnp.array([[448.0, 463, 465, 1e9, -1e38, 2.0**-10 * 1.01, 2.0**-10, 0]])
    index = group_index(latents, jnp.eye(8), 1).astype(jnp.float32)
    assert index[0].tolist() == [448, 448, 448, 448, -448, 2.0**-9, 0, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_queries_are_rounded_over_a_power_of_two_each(dtype):
    rng = np.random.default_rng(8)
    q = rng.standard_normal((6, 40, 4)) * 10.0 ** rng.integers(-8, 9, (6, 40, 1))
    q[0, :3] = [28, -14, 3, 0], [14, 0, 0, 0], [14.001, 0, 0, 0]
    q = jnp.asarray(q, dtype)
    values, scale = query_index(q, jnp.eye(4, dtype=dtype))
    assert values.dtype == TYPE and scale.dtype == jnp.float32 and scale.shape == q.shape[:2]
    assert (jnp.frexp(scale)[0] == 0.5).all()
    found = np.asarray(values, np.float64)
    largest = np.abs(found).max(axis=2)
    assert (largest >= 14).all() and (largest <= 28).all()
    np.testing.assert_array_equal(found * scale[..., None], slow.rounded_queries(np.asarray(q, np.float64)))
    values, scale = query_index(jnp.zeros((1, 4), dtype), jnp.eye(4, dtype=dtype))
    assert not values.astype(jnp.float32).any() and np.isfinite(scale).all()


def test_numbers_of_keys_are_of_unit_size_and_products_as_they_were():
    """Whatever the sizes of queries and keys: powers of two move from one to the other."""
    q, k = sample(10, 300, 24), sample(11, 300, 24)
    found = []
    for q_size, k_size in ((1, 1), (1e-3, 1e4), (37, 0.01)):
        keys, queries = projections((q * q_size).T @ (q * q_size), (k * k_size).T @ (k * k_size) / len(k), 8)
        size = np.sqrt(np.mean((k * k_size @ keys) ** 2, axis=0))
        assert (size > 1 - 1e-9).all() and (size < 2 + 1e-9).all()
        found.append((q @ queries) @ (k @ keys).T)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-6 * np.abs(found[0]).max())


SMALL = {"num_layers": 3, "num_heads": 4, "kv_lora_rank": 24, "hidden_size": 64}


@pytest.fixture(scope="module")
def weights() -> tuple[ModelConfig, dict]:
    config, shape = preset("tiny-random", SMALL), parse("")
    precision = Precision.named("fp32", config, jnp.dtype(jnp.float32), first_ffn=True)
    specs = parameter_specs(config, Rules(shape), make(shape), precision)
    return config, random_parameters(specs, config)


def test_moments_are_those_of_queries_and_latents(weights):
    """Of normalised inputs that have no favourite direction, however far each rotary pair has turned."""
    config, params = weights
    rng = np.random.default_rng(7)
    group = params["moe"]
    layer = jax.tree.map(lambda array: np.asarray(array[0], np.float64), group["attention"] | {"n": group["attn_norm"]})
    layer |= {name: rng.uniform(0.5, 2, layer[name].shape) for name in ("n", "q_a_norm", "kv_a_norm")}
    given = {("attn_norm" if name == "n" else name): jnp.asarray(array, jnp.float32) for name, array in layer.items()}
    of_queries, of_keys = _moments(given, config)

    count, nope, rank = 30000, config.qk_nope_head_dim, config.kv_lora_rank
    angles = rng.uniform(0, 2 * np.pi, (count, config.qk_rope_head_dim // 2))

    def rotated(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = (turn(angles).reshape(count, *[1] * (x.ndim - 2), -1) for turn in (np.cos, np.sin))
        return np.stack((even * c - odd * s, even * s + odd * c), axis=-1).reshape(x.shape)

    x = rng.standard_normal((count, config.hidden_size)) * layer["n"]
    kv = x @ layer["kv_a"].T
    latent = kv[:, :rank] / np.sqrt(np.mean(kv[:, :rank] ** 2, axis=1, keepdims=True)) * layer["kv_a_norm"]
    keys = np.concatenate((latent, rotated(kv[:, rank:])), axis=1)
    u = rng.standard_normal((count, layer["q_a_norm"].size)) * layer["q_a_norm"]
    q = np.einsum("tk,hqk->thq", u, layer["q_b"])
    absorbed = np.einsum("thn,hnc->thc", q[..., :nope], layer["k_b"])
    queries = np.concatenate((absorbed, rotated(q[..., nope:])), axis=2)
    for ours, rows in ((of_keys, keys), (of_queries, queries.reshape(-1, queries.shape[2]))):
        wanted = rows.T @ rows / count
        # A latent is divided by its own norm, not by the mean of all: 5 % with 24 numbers, less with more.
        assert np.linalg.norm(ours - wanted) < 0.08 * np.linalg.norm(wanted)


@pytest.mark.parametrize("mesh", ["cp=8", "tp=2,cp=2", "cp=2,ep=2"])
def test_every_mesh_has_the_same_projections(weights, mesh: str):
    config, params = weights
    shape = parse(mesh)
    rules, devices = Rules(shape, shard_dense=True), make(shape)
    precision = Precision.named("fp32", config, jnp.dtype(jnp.float32), first_ffn=True)
    specs = parameter_specs(config, rules, devices, precision)
    divided = jax.tree.map(lambda array, spec: jax.device_put(np.asarray(array), spec.sharding), params, specs)
    alone = index_projections(params, config, 8, jnp.dtype(jnp.float32), make(parse("")))
    for one, other in zip(alone, index_projections(divided, config, 8, jnp.dtype(jnp.float32), devices), strict=True):
        assert one.shape == (config.num_layers, config.latent_dim, 8)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("kind", "block"), [("fp8", None), ("fp8", (128, 128)), ("int8", None)])
def test_quantised_weights_have_nearly_the_same_moments(kind: str, block: tuple[int, int] | None):
    sizes = {"hidden_size": 128, "q_lora_rank": 128, "kv_lora_rank": 112, "weight_block_size": block}
    config, shape = preset("tiny-random", SMALL | sizes), parse("")
    found = []
    for name in ("fp32", kind):
        precision = Precision.named(name, config, jnp.dtype(jnp.float32), first_ffn=True)
        params = random_parameters(parameter_specs(config, Rules(shape), make(shape), precision), config)["moe"]
        attention = jax.tree.map(lambda array: array[1], params["attention"])
        found.append(_moments(attention | {"attn_norm": params["attn_norm"][1]}, config))
    for plain, quantised in zip(*found, strict=True):
        assert 0 < np.linalg.norm(quantised - plain) < 0.05 * np.linalg.norm(plain)
