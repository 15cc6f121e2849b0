"""Rows on their way to their experts and back: the kernels in the interpreter against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.moe_rows import sum_rows, take_rows
from jaxinfer.kernels.mosaic import moe_rows as mosaic
from tests.kernels.products import interpreted, lower_for_cuda

COLUMNS = 1024


def numbers(rng: np.random.Generator, rows: int, dtype) -> jax.Array:
    values = jnp.asarray(100 * rng.normal(size=(rows, COLUMNS)), jnp.float32)
    return jnp.clip(values, -127, 127).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8, jnp.bfloat16])
@pytest.mark.parametrize("count", [0, 3, 7])
def test_rows_are_taken(dtype, count: int, capsys: pytest.CaptureFixture):
    rng = np.random.default_rng(count)
    x, index = numbers(rng, 5, dtype), rng.integers(0, 5, 7).astype(np.int32)
    index[count:] = 2**31 - 1  # nothing is read there
    with interpreted(capsys):
        got = mosaic.take_rows(x, jnp.asarray(index), jnp.int32(count))
    expected = take_rows(x, jnp.asarray(index), jnp.int32(count), implementation="reference")
    np.testing.assert_array_equal(*(np.asarray(a[:count], np.float32) for a in (got, expected)))
    np.testing.assert_array_equal(
        np.asarray(expected[:count], np.float32), np.asarray(x, np.float32)[index[:count]].reshape(-1, COLUMNS)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("count", [0, 5, 11])
def test_rows_are_summed_in_order(dtype, count: int, capsys: pytest.CaptureFixture):
    rng = np.random.default_rng(count)
    x = numbers(rng, 11, dtype).at[count:].set(jnp.nan)
    index = rng.integers(0, 14, (4, 3)).astype(np.int32)
    index[0] = 13  # a token without rows
    with interpreted(capsys):
        got = mosaic.sum_rows(x, jnp.asarray(index), jnp.int32(count))
    plain = sum_rows(x, jnp.asarray(index), jnp.int32(count), implementation="reference")
    expected = np.zeros((4, COLUMNS), np.float32)
    for token, rows in enumerate(index):
        for row in rows:
            if row < count:
                expected[token] += np.asarray(x[row], np.float32)
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(got, expected)


def test_the_real_shapes_lower():
    count = jax.ShapeDtypeStruct((), jnp.int32)
    for dtype in (jnp.float8_e4m3fn, jnp.int8, jnp.bfloat16):
        rows, index = jax.ShapeDtypeStruct((8192, 7168), dtype), jax.ShapeDtypeStruct((65536,), jnp.int32)
        lower_for_cuda(mosaic.take_rows, rows, index, count)
    for dtype in (jnp.bfloat16, jnp.float32):
        # More than 2^31 numbers.
        rows, index = jax.ShapeDtypeStruct((524288, 7168), dtype), jax.ShapeDtypeStruct((65536, 8), jnp.int32)
        lower_for_cuda(mosaic.sum_rows, rows, index, count)


def test_rows_that_do_not_fit_are_refused():
    assert "multiple" in (mosaic.reason_against(jnp.zeros((4, 100))) or "")
    assert "no rows" in (mosaic.reason_against(jnp.zeros((0, 512))) or "")
    with pytest.raises(ValueError, match="multiple"):
        take_rows(jnp.zeros((4, 100)), jnp.zeros(2, jnp.int32), jnp.int32(1), implementation="mosaic")
