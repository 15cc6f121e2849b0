"""What is written to the cache: the jnp form against float64, and the kernel against the jnp form, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.kv_format import FORMATS
from jaxinfer.kernels.cache_write import cache_write
from jaxinfer.kernels.latents import QuantizedLatents, expand
from jaxinfer.kernels.mosaic import cache_write as mosaic
from tests.kernels.products import interpreted, lower_for_cuda

LAYERS, PAGES, PAGE, RANK, ROPE, EPS = 2, 3, 4, 512, 64, 1e-6
KINDS = ["bf16", "int8", "fp8_e4m3", "fp8_e5m2"]


def empty(kv: str, *lead: int):
    """Shapes of a cache of a format."""
    parts = FORMATS[kv].parts(RANK, ROPE)
    arrays = {name: jax.ShapeDtypeStruct((*lead, count), dtype) for name, (count, dtype) in parts.items()}
    return QuantizedLatents(**arrays) if FORMATS[kv].quantized else arrays["values"]


def operands(kv: str):
    """A cache of ones, and rows: large, small, of zeros; the fourth belongs to no page.

    Their numbers have so few bits that sums of squares are exact, in whatever order a machine adds them up.
    """
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), empty(kv, LAYERS, PAGES, PAGE))
    size = np.exp2([[0.0], [10.0], [-np.inf], [0.0], [-10.0]])
    latents = np.round(rng.normal(size=(5, RANK + ROPE)) * 16) / 16 * size
    page, offset = jnp.asarray([2, 0, 2, PAGES, 1], jnp.int32), jnp.asarray([1, 3, 0, 2, 0], jnp.int32)
    norm = jnp.asarray(rng.uniform(0.5, 2, size=RANK), jnp.bfloat16)
    angles = rng.uniform(0, 100, size=(5, ROPE // 2))
    tables = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    return cache, jnp.int32(1), page, offset, jnp.asarray(latents, jnp.bfloat16), norm, EPS, *tables


@pytest.mark.parametrize("kv", KINDS)
def test_rows_are_normalised_rotated_and_put_into_their_places(kv: str):
    cache, layer, page, offset, latents, norm, eps, cos, sin = operands(kv)
    written = cache_write(cache, layer, page, offset, latents, norm, eps, cos, sin)
    rows = np.asarray(expand(written, jnp.float32), np.float64)
    wide = np.asarray(latents.astype(jnp.float32), np.float64)
    latent, key = wide[:, :RANK], wide[:, RANK:]
    latent = latent / np.sqrt((latent**2).mean(1, keepdims=True) + EPS) * np.asarray(norm, np.float64)
    turned = (key[:, ::2] + 1j * key[:, 1::2]) * (np.asarray(cos) + 1j * np.asarray(sin))
    # Half a unit in the last place; of int8, and of the smallest fp8 numbers, half a step of the scale.
    bounds = {"bf16": (2**-8, 0), "int8": (0, 1 / 253), "fp8_e4m3": (2**-4, 1e-5), "fp8_e5m2": (2**-3, 1e-8)}
    relative, absolute = bounds[kv]
    for token in (0, 1, 2, 4):
        got = rows[1, page[token], offset[token]]
        bound = 1.001 * relative * np.abs(latent[token]) + absolute * np.abs(latent[token]).max()
        assert (np.abs(got[:RANK] - latent[token]) <= bound + 1e-7).all()
        np.testing.assert_allclose(got[RANK::2], turned[token].real, atol=2**-8 * np.abs(turned[token]).max())
        np.testing.assert_allclose(got[RANK + 1 :: 2], turned[token].imag, atol=2**-8 * np.abs(turned[token]).max())
    touched = np.zeros((LAYERS, PAGES, PAGE), bool)
    touched[1, np.asarray(page)[[0, 1, 2, 4]], np.asarray(offset)[[0, 1, 2, 4]]] = True
    assert (rows[~touched] == 1).all()


@pytest.mark.parametrize("kv", KINDS)
def test_the_kernel_writes_the_same_bits(kv: str, capsys: pytest.CaptureFixture):
    arguments = operands(kv)
    expected = jax.jit(cache_write, static_argnums=6)(*arguments)
    with interpreted(capsys):
        got = jax.block_until_ready(mosaic.cache_write(*arguments))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        one, other = (np.asarray(a).view(np.uint8).reshape(*a.shape[:3], -1) for a in (one, other))
        np.testing.assert_array_equal(one, other)


def test_what_the_kernel_does_not_take_is_refused():
    cache, _, _, _, latents, *_ = operands("bf16")
    assert mosaic.reason_against(cache, latents, RANK) is None
    assert mosaic.reason_against(operands("fp8_e4m3")[0], latents, RANK) is None
    assert mosaic.reason_against(cache.astype(jnp.float32), latents, RANK) is not None
    assert mosaic.reason_against(cache, latents.astype(jnp.float32), RANK) is not None
    assert mosaic.reason_against(cache, latents, RANK - 64) is not None
    with pytest.raises(ValueError, match="expected operands that the Mosaic cache_write takes"):
        cache_write(*operands("bf16")[:4], latents.astype(jnp.float32), *operands("bf16")[5:], implementation="mosaic")


@pytest.mark.parametrize("kv", KINDS)
def test_lowers_for_a_gpu_at_real_shapes(kv: str):
    """Of a cache with more than 2^31 numbers."""
    tokens = 8192
    integers = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    table = jax.ShapeDtypeStruct((tokens, ROPE // 2), jnp.float32)
    latents = jax.ShapeDtypeStruct((tokens, RANK + ROPE), jnp.bfloat16)
    norm, layer = jax.ShapeDtypeStruct((RANK,), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)

    def write(cache, layer, page, offset, latents, norm, cos, sin):
        return mosaic.cache_write(cache, layer, page, offset, latents, norm, EPS, cos, sin)

    lower_for_cuda(write, empty(kv, 61, 20000, 64), layer, integers, integers, latents, norm, table, table)
