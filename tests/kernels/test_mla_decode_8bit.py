"""Decode attention on a cache in 8 bits for Hopper: the kernel interpreted, and lowered for CUDA at real shapes."""

import functools
from unittest.mock import patch

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.latents import QuantizedLatents, quantize_latents
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mosaic import mla_decode_8bit as mosaic
from jaxinfer.kernels.mosaic import transposed
from tests.kernels import test_mla_decode as plain
from tests.kernels.interpreter import interpreted
from tests.kernels.products import lower_for_cuda

RANK, SCALE = 256, 0.1


def case(dtype, tokens: int, heads: int, page_size: int, lengths: list[int]) -> tuple:
    """The bfloat16 case with its cache in 8 bits; all but int8's values is NaN where nothing was written."""
    q, cache, *rest = plain.case(tokens, heads, page_size, RANK, lengths)
    latent = cache[..., :RANK].astype(jnp.float32)
    groups = 1 if dtype == jnp.int8 else RANK // 128
    values, scale = quantize_latents(latent * jnp.linspace(0.2, 3, page_size)[:, None], groups, dtype)
    return q, QuantizedLatents(values, cache[..., RANK:], scale), *rest


def load(block, half: int) -> jax.Array:
    """`transposed.load` in jnp."""
    columns = block[...].astype(jnp.float16).reshape(64, 4, 2, 8, 2)[:, :, half]
    return columns.transpose(1, 3, 2, 0).reshape(64, 64)


def store(target, half: int, array: jax.Array) -> None:
    """`transposed.store` in jnp."""
    for warp, rows in enumerate(array.reshape(4, 2, 8, -1)):
        target.at[:, pl.ds(32 * warp + 16 * half, 16)][...] = rows.transpose(2, 1, 0).reshape(-1, 16)


def rows(block, half: int) -> jax.Array:
    """`transposed.rows` in jnp."""
    return transposed.ordered(block[...].astype(jnp.float16)[:, 64 * half : 64 * half + 64])


def store_transposed(target, array: jax.Array) -> None:
    """`transposed.store_transposed` in jnp."""
    target[...] = array.T


def strided(numbers, first, step: int, layout) -> jax.Array:
    """`transposed.strided` in jnp."""
    return numbers[...].reshape(-1, step)[:, first]


INT8, E4M3, E5M2 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2
CASES = {
    # type, tokens, heads, page size, lengths, thread blocks
    "int8, lengths around a page": (INT8, 1, 16, 64, [0, 1, 63, 64, 65, 129], 2),
    "int8, one long": (INT8, 1, 16, 128, [900, 3, 1], 5),
    "int8, four tokens": (INT8, 4, 16, 64, [1, 66, 131], 1),
    "int8, 20 heads": (INT8, 1, 20, 64, [65, 200], 2),
    "e4m3, lengths around a page": (E4M3, 1, 16, 64, [0, 65, 129], 3),
    "e4m3, four tokens": (E4M3, 4, 16, 64, [1, 66], 1),
    "e5m2, 20 heads": (E5M2, 1, 20, 64, [65, 200], 2),
}
SLOW = "one long", "e4m3, four", "20 heads"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if any(s in n for s in SLOW) else []) for n in CASES]
)
def test_kernel_against_reference(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    *kind, processors = CASES[name]
    q, *rest = case(*kind)
    run = functools.partial(mosaic.mla_decode, kv_rank=RANK, scale=SCALE, multiprocessors=processors)
    plain_parts = {function.__name__: function for function in (load, rows, store, store_transposed, strided)}
    with interpreted(capsys, monkeypatch), patch.multiple(transposed, **plain_parts):
        out, lse = jax.block_until_ready(jax.jit(run)(q, *rest))
    wanted, wanted_lse = mla_decode(q.astype(jnp.float32), *rest, kv_rank=RANK, scale=SCALE)
    # For the second product weights are rounded to float16, and values of 8-bit floats times their scales.
    bound, lse_bound = (6e-4, 1e-5) if kind[0] == INT8 else (1e-3, 2e-4)
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < bound
    # Scores of up to 20 pass through four float32 products.
    np.testing.assert_allclose(lse, wanted_lse, atol=lse_bound, rtol=1e-6)


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
@pytest.mark.parametrize(
    "kind", [(128, 1, 128, 64, 16384, 64), (16, 1, 16, 128, 32768, 1024), (3, 3, 20, 64, 4096, 64)]
)
def test_lowers_for_cuda(kind: tuple[int, ...], dtype):
    """Caches of more than 2^31 elements, reached by tile, not by element."""
    batch, tokens, heads, page_size, pages, width = kind
    shape = jax.ShapeDtypeStruct
    place, groups = (61, pages, page_size), 1 if dtype == INT8 else 4
    cache = QuantizedLatents(
        shape((*place, 512), dtype), shape((*place, 64), jnp.bfloat16), shape((*place, groups), jnp.float32)
    )
    lowered = lower_for_cuda(
        functools.partial(mla_decode, kv_rank=512, scale=SCALE, implementation="mosaic"),
        shape((batch, tokens, heads, 576), jnp.bfloat16),
        cache,
        shape((), jnp.int32),
        shape((batch, width), jnp.int32),
        shape((batch,), jnp.int32),
    )
    assert "mosaic_gpu" in lowered


def test_operands_that_do_not_fit_are_refused():
    q, cache, *rest = case(INT8, 1, 2, 64, [3])
    ask = functools.partial(mla_decode, kv_rank=RANK, scale=SCALE, implementation="mosaic")
    with pytest.raises(ValueError, match="queries are float32"):
        ask(q.astype(jnp.float32), cache, *rest)
    eight_bit_float = QuantizedLatents(cache.values.astype(jnp.float8_e4m3fn), cache.rope, cache.scale)
    with pytest.raises(ValueError, match="the cache float8_e4m3fn with 1 scales"):
        ask(q, eight_bit_float, *rest)
