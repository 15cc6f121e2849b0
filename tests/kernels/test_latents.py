"""The formats of the latent cache: what is written, and what attention reads of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.configs.kv_format import FORMATS
from jaxinfer.kernels.cache_write import cache_write
from jaxinfer.kernels.latents import QuantizedLatents, expand, quantize_latents, take_pages
from jaxinfer.kernels.mla_decode import mla_decode

RANK, ROPE, PAGE = 256, 16, 8
# Largest error of rounding, relative to what is rounded and to the largest number under its scale.
ROUNDING = {"fp32": (0.0, 0.0), "bf16": (2**-8, 0.0), "int8": (0.0, 0.5 / 127)}
ROUNDING |= {"fp8_e4m3": (2**-4, 2**-10 / 448), "fp8_e5m2": (2**-3, 2**-17 / 57344)}


def empty(name: str, pages: int = 4) -> jax.Array | QuantizedLatents:
    """A cache of two layers, NaN throughout (zero where the type has none)."""
    arrays = {}
    for part, (count, dtype) in FORMATS[name].parts(RANK, ROPE).items():
        fill = 0 if dtype == "int8" else jnp.nan
        arrays[part] = jnp.full((2, pages, PAGE, count), fill, jnp.dtype(dtype))
    return QuantizedLatents(**arrays) if FORMATS[name].quantized else arrays["values"]


def written(latents: np.ndarray, norm: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """What `cache_write` is to write, in float64."""
    latent, key = latents[:, :RANK], latents[:, RANK:]
    latent = latent / np.sqrt(np.mean(latent**2, axis=1, keepdims=True) + 1e-6) * norm
    pairs = key.reshape(len(key), -1, 2) @ np.array([1, 1j])
    turned = pairs * np.exp(1j * angle)
    return np.concatenate((latent, np.stack((turned.real, turned.imag), -1).reshape(len(key), -1)), axis=1)


@pytest.mark.parametrize("name", FORMATS)
def test_write_then_read(name: str):
    rng = np.random.default_rng(0)
    # Rows of very different size and a column of outliers.
    latents = rng.normal(size=(5, RANK + ROPE)) * np.array([1e-3, 1, 1, 30, 1])[:, None]
    norm = rng.normal(1, 0.2, RANK)
    norm[7] = 12
    angle = rng.uniform(0, 6, (5, ROPE // 2))
    page, offset = np.array([2, 2, 0, 9, 3], np.int32), np.array([0, 5, 7, 1, 3], np.int32)
    floats = [jnp.asarray(x, jnp.float32) for x in (latents, norm, np.cos(angle), np.sin(angle))]
    places = jnp.asarray(page), jnp.asarray(offset)
    cache = cache_write(empty(name), jnp.int32(1), *places, floats[0], floats[1], 1e-6, *floats[2:])
    got = np.asarray(expand(take_pages(cache, jnp.int32(1), jnp.arange(4)), jnp.float32), np.float64)
    wanted = written(latents, norm, angle)
    relative, absolute = ROUNDING[name]
    groups = dict(FORMATS[name].parts(RANK, ROPE)).get("scale", (1, ""))[0]
    for row, (p, o) in enumerate(zip(page, offset, strict=True)):
        if p < 4:
            parts = wanted[row, :RANK].reshape(groups, -1)
            largest = np.repeat(np.max(np.abs(parts), axis=1), RANK // groups)
            bound = relative * np.abs(wanted[row, :RANK]) + absolute * largest
            slack = 1e-5 * np.abs(wanted[row]).max()
            assert np.all(np.abs(got[p, o, :RANK] - wanted[row, :RANK]) <= bound + slack)
            key_bound = (0 if name == "fp32" else 2**-8) * np.abs(wanted[row, RANK:])
            assert np.all(np.abs(got[p, o, RANK:] - wanted[row, RANK:]) <= key_bound + slack)
    # The token of a page that is not there, the rest of the pages and the other layer are left alone.
    untouched = np.ones((4, PAGE), bool)
    untouched[page[page < 4], offset[page < 4]] = False
    assert np.all(np.isnan(got[untouched]))
    assert np.all(np.isnan(expand(take_pages(cache, jnp.int32(0), jnp.arange(4)), jnp.float32)))


def test_token_bytes():
    """DeepSeek-V3, one layer: the figures of the released caches."""
    assert {name: kind.token_bytes(512, 64) for name, kind in FORMATS.items()} == {
        "fp32": 2304,
        "bf16": 1152,
        "int8": 512 + 128 + 4,
        "fp8_e4m3": 656,
        "fp8_e5m2": 656,
    }
    # Latents that 128 does not divide have one scale.
    assert FORMATS["fp8_e4m3"].parts(192, 64)["scale"] == (1, "float32")


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_not_finite_stays_not_finite(dtype):
    """int8 has no NaN: the scale carries it."""
    latent = jnp.ones((2, RANK)).at[0, 3].set(jnp.nan)
    values, scale = quantize_latents(latent, 2, dtype)
    rows = expand(QuantizedLatents(values, jnp.zeros((2, 0)), scale), jnp.float32)
    assert np.all(np.isnan(rows[0, : RANK // 2])) and np.all(np.isfinite(rows[1]))


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_decode_reads_what_is_written(name: str):
    """Attention in float64 over the numbers as the cache holds them, queries rounded as the cache asks for."""
    rng = np.random.default_rng(1)
    lengths, scale = np.array([0, 1, 13, 24], np.int32), 0.1
    table = np.array([[99, 99, 99], [4, 99, 99], [0, 3, 99], [5, 1, 2]], np.int32)
    cache = empty(name, pages=6)
    for row, length in list(enumerate(lengths))[1:]:
        position = np.arange(length)
        places = jnp.asarray(table[row, position // PAGE]), jnp.asarray(position % PAGE, jnp.int32)
        latents = jnp.asarray(rng.normal(size=(length, RANK + ROPE)), jnp.float32)
        still = jnp.ones((length, ROPE // 2)), jnp.zeros((length, ROPE // 2))
        cache = cache_write(cache, jnp.int32(1), *places, latents, jnp.ones(RANK), 1e-6, *still)
    q = rng.normal(size=(4, 1, 3, RANK + ROPE)).astype(np.float32)
    arguments = cache, jnp.int32(1), jnp.asarray(table), jnp.asarray(lengths)
    out, lse = mla_decode(jnp.asarray(q), *arguments, kv_rank=RANK, scale=scale)
    held = np.asarray(expand(cache, jnp.float32), np.float64)[1]
    wide = q.astype(np.float64)
    if name == "int8":
        step = np.max(np.abs(wide[..., :RANK]), axis=-1, keepdims=True) / 127
        wide[..., :RANK] = np.round(wide[..., :RANK] / step) * step
    for row, length in enumerate(lengths):
        keys = held[np.minimum(table[row], 5)].reshape(-1, RANK + ROPE)[:length]
        scores = np.einsum("hd,sd->hs", wide[row, 0], keys) * scale
        weights = np.exp(scores)
        if length == 0:
            assert np.all(out[row] == 0) and np.all(np.isneginf(lse[row]))
            continue
        np.testing.assert_allclose(lse[row, 0], np.log(weights.sum(axis=1)), atol=2e-5)
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[row, 0], weights @ keys[:, :RANK], atol=2e-5)
