"""Quantised experts through grouped products: against a loop over tokens, in windows, in place in a stack of layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import grouped_moe
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.moe import moe_experts
from jaxinfer.kernels.mosaic import grouped_gemm as mosaic
from jaxinfer.kernels.quantized import Quantized, quantize_for, quantize_weight_like
from jaxinfer.kernels.tiles import Tiles
from tests.kernels.products import TWO_PROCESSORS, error, interpreted, operands
from tests.kernels.test_moe import routing
from tests.model.fake_quantized import Casts, multiplied_out

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 5, 256, 128
FORMS = {"fp8 row": ("fp8", "row"), "fp8 block": ("fp8", "block"), "int8": ("int8", "row")}


def weight(rng: np.random.Generator, form: str, *shape: int) -> Quantized:
    """Experts of all layers, quantised; `shape` of one expert."""
    kind, scheme = FORMS[form]
    stacked = (LAYERS, EXPERTS, *shape)
    rows = int(np.prod(shape[:-1]))
    scale = (*stacked[:2], rows // 128, shape[-1] // 128) if scheme == "block" else stacked[:-1]
    like = Quantized(
        jax.ShapeDtypeStruct(stacked, jnp.float8_e4m3fn if kind == "fp8" else jnp.int8),
        jax.ShapeDtypeStruct(scale, jnp.float32),
        scheme,
    )
    return quantize_weight_like(jnp.asarray(rng.normal(size=stacked) / np.sqrt(shape[-1]), jnp.float32), like)


def in_float64(x, experts, weights, gate_up, down, casts: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The loop over tokens; `x`, `gate_up` and `down` multiplied out."""
    out = np.zeros_like(x)
    for t, (chosen, factors) in enumerate(zip(experts, weights, strict=True)):
        for expert, factor in zip(chosen, factors, strict=True):
            if 0 <= expert < EXPERTS:
                gate, up = gate_up[expert] @ x[t]
                out[t] += factor * (down[expert] @ casts(gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [16384, 7, 1])
@pytest.mark.parametrize("kind", ["random", "all to one", "none here", "partly elsewhere"])
def test_against_a_loop_over_tokens(form: str, rows: int, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grouped_moe, "ROWS", rows)
    rng, tokens, layer = np.random.default_rng(rows), 9, 1
    gate_up, down = weight(rng, form, 2, WIDTH, HIDDEN), weight(rng, form, HIDDEN, WIDTH)
    x = quantize_for(gate_up, jnp.asarray(rng.normal(size=(tokens, HIDDEN)), jnp.float32))
    experts, weights = routing(kind, rng, tokens), rng.uniform(size=(tokens, 2)).astype(np.float32)
    got = moe_experts(x, jnp.asarray(experts, jnp.int32), jnp.asarray(weights), gate_up, down, jnp.int32(layer))
    blocks = FORMS[form][1] == "block"
    scale = np.asarray(x.scale).repeat(128, axis=1) if blocks else np.asarray(x.scale)[:, None]
    wide = np.asarray(x.values, np.float64) * scale
    weights_of = multiplied_out({"gate_up": gate_up, "down": down})
    casts = Casts(FORMS[form][0], blocks=blocks)
    reference = in_float64(wide, experts, weights, weights_of["gate_up"][layer], weights_of["down"][layer], casts)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference, atol=2e-6 * max(1.0, np.abs(reference).max()))


@pytest.mark.parametrize("rows", [16384, 7])
@pytest.mark.parametrize("kind", ["random", "all to one", "none here", "partly elsewhere"])
def test_experts_that_are_not_quantized(rows: int, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grouped_moe, "ROWS", rows)
    rng, tokens, layer = np.random.default_rng(rows), 9, 1

    def bfloat16(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(LAYERS, EXPERTS, *shape)) / np.sqrt(shape[-1]), jnp.bfloat16)

    gate_up, down = bfloat16(2, WIDTH, HIDDEN), bfloat16(HIDDEN, WIDTH)
    x = jnp.asarray(rng.normal(size=(tokens, HIDDEN)), jnp.bfloat16)
    experts, weights = routing(kind, rng, tokens), rng.uniform(size=(tokens, 2)).astype(np.float32)
    chosen = jnp.asarray(experts, jnp.int32)
    got = grouped_moe.grouped_moe_experts(x, chosen, jnp.asarray(weights), gate_up, down, layer, jnp.bfloat16)
    wide = [np.asarray(array, np.float64) for array in (x, gate_up[layer], down[layer])]
    reference = in_float64(wide[0], experts, weights, *wide[1:], lambda hidden: hidden)
    assert got.dtype == jnp.float32
    # What lies between the products is rounded to bfloat16, by up to 2^-9 of itself.
    assert np.linalg.norm(got - reference) <= 2.0**-8 * np.linalg.norm(reference)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_first_projection_that_is_not_quantized(dtype):
    rng, tokens, layer = np.random.default_rng(0), 9, 2
    shape = (LAYERS, EXPERTS, 2, WIDTH, HIDDEN)
    gate_up = jnp.asarray(rng.normal(size=shape) / np.sqrt(HIDDEN), dtype)
    down = weight(rng, "fp8 row", HIDDEN, WIDTH)
    x = jnp.asarray(rng.normal(size=(tokens, HIDDEN)), dtype)
    experts, weights = routing("random", rng, tokens), rng.uniform(size=(tokens, 2)).astype(np.float32)
    chosen = jnp.asarray(experts, jnp.int32)
    got = moe_experts(x, chosen, jnp.asarray(weights), gate_up, down, layer, dtype=jnp.dtype(dtype))
    wide, wide_gate_up = np.asarray(x, np.float64), np.asarray(gate_up[layer], np.float64)
    multiplied = multiplied_out({"down": down})["down"][layer]
    reference = in_float64(wide, experts, weights, wide_gate_up, multiplied, Casts("fp8"))
    # In bfloat16 gate and up are rounded before they are cast, so that some casts go another way.
    assert error(got, reference) < (1e-6 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("form", ["fp8 row", "fp8 block", "bf16"])
def test_groups_of_one_layer_in_the_weights_of_all(form: str, capsys: pytest.CaptureFixture):
    sizes = jnp.asarray([3, 0, 70], jnp.int32)
    x, w, x_scale, w_scale = operands(form, 80, 128, 128, groups=9)
    own = slice(3, 6)
    expected = grouped_gemm(x, w[own], sizes, x_scale, None if w_scale is None else w_scale[own])
    got = jax.jit(grouped_gemm)(x, w, sizes, x_scale, w_scale, first_group=jnp.int32(3))
    np.testing.assert_array_equal(got[:73], expected[:73])
    with interpreted(capsys):
        by_kernel = mosaic.grouped_gemm(
            x,
            w,
            sizes,
            x_scale,
            w_scale,
            first_group=jnp.int32(3),
            out_dtype=jnp.bfloat16,
            tiles=Tiles(m=64, n=128, stages=2),
            on=TWO_PROCESSORS,
        ).block_until_ready()
    assert error(by_kernel[:73], np.asarray(expected[:73], np.float64)) < 1e-3
