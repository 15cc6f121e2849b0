"""Grouped products under kind and unkind histograms: reference, interpreted kernel, schedule, CUDA lowering."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxinfer import shapes as models
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.mosaic import grouped_gemm as mosaic
from jaxinfer.kernels.tiles import Tiles
from tests.kernels.products import FORMS, TWO_PROCESSORS, error, expected, interpreted, lower_for_cuda, operands, shapes

FLOAT32_ERROR = 1e-6
HISTOGRAMS = {
    "uneven": [70, 5, 0, 65, 1],
    "all to one": [0, 0, 0, 141, 0],
    "one row": [0, 1, 0, 0, 0],
    "none": [0, 0, 0, 0, 0],
    "rows left over": [3, 40, 0, 0, 21],
}
ROWS = 141


def expected_rows(arrays: tuple, sizes: list[int]) -> np.ndarray:
    x, w, x_scale, w_scale = arrays
    found, start = [np.zeros((0, w.shape[1]))], 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        scale = None if x_scale is None else x_scale[..., rows]
        found.append(expected(x[rows], w[group], scale, None if w_scale is None else w_scale[group]))
        start += size
    return np.concatenate(found)


product = jax.jit(functools.partial(grouped_gemm, out_dtype=jnp.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", HISTOGRAMS.values(), ids=HISTOGRAMS)
def test_reference_against_float64(form: str, sizes: list[int]):
    arrays = operands(form, ROWS, 64, 128, groups=5)
    x, w, x_scale, w_scale = arrays
    got = product(x, w, jnp.asarray(sizes, jnp.int32), x_scale, w_scale)
    reference = expected_rows(arrays, sizes)
    if len(reference):
        assert error(got[: len(reference)], reference) < FLOAT32_ERROR


INTERPRETED = [
    ("fp8 row", "uneven", Tiles(m=64, n=128, stages=2)),
    ("fp8 block", "uneven", Tiles(m=128, n=128, stages=2)),
    ("fp8 block", "all to one", Tiles(m=128, n=64, stages=2)),
    pytest.param("int8", "rows left over", Tiles(m=64, n=128, stages=2), marks=pytest.mark.slow),
    pytest.param("bf16", "one row", Tiles(m=64, n=128, stages=2), marks=pytest.mark.slow),
    ("fp8 row", "none", Tiles(m=64, n=128, stages=2)),
]


@pytest.mark.parametrize(("form", "histogram", "tiles"), INTERPRETED)
def test_kernel_against_float64(form: str, histogram: str, tiles: Tiles, capsys: pytest.CaptureFixture):
    sizes = HISTOGRAMS[histogram]
    arrays = operands(form, ROWS, 192, 128, groups=5)
    x, w, x_scale, w_scale = arrays
    with interpreted(capsys):
        got = mosaic.grouped_gemm(
            x,
            w,
            jnp.asarray(sizes, jnp.int32),
            x_scale,
            w_scale,
            out_dtype=jnp.float32,
            tiles=tiles,
            on=TWO_PROCESSORS,
        ).block_until_ready()
    reference = expected_rows(arrays, sizes)
    assert got.shape == (ROWS, 192)
    if len(reference):
        assert error(got[: len(reference)], reference) < FLOAT32_ERROR


@pytest.mark.parametrize("columns", [96, 160])
def test_parts_of_tiles_whose_columns_overlap(columns: int, capsys: pytest.CaptureFixture):
    """Widths that are no multiple of the 128 bytes in which bfloat16 rows of a part of a tile are stored."""
    sizes = HISTOGRAMS["uneven"]
    arrays = operands("bf16", ROWS, 192, 128, groups=5)
    x, w, _, _ = arrays
    tiles = Tiles(m=128, n=columns, stages=2)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    with interpreted(capsys):
        got = mosaic.grouped_gemm(
            x, w, group_sizes, None, None, out_dtype=jnp.bfloat16, tiles=tiles, on=TWO_PROCESSORS
        ).block_until_ready()
    reference = expected_rows(arrays, sizes)
    np.testing.assert_array_equal(got[: len(reference)], reference.astype(jnp.bfloat16))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=7, max_size=7),
    tile=st.sampled_from([64, 128, 192]),
    spare=st.integers(0, 9),
)
def test_schedule_covers_every_row_once(sizes: list[int], tile: int, spare: int):
    rows = 304  # One program for all examples: the sizes are data.
    table, count = scheduled(jnp.asarray(sizes, jnp.int32), rows, tile)
    table, count = np.asarray(table), int(count[0])
    assert count <= table.shape[1]
    owner = np.full(rows, -1)
    for group, row, first, last in table[:, :count].T:
        assert row % 8 == 0
        assert 0 <= first < last <= tile
        assert (owner[row + first : row + last] == -1).all()
        owner[row + first : row + last] = group
    np.testing.assert_array_equal(owner[: sum(sizes)], np.repeat(np.arange(7), sizes))
    assert (owner[sum(sizes) :] == -1).all()


scheduled = jax.jit(mosaic.schedule, static_argnums=(1, 2))


@pytest.mark.parametrize("tile", [64, 128, 192])
@pytest.mark.parametrize("size", [1, 2, 57, 58, 59, 122, 123, 128])
def test_schedule_has_room_for_the_worst_case(size: int, tile: int):
    """Equal groups that start as badly as they can."""
    sizes = np.full(50, size)
    sizes[0] = max(1, size - 1)
    table, count = scheduled(jnp.asarray(sizes, jnp.int32), int(sizes.sum()), tile)
    assert int(count[0]) <= table.shape[1]


def lower(form: str, m: int, n: int, k: int, groups: int, **kwargs) -> str:
    x, w, x_scale, w_scale = shapes(form, m, n, k, groups)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    return lower_for_cuda(
        functools.partial(grouped_gemm, implementation="mosaic", **kwargs), x, w, sizes, x_scale, w_scale
    )


@pytest.mark.parametrize("form", FORMS)
def test_lowers_for_cuda(form: str):
    """256 experts of DeepSeek-V3: 3.8 x 10^9 weights, and an odd number of rows."""
    assert "mosaic_gpu" in lower(form, 8197, 4096, 7168, 256)


PRODUCTS = sorted({(p.groups, p.n, p.k) for model in models.MODELS for p in models.products(model) if p.groups})


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [models.DECODE_ROWS[-1], 8 * models.PREFILL_ROWS])
@pytest.mark.parametrize(("groups", "n", "k"), PRODUCTS)
def test_products_of_the_models_lower(form: str, m: int, groups: int, n: int, k: int):
    lower(form, m, n, k, groups)


def test_operands_that_do_not_fit_are_refused():
    x, w, x_scale, w_scale = operands("fp8 row", 8, 64, 128, groups=2)
    with pytest.raises(ValueError, match=r"expected group_sizes int32 \[G\]"):
        grouped_gemm(x, w, jnp.zeros(3, jnp.int32), x_scale, w_scale)
    with pytest.raises(ValueError, match=r"expected w \[G, N, K\]"):
        grouped_gemm(x, w[0], jnp.zeros(2, jnp.int32), x_scale, w_scale)
    with pytest.raises(ValueError, match="x_scale and w_scale among"):
        grouped_gemm(x, w, jnp.zeros(2, jnp.int32), x_scale, w_scale[0])
    with pytest.raises(ValueError, match="expected 64 columns of a warpgroup or more for groups"):
        lower("fp8 row", 100, 64, 128, 2, tiles=Tiles(m=64, n=64, stages=2))
