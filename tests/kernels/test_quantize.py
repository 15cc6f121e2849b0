"""Quantisation, bit for bit against recorded patterns of the reference recipes, and its odd cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import quantize as kernel
from jaxinfer.kernels.mosaic import quantize as mosaic
from jaxinfer.kernels.reference import quantize as reference
from tests.kernels.products import interpreted, lower_for_cuda
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


def wide(q, scale) -> np.ndarray:
    return np.asarray(kernel.dequantize(q, scale, jnp.float32))


KINDS = [("row", jnp.float8_e4m3fn), ("block", jnp.float8_e4m3fn), ("row", jnp.int8)]


@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rounding_error_is_that_of_the_type(scheme: str, dtype, power_of_two: bool):
    """Half a unit in the last place: 2^-4 of a number in e4m3 (2^-10 of the scale below its normal range), half a
    scale in int8."""
    x = np.random.default_rng(0).normal(size=(24, 384)).astype(np.float32) * 10 ** np.linspace(-3, 3, 24)[:, None]
    x = x.astype(np.float32)
    q, scale = kernel.quantize(jnp.asarray(x), scheme=scheme, dtype=dtype, power_of_two=power_of_two)
    assert q.dtype == dtype
    assert scale.shape == ((24,) if scheme == "row" else (3, 24))
    if power_of_two:
        assert (np.frexp(np.asarray(scale))[0] == 0.5).all()
    spread = np.asarray(scale)[:, None] if scheme == "row" else np.repeat(np.asarray(scale).T, 128, 1)
    bound = spread * 0.5 if dtype == jnp.int8 else np.maximum(np.abs(x) * 2**-4, spread * 2**-10)
    assert (np.abs(wide(q, scale) - x) <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
def test_zeros_tiny_and_huge_numbers(scheme: str, dtype):
    x = np.zeros((4, 256), np.float32)
    x[1] = 1e-6  # below the smallest maximum that a scale is made for
    x[2, ::2] = 3e38
    x[3, 0], x[3, 1] = 448 * 127, -448 * 127
    q, scale = kernel.quantize(jnp.asarray(x), scheme=scheme, dtype=dtype)
    got = wide(q, scale)
    assert np.isfinite(got).all()
    assert (got[0] == 0).all()
    first = np.asarray(scale)[0] if scheme == "row" else np.asarray(scale)[0, 0]
    assert first == np.float32(1e-4) * np.float32(1 / (127 if dtype == jnp.int8 else 448))
    np.testing.assert_allclose(got[2:], x[2:], rtol=1e-6)


@pytest.mark.parametrize("scheme", ["row", "block"])
def test_a_nan_stays_one_in_e4m3(scheme: str):
    x = jnp.ones((2, 128)).at[0, 5].set(jnp.nan)
    q, _ = kernel.quantize(x, scheme=scheme)
    assert np.isnan(np.asarray(q.astype(jnp.float32))[0, 5])
    assert not np.isnan(np.asarray(q.astype(jnp.float32))[1]).any()


def test_int8_rounds_ties_to_even_and_is_symmetric():
    x = jnp.asarray([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.5]])
    q, scale = kernel.quantize(x, dtype=jnp.int8)
    assert float(scale[0]) == 1
    np.testing.assert_array_equal(q[0], [127, -127, 0, 2, 2, 0, -2, 64])


@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
def test_fused_forms_quantise_the_float32_result(scheme: str, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(9, 256)) * 3, jnp.bfloat16)
    weight = jnp.asarray(rng.uniform(0.5, 2, size=256), jnp.bfloat16)
    wide_x, wide_weight = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weight))
    normed = wide_x / np.sqrt((wide_x**2).mean(1, keepdims=True) + 1e-6) * wide_weight
    q, scale = kernel.rms_norm_quantize(x, weight, 1e-6, scheme=scheme, dtype=dtype)
    limit = 1.5e-2 if dtype == jnp.int8 else 4e-2  # About 0.9 % rms for bell-shaped rows, 2.6 % in e4m3.
    assert np.linalg.norm(wide(q, scale) - normed) < limit * np.linalg.norm(normed)
    _, expected = kernel.quantize(jnp.asarray(normed, jnp.float32), scheme=scheme, dtype=dtype)
    np.testing.assert_allclose(scale, expected, rtol=1e-6)

    gate, up = np.split(wide_x, 2, axis=1)
    hidden = gate / (1 + np.exp(-gate)) * up
    q, scale = kernel.swiglu_quantize(x, scheme=scheme, dtype=dtype)
    assert q.shape == (9, 128)
    assert np.linalg.norm(wide(q, scale) - hidden) < limit * np.linalg.norm(hidden)
    _, expected = kernel.quantize(jnp.asarray(hidden, jnp.float32), scheme=scheme, dtype=dtype)
    np.testing.assert_allclose(scale, expected, rtol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (300, 200), (128, 384)])
def test_weight_blocks_at_the_edges(rows: int, columns: int):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(rows, columns)), jnp.float32)
    q, scale = kernel.quantize_weight(w, scheme="block")
    assert q.shape == (rows, columns)
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    got = np.asarray(kernel.dequantize_weight(q, scale, jnp.float32))
    assert np.linalg.norm(got - w) < 4e-2 * np.linalg.norm(w)
    corner = w[(rows - 1) // 128 * 128 :, (columns - 1) // 128 * 128 :]
    assert np.asarray(scale)[-1, -1] == np.abs(np.asarray(corner)).max() * np.float32(1 / 448)


def test_what_cannot_be_quantised_is_refused():
    x = jnp.ones((2, 100))
    with pytest.raises(ValueError, match="K a multiple of 128"):
        kernel.quantize(x, scheme="block")
    with pytest.raises(ValueError, match="expected scheme 'row' for int8"):
        kernel.quantize(x, scheme="block", dtype=jnp.int8)
    with pytest.raises(ValueError, match="float8_e4m3fn or int8"):
        kernel.quantize(x, dtype=jnp.bfloat16)


@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_the_kernel_gives_the_recorded_bits(scales: str, capsys: pytest.CaptureFixture):
    with interpreted(capsys):
        q, scale = mosaic.quantize(
            jnp.asarray(ORACLE["x"]), scheme="block", dtype=jnp.float8_e4m3fn, power_of_two=scales == "ue8m0"
        )
        jax.block_until_ready((q, scale))
    np.testing.assert_array_equal(np.asarray(scale).T, ORACLE[f"fp8_b128_{scales}_s"])
    np.testing.assert_array_equal(bits(q), ORACLE[f"fp8_b128_{scales}_q"])


@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
@pytest.mark.parametrize("in_dtype", [jnp.bfloat16, jnp.float32])
def test_the_kernel_agrees_with_the_reference(scheme: str, dtype, in_dtype, capsys: pytest.CaptureFixture):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 1024)) * 10 ** np.linspace(-6, 3, 5)[:, None], in_dtype)
    weight = jnp.asarray(rng.uniform(0.5, 2, size=1024), jnp.bfloat16)
    kind = {"scheme": scheme, "dtype": dtype, "power_of_two": False}
    with interpreted(capsys):
        found = [
            mosaic.quantize(x, **kind),
            mosaic.rms_norm_quantize(x, weight, 1e-6, **kind),
            mosaic.swiglu_quantize(x, **kind),
        ]
        counted = mosaic.swiglu_quantize(x, jnp.int32(3), **kind)
        jax.block_until_ready((found, counted))
    np.testing.assert_array_equal(bits(counted[0])[:3], bits(found[2][0])[:3])
    wanted = [
        reference.quantize(x, **kind),
        reference.rms_norm_quantize(x, weight, 1e-6, **kind),
        reference.swiglu_quantize(x, **kind),
    ]
    q, scale = found[0]
    spread = np.asarray(scale)[:, None] if scheme == "row" else np.repeat(np.asarray(scale).T, 128, 1)
    # numpy divides exactly, where XLA may multiply by a reciprocal.
    quotient = np.asarray(x.astype(jnp.float32)) / spread
    np.testing.assert_array_equal(bits(q), bits((np.round(quotient) if dtype == jnp.int8 else quotient).astype(dtype)))
    for (q, scale), (wanted_q, wanted_scale) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(scale, wanted_scale, rtol=1e-6)
        # Rounded otherwise before: a number may fall on the other side of a border between two codes.
        assert (bits(q) != bits(wanted_q)).mean() < 2e-3


@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
@pytest.mark.parametrize("columns", [512, 7168, 18432])
def test_the_kernel_lowers_for_cuda(scheme: str, dtype, columns: int):
    kind = {"scheme": scheme, "dtype": dtype, "implementation": "mosaic"}
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((300_000, columns), (columns,)))
    wide_x = jax.ShapeDtypeStruct((4096, 2 * columns), jnp.bfloat16)
    for function, *operands in (
        (lambda x: kernel.quantize(x, **kind), x),
        (lambda x, weight: kernel.rms_norm_quantize(x, weight, 1e-6, **kind), x, weight),
        (lambda x: kernel.swiglu_quantize(x, **kind), wide_x),
    ):
        assert "mosaic_gpu" in lower_for_cuda(function, *operands)


def test_what_the_kernel_cannot_take_is_refused():
    with pytest.raises(ValueError, match="K = 200 is no multiple of 512"):
        kernel.quantize(jnp.ones((2, 200)), implementation="mosaic")
