"""The expert kernel against a loop over tokens, under kind and unkind routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.moe import moe_experts
from jaxinfer.kernels.reference import moe as reference

EXPERTS, HIDDEN, WIDTH = 5, 12, 7


def expected(x, experts, weights, gate_up, down):
    out = np.zeros_like(x)
    for t, (chosen, scales) in enumerate(zip(experts, weights, strict=True)):
        for expert, scale in zip(chosen, scales, strict=True):
            if 0 <= expert < EXPERTS:
                gate, up = gate_up[expert] @ x[t]
                out[t] += scale * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def routing(kind: str, rng: np.random.Generator, tokens: int) -> np.ndarray:
    if kind == "random":
        return np.stack([rng.permutation(EXPERTS)[:2] for _ in range(tokens)])
    if kind == "all to one":
        return np.stack([np.full(tokens, 3), np.full(tokens, EXPERTS)], axis=1)
    if kind == "one never":
        return np.stack([rng.permutation([0, 1, 3, 4])[:2] for _ in range(tokens)])
    if kind == "none here":
        return np.stack([np.full(tokens, -1), np.full(tokens, EXPERTS + 9)], axis=1)
    return np.stack([rng.permutation(np.arange(-EXPERTS, 2 * EXPERTS))[:2] for _ in range(tokens)])


@pytest.mark.parametrize("block", [1, 4, 128])
@pytest.mark.parametrize("tokens", [1, 9, 64])
@pytest.mark.parametrize("kind", ["random", "all to one", "one never", "none here", "partly elsewhere"])
def test_against_a_loop_over_tokens(kind: str, tokens: int, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "_BLOCK_ROWS", block)
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, HIDDEN))
    weights = rng.uniform(size=(tokens, 2))
    gate_up = rng.normal(size=(EXPERTS, 2, WIDTH, HIDDEN)) / 3
    down = rng.normal(size=(EXPERTS, HIDDEN, WIDTH)) / 3
    experts = routing(kind, rng, tokens)
    x32, w32, gu32, d32 = (jnp.asarray(array, jnp.float32) for array in (x, weights, gate_up, down))
    got = moe_experts(x32, jnp.asarray(experts, jnp.int32), w32, gu32[None], d32[None], 0)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected(x, experts, weights, gate_up, down), atol=3e-6)


def test_memory_does_not_depend_on_the_routing():
    """The shapes are static and the loop is bounded by data, so the compiled program is one for every routing."""
    tokens = 4096
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, 64), jnp.float32),
            ((tokens, 2), jnp.int32),
            ((tokens, 2), jnp.float32),
            ((1, 8, 2, 32, 64), jnp.float32),
            ((1, 8, 64, 32), jnp.float32),
            ((), jnp.int32),
        )
    ]
    memory = jax.jit(moe_experts).lower(*shapes).compile().memory_analysis()
    # Far below the tokens x experts-per-token rows of inputs that a sort into one buffer would take (2 MiB), let alone
    # a dense buffer for every expert: the output's copy, the sorted pairs and a block.
    assert memory.temp_size_in_bytes < 2.5 * tokens * 64 * 4
