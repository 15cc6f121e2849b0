"""Logits of a router: the kernel in the interpreter against float64, and lowered at real sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mosaic import router as mosaic
from jaxinfer.kernels.router import router_logits
from tests.kernels.interpreter import interpreted
from tests.kernels.products import error, lower_for_cuda

EPS = 1e-3
_run = jax.jit(mosaic.router_logits, static_argnames=("eps", "multiprocessors"))


def case(rows: int, experts: int, dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x`, `w` and `norm` of random numbers; rows and experts differ in size."""
    rng = np.random.default_rng(rows + experts + dim)
    x = rng.normal(size=(rows, dim)) * rng.uniform(0.1, 10, size=(rows, 1))
    w = rng.normal(size=(experts, dim)) * rng.uniform(0.1, 10, size=(experts, 1))
    norm = jnp.asarray(rng.uniform(0.5, 2, size=dim), jnp.bfloat16)
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), norm


def expected(x, w, norm) -> np.ndarray:
    x, w, norm = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w, norm))
    return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS) * norm @ w.T


CASES = {
    # rows, experts, numbers of a row, multiprocessors
    "rows that fill no thread block": (37, 64, 256, 2),
    "experts that fill no tile, K in parts of which the last is shorter": (5, 24, 224, 6),
    "several clusters": (300, 16, 64, 2),
    "two tiles of columns": (3, 272, 64, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_against_float64(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    rows, experts, dim, multiprocessors = CASES[name]
    operands = case(rows, experts, dim)
    with interpreted(capsys, monkeypatch):
        logits = jax.block_until_ready(_run(*operands, eps=EPS, multiprocessors=multiprocessors))
    assert logits.shape == (rows, experts) and logits.dtype == jnp.float32
    wanted = expected(*operands)
    # The rounding of a few float32 sums; products of bfloat16 in place of float16 would be 4e-6 away.
    assert error(logits, wanted) < 2e-7
    assert error(router_logits(*operands, EPS, implementation="reference"), wanted) < 5e-7


def test_parts_of_a_row_differ_in_size(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Numbers far outside the range of float16, small ones beside large ones, and zeros."""
    x, w, norm = case(12, 16, 128)
    sizes = 10.0 ** np.random.default_rng(0).uniform(-12, 12, size=(12, 4))
    sizes[0, 1], sizes[1], sizes[2] = 0, 0, 1e-20
    x = x * np.repeat(sizes, 32, axis=1).astype(np.float32)
    w = (w * np.geomspace(1e-12, 1e12, 16)[:, None].astype(np.float32)).at[3].set(0)
    with interpreted(capsys, monkeypatch):
        logits = np.asarray(_run(x, w, norm, eps=EPS, multiprocessors=2), np.float64)
    wanted = expected(x, w, norm)
    # Row by row and expert by expert, so that none hides behind the larger ones.
    size = np.linalg.norm(np.asarray(w * norm.astype(jnp.float32), np.float64), axis=1)
    np.testing.assert_allclose(logits / np.where(size, size, 1), wanted / np.where(size, size, 1), atol=1e-5)
    assert np.isfinite(logits).all() and not logits[1].any() and not logits[:, 3].any() and logits[2, 0]


def test_how_the_work_is_cut():
    """Parts of K where rows are few, all of them with steps."""
    for rows, parts in {1: 56, 256: 56, 1024: 16, 8192: 2, 65536: 1}.items():
        shape = mosaic._cut(rows, 7168, 256, 132)
        assert (shape.parts, shape.half, shape.tiles) == (parts, 128, 1)
        assert (shape.parts - 1) * shape.part < shape.steps <= shape.parts * shape.part
    assert mosaic._cut(64, 2048, 384, 132).columns == 384
    assert mosaic._cut(64, 2048, 24, 132).columns == 32


@pytest.mark.parametrize(
    ("rows", "experts", "dim"),
    [(300, 256, 7168), (512, 384, 7168), (8192, 256, 7168), (65536, 384, 7168), (8192, 64, 2048), (4096, 24, 4096)],
)
def test_the_real_shapes_lower(rows: int, experts: int, dim: int):
    shape = jax.ShapeDtypeStruct
    lowered = lower_for_cuda(
        functools.partial(router_logits, eps=EPS, implementation="mosaic"),
        shape((rows, dim), jnp.float32),
        shape((experts, dim), jnp.float32),
        shape((dim,), jnp.bfloat16),
    )
    assert "router_logits" in lowered


def test_operands_that_do_not_fit_are_refused():
    x, w, norm = case(256, 16, 64)
    run = functools.partial(router_logits, eps=EPS, implementation="mosaic")
    with pytest.raises(ValueError, match="x is bfloat16 and w float32, not float32"):
        run(x.astype(jnp.bfloat16), w, norm)
    with pytest.raises(ValueError, match="255 rows are fewer than 256"):
        run(x[:255], w, norm)
    with pytest.raises(ValueError, match="rows of 48 numbers are no multiple of 32"):
        run(x[:, :48], w[:, :48], norm[:48])
