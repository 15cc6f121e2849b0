"""The window form of the Mosaic prefill kernel: in the interpreter against float32, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mla_sparse import mla_window
from jaxinfer.kernels.mosaic import attention
from jaxinfer.kernels.mosaic import mla_prefill as mosaic
from jaxinfer.kernels.mosaic.attention import Blocks, window_schedule
from jaxinfer.kernels.reference import mla_sparse as reference
from jaxinfer.kernels.selection.grid import window_start
from tests.kernels.products import lower_for_cuda
from tests.kernels.test_mla_prefill_mosaic import case, interpreted, rising


def compare(
    q, context, k_b, v_b, first, limit, capsys, *, shared=None, blocks=None, multiprocessors=4, scale=0.1, runs=None
):
    """Keys that nobody reads hold no number; `shared` are keys, and how many of them each query reads."""
    first, limit = np.asarray(first, np.int32), np.asarray(limit, np.int32)
    keys = np.arange(len(context))
    read = ((keys >= first[:, None]) & (keys < limit[:, None])).any(axis=0)
    rows, before = (context[:1], np.zeros(len(q), np.int32)) if shared is None else shared
    known = jnp.arange(len(rows)) < before.max()
    rest, end = (k_b, v_b, jnp.asarray(first), jnp.asarray(limit)), jnp.asarray(before, jnp.int32)
    sizes = {"runs": runs, "blocks": blocks or Blocks(keys=64), "multiprocessors": multiprocessors}

    def operands(nothing):
        filled, filled_rows = (jnp.where(at[:, None], a, nothing) for at, a in ((read, context), (known, rows)))
        return q, filled, *rest, filled_rows, end

    with interpreted(capsys):
        out, lse = (np.asarray(a) for a in mosaic.mla_window(*operands(jnp.nan), scale=scale, **sizes))
    wanted, wanted_lse = (np.asarray(a) for a in reference.mla_window(*operands(0), scale=scale))
    empty = (limit <= first) & (before == 0)
    assert np.all(out[empty] == 0)
    assert np.all(lse[empty] == -np.inf)
    np.testing.assert_allclose(lse[~empty], wanted_lse[~empty], atol=1e-3)
    assert np.linalg.norm(out - wanted) <= 4e-3 * np.linalg.norm(wanted)


def sliding(start: int, tokens: int, window: int, block: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Windows of successive positions, as hybrid attention has them."""
    positions = np.arange(start, start + tokens)
    return window_start(positions, window=window, block=block, query_block=32, dense_below=0), positions + 1


INTERPRETED = {
    # tokens, keys, heads, nope, rope, v, ranges, arguments
    "window": (300, 640, 2, 64, 64, 64, sliding(340, 300, 128), {}),
    "from the beginning": (130, 200, 2, 64, 64, 64, sliding(0, 130, 64), {}),
    "no tile begins with a window": (150, 500, 1, 64, 64, 64, sliding(301, 150, 100, block=24), {}),
    "tiles of 128, three stages of 64": (70, 500, 1, 64, 64, 64, sliding(400, 70, 256, 128), {"blocks": Blocks()}),
    "three stages": (270, 640, 1, 64, 64, 64, sliding(350, 270, 192), {"blocks": Blocks(keys=64, stages=3)}),
    "DeepSeek's heads": (70, 512, 2, 128, 64, 128, sliding(400, 70, 256, 128), {"blocks": Blocks()}),
    "one query, one key": (1, 300, 1, 64, 64, 64, ([255], [256]), {"multiprocessors": 2}),
    "all but one empty": (300, 300, 1, 64, 64, 64, ([5] * 299 + [191], [5] * 150 + [2] * 149 + [195]), {}),
    "shared keys": (200, 640, 2, 64, 64, 64, sliding(340, 200, 128), {"shared": (100, np.arange(200) // 32 * 16 + 3)}),
    "whole tiles of them": (70, 500, 1, 64, 64, 64, sliding(301, 70, 128), {"shared": (256, np.full(70, 256))}),
    "nothing but them": (70, 500, 1, 64, 64, 64, ([9] * 70, [0] * 70), {"shared": (150, np.arange(70) * 2)}),
    "held runs only": (200, 2048, 1, 64, 64, 64, sliding(1700, 200, 64), {"runs": (1, 360)}),
}


QUICK = "window", "one query, one key", "shared keys", "held runs only"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in INTERPRETED])
def test_kernel_against_the_reference(name: str, capsys: pytest.CaptureFixture):
    *shape, (first, limit), arguments = INTERPRETED[name]
    q, context, k_b, v_b = case(0, *shape)
    if "shared" in arguments:
        count, before = arguments["shared"]
        arguments = arguments | {"shared": (case(9, 1, count, *shape[2:])[1], before)}
    compare(q, context, k_b, v_b, first, limit, capsys, **arguments)


def test_any_ranges(capsys: pytest.CaptureFixture):
    """Rows of a tile begin and end anywhere: at its borders, inside, and before they begin."""
    rng = np.random.default_rng(1)
    first = rng.choice((0, 63, 64, 65, 100, 127, 128, 129, 190), 300)
    limit = first + rng.choice((-5, 0, 1, 63, 64, 65, 128, 129), 300)
    first[128:256], limit[128:256] = 300, 0
    limit = np.clip(limit, 0, 300)
    shared = case(9, 1, 200, 2, 64, 64, 64)[1], rng.integers(0, 201, 300) * (rng.random(300) < 0.7)
    compare(*case(1, 300, 300, 2, 64, 64, 64), first, limit, capsys, shared=shared)


@pytest.mark.parametrize("order", [1, -1])
def test_windows_that_begin_apart_in_one_tile(order: int, capsys: pytest.CaptureFixture):
    """Half of the rows see nothing of their 64's first tiles; what follows is far above or below the first scores."""
    q, context, k_b, v_b = case(2, 64, 320, 1, 64, 64, 64)
    first = np.repeat((0, 200), 32)[::order]
    compare(q, rising(context)[::order], k_b, v_b, first, np.full(64, 320), capsys, scale=3.0)


def test_no_score_is_as_large_as_zero(capsys: pytest.CaptureFixture):
    """Rows that begin late have scores far below zero only: their weights are relative to their own largest."""
    q, context, k_b, v_b = case(2, 64, 320, 1, 64, 64, 64)
    q, k_b, context = jnp.abs(q), jnp.abs(k_b), -jnp.abs(context)
    first = np.where(np.arange(64) % 2, 0, 150)
    compare(q, context, k_b, v_b, first, np.full(64, 320), capsys, scale=3.0)


def test_weights_are_found_again_in_every_tile(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_LARGE", -1.0)
    compare(*case(2, 150, 400, 1, 64, 64, 64), *sliding(250, 150, 100, 24), capsys)


def test_nothing_to_see(capsys: pytest.CaptureFixture):
    compare(*case(4, 10, 20, 2, 64, 64, 64), np.arange(10), np.arange(10), capsys)


def test_stripes_hold_their_own_windows_only(capsys: pytest.CaptureFixture):
    """Two runs far apart in a long context, as one of several ranks with long stripes has them."""
    first, limit = (np.concatenate(pair) for pair in zip(sliding(700, 60, 64), sliding(1700, 60, 64), strict=True))
    compare(*case(5, 120, 2048, 1, 64, 64, 64), first, limit, capsys, runs=(2, 220))
    assert mosaic.ranges_held(2048, (2, 220)) == 2 * 3


def test_ranges_keep_their_rows():
    rng = np.random.default_rng(3)
    context = np.arange(3000, dtype=np.float32)[:, None]
    first = np.concatenate((rng.integers(100, 500, 40), rng.integers(2000, 2600, 40))).astype(np.int32)
    limit = first + rng.integers(-20, 60, 80).astype(np.int32)
    read = ((np.arange(3000) >= first[:, None]) & (np.arange(3000) < limit[:, None])).any(axis=0)
    context[~read] = np.nan
    gather = jax.jit(functools.partial(mosaic.gather_ranges, held=mosaic.ranges_held(3000, (2, 660))))
    rows, start, end = map(np.asarray, gather(context, first, limit))
    for begin, stop, of_start, of_end in zip(first, limit, start, end, strict=True):
        if stop > begin:
            np.testing.assert_array_equal(rows[of_start:of_end, 0], context[begin:stop, 0])
        else:
            assert of_start == of_end == 0
    assert np.isfinite(rows).all()
    assert np.count_nonzero(rows) == read.sum()


def test_schedule():
    """Blocks of 256: some queries with windows, all of them with windows only, none, and all with shared keys only."""
    limits = [130] * 64 + [0] * 32 + [256] * 32 + [257] * 64 + [0] * 64 + [0] * 256 + [0] * 256 + [300] * 256
    starts = [512] * 64 + [520] * 32 + [600] * 32 + [9] * 64 + [700] * 64 + [384] * 256 + [5] * 256 + [0] * 256
    ends = [768] * 64 + [800] * 32 + [700] * 32 + [0] * 64 + [701] * 64 + [640] * 256 + [0] * 256 + [0] * 256
    arrays = (jnp.asarray(a, jnp.int32) for a in (limits, starts, ends))
    order, rows = (np.asarray(a).tolist() for a in window_schedule(*arrays, 128))
    assert order == [[0, 3, 1, 2], [6, 3, 2, 1], [3, 3, 0, 0], [4, 0, 3, 0]]
    # Tiles 0 to 2, then 4 to 6: those that the block reads.
    assert [row[:4] for row in rows] == [[5, 6, 3, 5], [1, 0, 2, 0], [3, 4, 3, 5], [5, 4, -1, 4]]
    assert [row[4] for row in rows] == [2, 0, 0, 2]
    assert [row[8] for row in rows] == [1, 0, 0, 0]
    assert [row[12] for row in rows] == [3, 2, 3, 3]


def lower(tokens: int, keys: int, heads: int, runs: tuple[int, int] | None) -> str:
    operands = (tokens, heads, 192), (keys, 576), (heads, 128, 512), (heads, 128, 512), (128 + keys // 256, 576)
    *shapes, shared = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in operands]
    bound = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    window = functools.partial(mla_window, scale=0.1, runs=runs, implementation="mosaic")
    return lower_for_cuda(window, *shapes, bound, bound, shared, bound)


REAL = {
    "DeepSeek-V3, 512K": (8192, 2**19, 128, (1, 12446)),
    "DeepSeek-V3, 1M, a rank of 8": (8192, 2**20, 128, (8, 5278)),
    "V2-Lite, everything": (4096, 20000, 16, None),
}


@pytest.mark.parametrize("name", REAL)
def test_lowers_for_cuda(name: str):
    assert "mosaic_gpu" in lower(*REAL[name])


def test_operands_that_do_not_fit_are_refused():
    operands = case(5, 8, 8, 1, 64, 64, 64)
    q, context, k_b, v_b = operands
    rest = jnp.zeros(8, jnp.int32), jnp.ones(8, jnp.int32), context, jnp.ones(8, jnp.int32)
    with pytest.raises(ValueError, match="queries are float32"):
        mla_window(q.astype(jnp.float32), context, k_b, v_b, *rest, scale=1.0, implementation="mosaic")
