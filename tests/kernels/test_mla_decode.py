"""Decode attention for Hopper: the schedule, the kernel in the interpreter, and lowered for CUDA at real shapes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mosaic import decode_parts
from jaxinfer.kernels.mosaic import mla_decode as mosaic
from tests.kernels.interpreter import interpreted
from tests.kernels.products import lower_for_cuda

ROPE, SCALE = 64, 0.1


def case(tokens: int, heads: int, page_size: int, rank: int, lengths: list[int]) -> tuple:
    """Queries and a cache of two layers, NaN wherever nothing was written, its pages in random order."""
    rng = np.random.default_rng(sum(lengths))
    counts = [-(-length // page_size) for length in lengths]
    order = iter(rng.permutation(sum(counts) + 2))
    cache = np.full((2, sum(counts) + 2, page_size, rank + ROPE), np.nan)
    table = np.full((len(lengths), max(counts)), 10**9, np.int32)
    for row, length in enumerate(lengths):
        for page in range(counts[row]):
            table[row, page] = next(order)
            keys = min(page_size, length - page * page_size)
            cache[1, table[row, page], :keys] = rng.normal(size=(keys, rank + ROPE))
    q = rng.normal(size=(len(lengths), tokens, heads, rank + ROPE))
    q, cache = (jnp.asarray(x, jnp.bfloat16) for x in (q, cache))
    return q, cache, jnp.int32(1), jnp.asarray(table), jnp.asarray(lengths, jnp.int32)


CASES = {
    # tokens, heads, page size, rank, lengths, thread blocks
    "lengths around a page": (1, 16, 64, 128, [0, 1, 63, 64, 65, 129], 3),
    "two blocks of rows": (2, 40, 128, 128, [0, 1, 2, 700, 130], 4),
    "one long": (1, 16, 64, 256, [900, 3, 1], 5),
    "more thread blocks than tiles": (1, 64, 64, 128, [70], 6),
    "one page": (1, 16, 64, 128, [64], 1),
    "four tokens": (4, 16, 64, 128, [1, 66, 131], 1),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if "two" in n else []) for n in CASES])
def test_kernel_against_reference(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    *kind, processors = CASES[name]
    rank = kind[3]
    q, *rest = case(*kind)
    run = functools.partial(mosaic.mla_decode, kv_rank=rank, scale=SCALE, multiprocessors=processors)
    with interpreted(capsys, monkeypatch):
        out, lse = jax.block_until_ready(jax.jit(run)(q, *rest))
    wanted, wanted_lse = mla_decode(q.astype(jnp.float32), *rest, kv_rank=rank, scale=SCALE)
    # The weights are rounded to bfloat16 for the second product.
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 3e-3
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def test_a_schedule_of_longer_sequences(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Tiles beyond a sequence's keys are read and count for nothing."""
    q, cache, layer, table, lengths = case(1, 16, 64, 128, [0, 70, 128])
    table = jnp.pad(table, ((0, 0), (0, 3)), constant_values=0)
    longer = decode_parts.schedule(jnp.asarray([64, 300, 128], jnp.int32), 3)
    run = functools.partial(mosaic.mla_decode, kv_rank=128, scale=SCALE, multiprocessors=3, schedule=longer)
    with interpreted(capsys, monkeypatch):
        out, lse = jax.block_until_ready(jax.jit(run)(q, cache, layer, table, lengths))
    wanted, wanted_lse = mla_decode(q.astype(jnp.float32), cache, layer, table, lengths, kv_rank=128, scale=SCALE)
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 3e-3
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def test_tokens_see_no_later_key():
    """Each of several tokens is the same as alone, with the later keys not there."""
    q, cache, layer, table, lengths = case(3, 2, 64, 128, [2, 65, 200])
    several, several_lse = mla_decode(q, cache, layer, table, lengths, kv_rank=128, scale=SCALE)
    for token in range(3):
        seen = jnp.maximum(lengths - (2 - token), 0)
        alone, lse = mla_decode(q[:, token : token + 1], cache, layer, table, seen, kv_rank=128, scale=SCALE)
        np.testing.assert_allclose(several[:, token], alone[:, 0], atol=1e-6)
        np.testing.assert_allclose(several_lse[:, token], lse[:, 0], atol=1e-6)


@pytest.mark.parametrize("parts", [1, 5, 66, 132])
@pytest.mark.parametrize("lengths", [[0], [1, 524288, 70, 0, 4096], [4096] * 128, list(range(0, 6400, 50))])
def test_schedule_covers_every_tile_and_balances(lengths: list[int], parts: int):
    schedule = decode_parts.schedule(jnp.asarray(lengths, jnp.int32), parts)
    begins, cuts, first, merged, pieces = map(np.asarray, schedule)
    tiles = np.maximum(1, -(-np.asarray(lengths) // 64))
    np.testing.assert_array_equal(np.diff(begins), tiles)
    assert cuts[0] == 0 and cuts[-1] == tiles.sum() and np.all(np.diff(cuts) >= 0)
    begun = np.array([np.sum((begins[1:-1] > a) & (begins[1:-1] < b)) for a, b in itertools.pairwise(cuts)])
    whole = tiles.sum() + decode_parts._START * (len(lengths) - 1)
    assert np.max(np.diff(cuts) + decode_parts._START * begun) <= -(-whole // parts) * 9 // 8
    for cut, sequence in zip(cuts[:-1], first, strict=True):
        assert cut == cuts[-1] or begins[sequence] <= cut < begins[sequence + 1]
    inside = [np.flatnonzero((start < cuts) & (cuts < stop)) for start, stop in itertools.pairwise(begins)]
    assert list(merged[1 : 1 + merged[0]]) == [found[0] for found in inside if len(found)]
    assert list(pieces[: merged[0]]) == [len(found) + 1 for found in inside if len(found)]


def lower(batch: int, tokens: int, heads: int, page_size: int, pages: int, width: int, layers: int = 61) -> str:
    shape = jax.ShapeDtypeStruct
    return lower_for_cuda(
        functools.partial(mla_decode, kv_rank=512, scale=SCALE, implementation="mosaic"),
        shape((batch, tokens, heads, 576), jnp.bfloat16),
        shape((layers, pages, page_size, 576), jnp.bfloat16),
        shape((), jnp.int32),
        shape((batch, width), jnp.int32),
        shape((batch,), jnp.int32),
    )


@pytest.mark.parametrize(
    "kind",
    [
        (128, 1, 128, 64, 8192, 64),
        (128, 1, 16, 64, 16384, 128),
        (64, 1, 128, 128, 8192, 4096),
        (1, 1, 64, 64, 16384, 16384),
        (32, 4, 16, 64, 4096, 64),
        (3, 3, 20, 64, 4096, 64),
    ],
)
def test_lowers_for_cuda(kind: tuple):
    """Caches of more than 2^31 elements, reached by tile, not by element."""
    assert "mosaic_gpu" in lower(*kind)


def test_operands_that_do_not_fit_are_refused():
    q, *rest = case(1, 2, 64, 128, [3])
    with pytest.raises(ValueError, match="queries are float32"):
        mla_decode(q.astype(jnp.float32), *rest, kv_rank=128, scale=SCALE, implementation="mosaic")
    with pytest.raises(ValueError, match="the rope part has 128 dimensions, not 64"):
        mosaic_only = functools.partial(mla_decode, scale=SCALE, implementation="mosaic")
        q, *rest = case(1, 2, 64, 192, [3])
        mosaic_only(q, *rest, kv_rank=128)
    with pytest.raises(ValueError, match="pages of 32 tokens are no multiple of 64"):
        q, *rest = case(1, 2, 32, 128, [3])
        mosaic_only(q, *rest, kv_rank=128)
