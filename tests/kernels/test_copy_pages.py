"""Pages of a cache one after the other: the kernel in the interpreter against the plain form, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mosaic import copy_pages as mosaic
from jaxinfer.kernels.pages import copy_pages
from tests.kernels.products import interpreted, lower_for_cuda

CASES = {
    "latents": (jnp.bfloat16, (64, 576)),
    "wide": (jnp.float32, (64, 320)),
    "index": (jnp.float8_e4m3fn, (16, 64)),
    "bytes": (jnp.int8, (64, 512)),
    "scales": (jnp.float32, (64, 4)),
}
LAYERS, PAGES = 2, 5


def cache(name: str) -> jax.Array:
    dtype, page = CASES[name]
    rng = np.random.default_rng(len(name))
    return jnp.asarray(rng.integers(-100, 100, (LAYERS, PAGES, *page)), dtype)


@pytest.mark.parametrize("name", CASES)
def test_pages_are_taken(name: str, capsys: pytest.CaptureFixture):
    array = cache(name)
    pages = jnp.asarray([3, 0, 4, 4, 1, 2, 3, 0, 1, 4, 2], jnp.int32)
    with interpreted(capsys):
        # Fewer thread blocks than pieces: each copies more than it has places for.
        got = mosaic.copy_pages(array, jnp.int32(1), pages, jnp.int32(11), multiprocessors=1)
    np.testing.assert_array_equal(got, copy_pages(array, jnp.int32(1), pages, implementation="reference"))
    np.testing.assert_array_equal(got, np.asarray(array)[1, np.asarray(pages)])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_only_those_that_are_wanted(count: int, capsys: pytest.CaptureFixture):
    array = cache("index")
    pages = jnp.asarray([[3, 0], [4, 2]], jnp.int32)
    with interpreted(capsys):
        got = mosaic.copy_pages(array, jnp.int32(0), pages, jnp.int32(count), multiprocessors=2)
    assert got.shape == (2, 2, 16, 64)
    wanted = np.asarray(array)[0, np.asarray(pages).reshape(-1)]
    np.testing.assert_array_equal(np.asarray(got).reshape(4, 16, 64)[:count], wanted[:count])


def test_pages_out_of_range_are_the_nearest():
    array = cache("index")
    got = copy_pages(array, jnp.int32(1), jnp.asarray([9, -2, 1], jnp.int32))
    np.testing.assert_array_equal(got, np.asarray(array)[1, [4, 0, 1]])


def test_what_the_kernel_does_not_take_is_refused():
    pages = jnp.zeros(3, jnp.int32)
    assert mosaic.reason_against(cache("latents"), pages) is None
    assert "256 bytes" in str(mosaic.reason_against(jnp.zeros((2, 5, 2, 16, 2), jnp.int32), pages))
    assert "multiples of 128" in str(mosaic.reason_against(jnp.zeros((2, 5, 24, 27), jnp.bfloat16), pages))
    assert mosaic.reason_against(cache("latents"), pages[:0]) is not None
    with pytest.raises(ValueError, match="256 bytes"):
        copy_pages(jnp.zeros((2, 5, 2, 16, 2), jnp.int32), jnp.int32(0), pages, implementation="mosaic")


@pytest.mark.parametrize("name", CASES)
def test_the_real_shapes_lower(name: str):
    dtype, page = CASES[name]
    # More than 2^31 numbers: 61 layers of a million tokens.
    array = jax.ShapeDtypeStruct((61, 16384, *page), dtype)
    pages, scalar = jax.ShapeDtypeStruct((16384,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    lower_for_cuda(mosaic.copy_pages, array, scalar, pages, scalar)
