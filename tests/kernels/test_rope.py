"""The rotary kernel against the jnp form, bit for bit, and its odd cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import rope as kernel
from jaxinfer.kernels.mosaic import rope as mosaic
from tests.kernels.products import interpreted, lower_for_cuda


def operands(tokens: int, heads: int, dim: int, pairs: int, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(tokens, heads, dim)), dtype)
    angles = rng.uniform(0, 100, size=(tokens, pairs))
    return x, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def test_reference_rotates_pairs_and_leaves_the_rest():
    x, cos, sin = operands(5, 3, 10, 2, jnp.float32)
    out = np.asarray(kernel.rope(x, cos, sin))
    np.testing.assert_array_equal(out[..., :6], x[..., :6])
    pairs = np.asarray(x, np.float64)[..., 6:].reshape(5, 3, 2, 2) @ np.array([1, 1j])
    turned = pairs * (np.asarray(cos) + 1j * np.asarray(sin))[:, None]
    np.testing.assert_allclose(out[..., 6::2] + 1j * out[..., 7::2], turned, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads, dim", [(4, 192), (12, 64)])
def test_kernel_gives_the_bits_of_the_reference(heads: int, dim: int, capsys: pytest.CaptureFixture):
    x, cos, sin = operands(3, heads, dim, 32)
    # What is next to the largest number, infinite, or none.
    x = x.at[0, 0, -4:].set(jnp.asarray([jnp.inf, 1, jnp.nan, 2], x.dtype)).at[1, 1, -1].set(jnp.finfo(x.dtype).max)
    with interpreted(capsys):
        out = jax.block_until_ready(mosaic.rope(x, cos, sin))
    expected = jax.jit(kernel.rope)(x, cos, sin)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


def test_what_the_kernel_does_not_take_is_refused():
    good, cos, sin = operands(2, 4, 192, 32)
    assert mosaic.reason_against(good, 32) is None
    for x, pairs in (
        (good.astype(jnp.float32), 32),
        (good[:, :3], 32),
        (good[..., :190], 32),
        (good, 16),
        (good[:0], 32),
    ):
        assert mosaic.reason_against(x, pairs) is not None
    with pytest.raises(ValueError, match="expected operands that the Mosaic rope takes"):
        kernel.rope(good.astype(jnp.float32), cos, sin, implementation="mosaic")


def test_lowers_for_a_gpu_at_real_shapes():
    queries = jax.ShapeDtypeStruct((8192, 128, 192), jnp.bfloat16)
    tables = [jax.ShapeDtypeStruct((8192, 32), jnp.float32)] * 2
    lower_for_cuda(mosaic.rope, queries, *tables)
