"""Matrix products: the reference against float64, the Mosaic kernel in the interpreter and lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import shapes as models
from jaxinfer.kernels import tiles as tile_choice
from jaxinfer.kernels.gemm import gemm
from jaxinfer.kernels.mosaic import gemm as mosaic
from jaxinfer.kernels.tiles import Problem, Tiles
from tests.kernels.products import FORMS, TWO_PROCESSORS, error, expected, interpreted, lower_for_cuda, operands, shapes
from tests.oracles import FIXTURES

FLOAT32_ERROR = 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_reference_against_float64(form: str):
    x, w, x_scale, w_scale = operands(form, 33, 192, 256)
    rng = np.random.default_rng(1)
    bias, residual = rng.normal(size=192), rng.normal(size=(33, 192))
    got = gemm(
        x,
        w,
        x_scale,
        w_scale,
        bias=jnp.asarray(bias, jnp.float32),
        residual=jnp.asarray(residual, jnp.float32),
        out_dtype=jnp.float32,
    )
    assert got.dtype == jnp.float32
    assert error(got, expected(x, w, x_scale, w_scale) + bias + residual) < FLOAT32_ERROR
    rounded = gemm(x, w, x_scale, w_scale)
    assert rounded.dtype == jnp.bfloat16
    assert error(rounded, expected(x, w, x_scale, w_scale)) < 3e-3


INTERPRETED = [
    # form, m, n, k, tiles: no side is a multiple of the tile where it need not be, and blocks take several tiles.
    pytest.param("fp8 row", 200, 192, 256, Tiles(m=128, n=128, stages=2), marks=pytest.mark.slow),
    ("fp8 row", 7, 320, 384, Tiles(m=64, n=128, stages=2)),
    ("fp8 block", 136, 320, 384, Tiles(m=128, n=192, stages=2)),
    ("fp8 block", 1, 256, 640, Tiles(m=64, n=128, stages=3)),
    ("int8", 130, 192, 256, Tiles(m=128, n=256, stages=2)),
    pytest.param("bf16", 130, 192, 192, Tiles(m=128, n=64, stages=3), marks=pytest.mark.slow),
    # Three tiles for two thread blocks: the third is cut in two.
    ("fp8 row", 300, 128, 384, Tiles(m=128, n=128, stages=2)),
    ("fp8 block", 260, 256, 256, Tiles(m=128, n=256, stages=2)),
    ("int8", 300, 128, 256, Tiles(m=128, n=128, stages=3)),
    ("fp8 block", 200, 192, 384, Tiles(m=192, n=128, stages=2)),
    pytest.param("fp8 row", 390, 128, 256, Tiles(m=192, n=128, stages=3), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("form", "m", "n", "k", "tiles"), INTERPRETED)
def test_kernel_against_float64(form: str, m: int, n: int, k: int, tiles: Tiles, capsys: pytest.CaptureFixture):
    arrays = operands(form, m, n, k)
    with interpreted(capsys):
        got = mosaic.gemm(
            *arrays, bias=None, residual=None, out_dtype=jnp.float32, tiles=tiles, on=TWO_PROCESSORS
        ).block_until_ready()
    assert got.shape == (m, n)
    assert error(got, expected(*arrays)) < FLOAT32_ERROR


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_kernel_adds_bias_and_residual(out_dtype, capsys: pytest.CaptureFixture):
    m, n = 140, 192
    arrays = operands("fp8 row", m, n, 256)
    rng = np.random.default_rng(1)
    bias = jnp.asarray(100 * rng.normal(size=n), jnp.float32)
    residual = jnp.asarray(100 * rng.normal(size=(m, n)), out_dtype)
    with interpreted(capsys):
        got = mosaic.gemm(
            *arrays,
            bias=bias,
            residual=residual,
            out_dtype=out_dtype,
            tiles=Tiles(m=128, n=64, stages=2),
            on=TWO_PROCESSORS,
        ).block_until_ready()
    reference = expected(*arrays) + np.asarray(bias, np.float64) + np.asarray(residual, np.float64)
    assert error(got, reference) < (FLOAT32_ERROR if out_dtype == jnp.float32 else 3e-3)


@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_recorded_products(scales: str, capsys: pytest.CaptureFixture):
    """Activations [64, 512] and weights [256, 384] as recorded: the product takes the first 384 columns."""
    oracle = np.load(FIXTURES / "quant_oracle.npz")
    x, w = (
        jnp.asarray(oracle[name].view(ml_dtypes.float8_e4m3fn)) for name in (f"fp8_b128_{scales}_q", f"w_{scales}_q")
    )
    x_scale, w_scale = (jnp.asarray(oracle[name]) for name in (f"fp8_b128_{scales}_s", f"w_{scales}_s"))
    k = w.shape[1]
    arrays = x[:, :k], w, x_scale[:, : k // 128].T, w_scale
    assert error(gemm(*arrays, out_dtype=jnp.float32), oracle[f"gemm_{scales}_y64"]) < FLOAT32_ERROR
    with interpreted(capsys):
        tiles = Tiles(m=64, n=128, stages=2)
        got = mosaic.gemm(
            *arrays, bias=None, residual=None, out_dtype=jnp.float32, tiles=tiles, on=TWO_PROCESSORS
        ).block_until_ready()
    assert error(got, oracle[f"gemm_{scales}_y64"]) < FLOAT32_ERROR


def lower(form: str, m: int, n: int, k: int, **kwargs) -> str:
    return lower_for_cuda(functools.partial(gemm, implementation="mosaic", **kwargs), *shapes(form, m, n, k))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [1, 130, 65536])
def test_lowers_for_cuda(form: str, m: int):
    """Odd numbers of rows, a column count that no tile divides, and more than 2^31 bytes of output."""
    assert "mosaic_gpu" in lower(form, m, 2112, 7168)
    if m == 65536:
        lower(form, m, 36864, 7168, out_dtype=jnp.float32)


PRODUCTS = sorted({(p.n, p.k) for model in models.MODELS for p in models.products(model) if p.groups is None})


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [*models.DECODE_ROWS, models.PREFILL_ROWS])
@pytest.mark.parametrize(("n", "k"), PRODUCTS)
def test_products_of_the_models_lower(form: str, m: int, n: int, k: int):
    lower(form, m, n, k)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [8, 128, 4096])
def test_every_candidate_fits_and_lowers(form: str, m: int):
    dtype, scheme = FORMS[form]
    problem = Problem(m=m, n=4096, k=512, dtype=jnp.dtype(dtype), out_dtype=jnp.dtype(jnp.bfloat16), scheme=scheme)
    found = tile_choice.candidates(problem)
    assert {tiles.m for tiles in found} >= {64, 128}
    assert tile_choice.choose(problem, tile_choice.device()) in found
    for tiles in found if m == 128 else ():
        lower(form, m, 4096, 512, tiles=tiles)


MEASURED = [
    # form, groups, m, n, k, tiles, microseconds: `docs/benchmarks/raw/2026-11-30-check-gemm-2-h200.txt`
    ("fp8 row", None, 8192, 4096, 7168, Tiles(m=192, n=128, stages=4), 339.5),
    ("fp8 row", None, 4096, 7168, 18432, Tiles(m=128, n=192, stages=4), 794.9),
    ("fp8 row", None, 4096, 4096, 7168, Tiles(m=128, n=160, stages=4), 187.5),
    ("int8", None, 4096, 4096, 7168, Tiles(m=128, n=256, stages=4), 146.1),
    ("bf16", None, 8192, 4096, 7168, Tiles(m=128, n=256, stages=4), 604.2),
    ("fp8 row", 32, 33792, 4096, 7168, Tiles(m=128, n=192, stages=4), 1504.8),
    ("fp8 row", 32, 1024, 4096, 7168, Tiles(m=64, n=256, stages=4), 227.9),
]


@pytest.mark.parametrize(("form", "groups", "m", "n", "k", "tiles", "microseconds"), MEASURED)
def test_model_of_time(form: str, groups: int | None, m: int, n: int, k: int, tiles: Tiles, microseconds: float):
    dtype, scheme = FORMS[form]
    problem = Problem(
        m=m, n=n, k=k, dtype=jnp.dtype(dtype), out_dtype=jnp.dtype(jnp.bfloat16), scheme=scheme, groups=groups
    )
    assert tile_choice.seconds(problem, tiles, tile_choice.device()) == pytest.approx(microseconds * 1e-6, rel=0.12)


def test_measured_tiles_come_before_the_models():
    tiles = {"m": 128, "n": 64, "stages": 3, "raster": 4}
    entry = {"dtype": "int8", "scheme": "row", "groups": None, "n": 4096, "k": 512, "m": 4096, "tiles": tiles}
    device = dataclasses.replace(tile_choice.device(), measured=[entry, {**entry, "m": 8192, "tiles": {}}])
    problem = Problem(m=4000, n=4096, k=512, dtype=jnp.dtype(jnp.int8), out_dtype=jnp.dtype(jnp.bfloat16), scheme="row")
    assert tile_choice.choose(problem, device) == Tiles(**tiles)
    for other in ({"m": 2048}, {"n": 2048}, {"groups": 4}, {"scheme": None}):
        changed = dataclasses.replace(problem, **other)
        assert tile_choice.choose(changed, device) in tile_choice.candidates(changed)


def test_tiles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected m = 128 or 192 and n % 32 = 0"):
        Tiles(m=96, n=64, stages=2)
    with pytest.raises(ValueError, match=r"expected tiles of at most .* bytes of shared memory"):
        lower("fp8 row", 256, 512, 512, tiles=Tiles(m=128, n=256, stages=5))


def test_operands_that_do_not_fit_are_refused():
    x, w, x_scale, w_scale = operands("fp8 row", 8, 64, 128)
    with pytest.raises(ValueError, match=r"x_scale and w_scale among .* got \(None, None\)"):
        gemm(x, w)
    with pytest.raises(ValueError, match="expected both operands"):
        gemm(x, w.astype(jnp.int8), x_scale, w_scale)
    with pytest.raises(ValueError, match="bias"):
        gemm(x, w, x_scale, w_scale, bias=jnp.zeros(3))
    with pytest.raises(ValueError, match="out_dtype"):
        gemm(x, w, x_scale, w_scale, out_dtype=jnp.float16)
    with pytest.raises(ValueError, match="N = 32 is no multiple of 64"):
        gemm(x, w[:32], x_scale, w_scale[:32], implementation="mosaic")
    with pytest.raises(ValueError, match="K = 64 is no multiple of 128"):
        gemm(x[:, :64], w[:, :64], x_scale, w_scale, implementation="mosaic")


def test_without_a_gpu_the_reference_runs_and_says_why(caplog: pytest.LogCaptureFixture):
    from jaxinfer.kernels import dispatch

    dispatch._log.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            jax.jit(lambda *arrays: gemm(*arrays))(*operands("fp8 row", 3, 64, 128))
    assert [r.message for r in caplog.records if "gemm" in r.message] == [
        "gemm: reference (the backend is cpu, not a GPU)"
    ]
