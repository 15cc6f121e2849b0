"""The Triton kernels of quantisation: on a GPU their bits, elsewhere who gets them."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import dispatch
from jaxinfer.kernels import quantize as kernel
from tests.oracles import FIXTURES

KINDS = [("row", jnp.float8_e4m3fn), ("block", jnp.float8_e4m3fn), ("row", jnp.int8)]
ORACLE = np.load(FIXTURES / "quant_oracle.npz")


def bits(q) -> np.ndarray:
    return np.asarray(q).view(np.uint8)


def rounded(x: np.ndarray, scale, dtype) -> np.ndarray:
    """The codes of a true division; numpy's is one, where XLA may multiply by a reciprocal."""
    scale = np.asarray(scale)
    quotient = x / (scale[:, None] if scale.ndim == 1 else np.repeat(scale.T, 128, 1))
    return (np.round(quotient) if dtype == jnp.int8 else quotient).astype(dtype)


@pytest.fixture
def jax_triton():
    return pytest.importorskip("jax_triton", reason="needs the extra triton")


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_blocks_have_the_recorded_bits(scales: str, jax_triton):
    q, scale = kernel.quantize(
        jnp.asarray(ORACLE["x"]), scheme="block", power_of_two=scales == "ue8m0", implementation="triton"
    )
    np.testing.assert_array_equal(np.asarray(scale).T, ORACLE[f"fp8_b128_{scales}_s"])
    np.testing.assert_array_equal(bits(q), ORACLE[f"fp8_b128_{scales}_q"])


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("in_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("columns", [128, 1408, 7168, 18432])
def test_the_bits_are_those_of_a_division(scheme: str, dtype, power_of_two: bool, in_dtype, columns: int, jax_triton):
    """Of rows of all sizes, zeros of both signs, and numbers in the middle between two codes, where the last bit of a
    quotient decides."""
    x = np.random.default_rng(0).normal(size=(67, columns)) * 10 ** np.linspace(-8, 6, 67)[:, None]
    x[1, ::2] = 3e38
    x[2], x[2, 1::2] = 0.0, -0.0
    codes = np.arange(128.0) if dtype == jnp.int8 else np.arange(127, dtype=np.uint8).view(dtype).astype(np.float64)
    scales = np.arange(1, 33)[:, None] / 16
    x[3:35] = scales * np.resize((codes[1:] + codes[:-1]) / 2, columns)
    x[3:35, ::128] = scales * codes[-1]
    x = jnp.asarray(x, in_dtype)
    kind = {"scheme": scheme, "dtype": dtype, "power_of_two": power_of_two}
    q, scale = kernel.quantize(x, **kind, implementation="triton")
    _, wanted_scale = kernel.quantize(x, **kind, implementation="reference")
    np.testing.assert_array_equal(scale, wanted_scale)
    np.testing.assert_array_equal(bits(q), bits(rounded(np.asarray(x, np.float32), scale, dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
def test_what_is_not_finite(scheme: str, dtype, jax_triton):
    """A NaN, and an infinity over an infinite scale, stay NaN in e4m3 and become 0 in int8."""
    x = jnp.ones((3, 256)).at[0, 5].set(jnp.nan).at[1, 7].set(-jnp.inf)
    q, _ = kernel.quantize(x, scheme=scheme, dtype=dtype, implementation="triton")
    q = np.asarray(q.astype(jnp.float32))
    if dtype == jnp.int8:
        assert (q[:2] == 0).all() and (q[2] == 127).all()
    else:
        assert np.isnan(q[0, 5]) and np.isnan(q[1, 7]) and (np.delete(q[1, :128], 7) == 0).all()
        assert (q[2] == 448).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "dtype"), KINDS)
@pytest.mark.parametrize("in_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("columns", [256, 1408, 7168])
def test_the_fused_forms_agree_with_the_reference(scheme: str, dtype, in_dtype, columns: int, jax_triton):
    """But for the last bits of norm and sigmoid: a number may fall on the other side of a border between two codes."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(37, 2 * columns)) * 10 ** np.linspace(-6, 3, 37)[:, None], in_dtype)
    weight = jnp.asarray(rng.uniform(0.5, 2, size=columns), jnp.bfloat16)
    results = {}
    for form in ("triton", "reference"):
        kind = {"scheme": scheme, "dtype": dtype, "implementation": form}
        results[form] = [
            kernel.rms_norm_quantize(x[:, :columns], weight, 1e-6, **kind),
            kernel.swiglu_quantize(x, **kind),
        ]
    for (q, scale), (wanted_q, wanted_scale) in zip(results["triton"], results["reference"], strict=True):
        np.testing.assert_allclose(scale, wanted_scale, rtol=2e-6)
        assert (bits(q) != bits(wanted_q)).mean() < 2e-3


@pytest.mark.gpu
def test_rows_beyond_the_count_are_left_alone(jax_triton):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 1024)), jnp.bfloat16)
    whole, whole_scale = kernel.swiglu_quantize(x, implementation="triton")
    counted = jax.jit(lambda x, count: kernel.swiglu_quantize(x, count, implementation="triton"))
    for count in (0, 1, 37, 64):
        q, scale = counted(x, jnp.int32(count))
        np.testing.assert_array_equal(bits(q)[:count], bits(whole)[:count])
        np.testing.assert_array_equal(scale[:count], whole_scale[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["row", "block"])
def test_rows_beyond_2_to_the_31_numbers(scheme: str, jax_triton):
    x = jax.random.normal(jax.random.key(0), (300_008, 7168), jnp.bfloat16)
    q, scale = kernel.quantize(x, scheme=scheme, implementation="triton")
    border = 2**31 // 7168
    for part in (slice(border - 4, border + 4), slice(-4, None)):
        wanted, wanted_scale = kernel.quantize(x[part], scheme=scheme, implementation="triton")
        np.testing.assert_array_equal(bits(q[part]), bits(wanted))
        np.testing.assert_array_equal(scale[..., part], wanted_scale)


def hopper(monkeypatch: pytest.MonkeyPatch, installed: bool, by_default: tuple[dispatch.Kernel, ...] = ("mosaic",)):
    """As on a Hopper GPU, with Triton installed or not."""
    monkeypatch.setattr(dispatch, "_no_hopper", lambda: None)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(dispatch, "BY_DEFAULT", {"quantize": by_default})


AGAINST = ({"mosaic": None, "triton": None}, {"mosaic": "K is odd", "triton": None}, {"mosaic": "a", "triton": "b"})


@pytest.mark.parametrize(
    ("by_default", "installed", "wanted"),
    [
        (("mosaic",), True, ("mosaic", "reference", "reference")),
        (("mosaic", "triton"), True, ("mosaic", "triton", "reference")),
        (("mosaic", "triton"), False, ("mosaic", "reference", "reference")),
        (("triton", "mosaic"), True, ("triton", "triton", "reference")),
        (("triton", "mosaic"), False, ("mosaic", "reference", "reference")),
    ],
)
def test_the_first_kernel_that_can_runs(by_default, installed: bool, wanted, monkeypatch: pytest.MonkeyPatch):
    hopper(monkeypatch, installed, by_default)
    assert tuple(dispatch.choose("quantize", None, dict(against)) for against in AGAINST) == wanted
    # Operations that are not named go on as before.
    assert [dispatch.choose("gemm", None, reason) for reason in (None, "K is odd")] == ["mosaic", "reference"]


def test_without_a_gpu_no_kernel_runs_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: True)
    monkeypatch.setattr(dispatch, "BY_DEFAULT", {"quantize": ("triton", "mosaic")})
    monkeypatch.setattr(dispatch, "_no_hopper", lambda: "the backend is cpu, not a GPU")
    assert dispatch.choose("quantize", None, {"mosaic": None, "triton": None}) == "reference"


def test_triton_by_name(monkeypatch: pytest.MonkeyPatch):
    hopper(monkeypatch, installed=True)
    assert dispatch.choose("quantize", "triton", {"mosaic": "K is odd", "triton": None}) == "triton"
    with pytest.raises(ValueError, match="operands that the Triton quantize takes: K is large"):
        dispatch.choose("quantize", "triton", {"mosaic": None, "triton": "K is large"})
    with pytest.raises(ValueError, match="gemm: expected implementation mosaic or reference, got triton"):
        dispatch.choose("gemm", "triton", None)
    with pytest.raises(ValueError, match="K = 32769 is not between 1 and 32768"):
        kernel.quantize(jnp.ones((2, 32769)), implementation="triton")
    with pytest.raises(ValueError, match="the numbers are float16"):
        kernel.quantize(jnp.ones((2, 128), jnp.float16), implementation="triton")
    with pytest.raises(ValueError, match="there are no rows"):
        kernel.quantize(jnp.ones((0, 128)), implementation="triton")


def test_without_jax_triton_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: True if name == "triton" else None)
    x = jnp.ones((2, 512))
    for run in (
        lambda: kernel.quantize(x, implementation="triton"),
        lambda: kernel.rms_norm_quantize(x, jnp.ones(512), 1e-6, implementation="triton"),
        lambda: kernel.swiglu_quantize(x, jnp.int32(1), implementation="triton"),
    ):
        with pytest.raises(ValueError, match=r"needs: jax_triton, not installed \(pip install 'jaxinfer\[triton\]'\)"):
            run()


def test_quantisation_is_imported_without_triton():
    program = "import sys, jaxinfer.kernels.quantize; assert not {'triton', 'jax_triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
