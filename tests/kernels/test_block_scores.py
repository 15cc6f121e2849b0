"""The kernels of both levels of retrieval: in the interpreter against the jnp forms, and lowered at real sizes."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mosaic import block_masses, block_scores
from jaxinfer.kernels.selection.index import TYPE, group_index, query_index
from jaxinfer.kernels.selection.retrieve import retrieve, voting_heads
from jaxinfer.kernels.selection.scores import best_groups, group_logits
from tests.kernels.interpreter import interpreted
from tests.kernels.products import TWO_PROCESSORS, lower_for_cuda

SCALE = 0.2
SMALL = block_scores.Blocks(piece=16, stages=2)
SUMS = 2.0**-10
"""How far sums of e4m3 products are off, of a row's largest: those of tensor cores, and float16, by 2^-11 each."""


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch):
    """The products, below Pallas, as the interpreter can have them."""

    def product(sums, rows, index):
        def multiply(accumulator):
            plgpu.wgmma(accumulator, rows, index.transpose((1, 0)))
            return accumulator[...]

        shape = block_scores.ROWS, index.shape[0]
        found = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        return (found if sums is None else sums.astype(jnp.float32) + found).astype(jnp.float16)

    monkeypatch.setattr(block_scores, "_product", product)


SCORES = {
    # rows, blocks, groups of a block, numbers, how the work is cut, (first, end) of successive parts of the rows
    "limits that differ within a warpgroup": (72, 37, 4, 128, SMALL, [(1, 37), (3, 9), (0, 1), (5, 5)]),
    "rows of two clusters, of which one retrieves nothing": (264, 40, 8, 64, SMALL, [(0, 40), (0, 0)]),
    "steps of half the bytes": (40, 19, 8, 192, SMALL, [(0, 19)]),
    "two steps": (40, 19, 8, 256, SMALL, [(0, 19)]),
    "the cut of an index of 64 numbers": (24, 35, 32, 64, None, [(2, 35), (0, 20)]),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.usefixtures("products")
def test_best_groups(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    rows, blocks, per_block, dim, cut, limits = SCORES[name]
    monkeypatch.setattr(block_scores, "_PART", 32)  # several parts
    rng = np.random.default_rng(rows)
    q, _ = query_index(normal(rng, rows, dim), jnp.eye(dim, dtype=jnp.bfloat16))
    index = normal(rng, blocks, per_block, dim).astype(TYPE)
    first, end = np.repeat(np.asarray(limits, np.int32), -(-rows // len(limits)), axis=0)[:rows].T
    index = index.at[int(end.max()) :].set(jnp.nan)
    run = functools.partial(block_scores.block_scores, multiprocessors=2, blocks=cut)
    with interpreted(capsys, monkeypatch):
        best = jax.block_until_ready(jax.jit(run)(q, index, first, end))
    logits = group_logits(q[:, None], jnp.ones((rows, 1)), index.reshape(-1, dim), group=1, scale=1.0)[:, 0]
    wanted = jax.vmap(functools.partial(best_groups, per_block=per_block))(logits, first, end)
    eligible = (np.arange(blocks) >= first[:, None]) & (np.arange(blocks) < end[:, None])
    assert best.shape[1] >= blocks
    np.testing.assert_allclose(best[:, :blocks][eligible], wanted[eligible], atol=SUMS * np.nanmax(np.abs(logits)))


@pytest.mark.usefixtures("products")
def test_sums_that_float16_cannot_hold_are_its_largest(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    q = jnp.full((1, 64), 28, TYPE)
    index = jnp.stack([jnp.full((4, 64), 448, TYPE), jnp.full((4, 64), -448, TYPE), jnp.full((4, 64), 1, TYPE)])
    limits = jnp.zeros(1, jnp.int32), jnp.full(1, 3, jnp.int32)
    run = functools.partial(block_scores.block_scores, multiprocessors=2, blocks=SMALL)
    with interpreted(capsys, monkeypatch):
        best = jax.block_until_ready(jax.jit(run)(q, index, *limits))
    assert best[0, :3].tolist() == [65504.0, -np.inf, 28 * 64.0]


MASSES = {
    # lists, rows, blocks, keys of a block, the lists
    "one list": (8, 4, 64, [[3, -1, 0]]),
    "more lists of a block than a tile": (32, 3, 64, [[0, 2], [2, -1], *[[2, 1]] * 9]),
    "64 rows": (33, 3, 128, [[0], [2], [2], [-1], [2], [2]]),
}


@pytest.mark.parametrize("name", MASSES)
def test_block_masses(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    rows, blocks, block, numbers = MASSES[name]
    lists = np.asarray(numbers, np.int32)
    rng = np.random.default_rng(rows)
    q, keys = normal(rng, len(lists), rows, 128), normal(rng, blocks, block, 128)
    free = rng.random((blocks, block)) > 0.2
    free[2 if blocks < 4 else 3] = False
    keys = jnp.where(free[..., None], keys, jnp.nan)
    run = functools.partial(block_masses.block_masses, scale=SCALE, multiprocessors=2)
    with interpreted(capsys, monkeypatch):
        lse = jax.block_until_ready(jax.jit(run)(q, keys, lists, free))
    logits = np.einsum("lrd,bkd->lbrk", *(np.asarray(x, np.float64) for x in (q, jnp.nan_to_num(keys)))) * SCALE
    wanted = np.asarray(jax.nn.logsumexp(jnp.where(free[:, None], logits, -jnp.inf), axis=-1))
    wanted = wanted[np.arange(len(lists))[:, None], lists]
    np.testing.assert_allclose(lse[lists >= 0], wanted[lists >= 0], atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_schedule(seed: int):
    """Every entry is in one tile, with others of its block; popular blocks have several tiles."""
    rng = np.random.default_rng(seed)
    blocks, most = 9, 4
    lists = np.minimum(rng.geometric(0.3, size=(17, 5)) - 2, blocks - 1).astype(np.int32)
    order, tiles, number = (np.asarray(x) for x in block_masses.schedule(jnp.asarray(lists), blocks, most))
    seen = []
    for block, first, count in tiles[:, : int(number[0])].T:
        assert 1 <= count <= most
        entries = order[first : first + count]
        assert (lists.reshape(-1)[entries] == block).all()
        seen += entries.tolist()
    assert sorted(seen) == np.flatnonzero(lists.reshape(-1) >= 0).tolist()


def case(n: int, queries: int, heads: int, dim: int, blocks: int, block: int, index_dim: int = 64):
    rng = np.random.default_rng(0)
    q, context = normal(rng, n, queries, heads, dim), normal(rng, blocks * block, dim)
    lse = jnp.asarray(rng.normal(size=(n, queries, heads)), jnp.float32)
    valid = np.ones((n, queries), bool)
    valid[-1, 3:] = False
    end = np.linspace(blocks // 2, blocks, n).astype(np.int32)
    end[1] = 0
    free = rng.random(blocks * block) > 0.1
    key_projection, projection = (normal(rng, dim, index_dim) / dim**0.5 for _ in range(2))
    index = group_index(context, 4 * key_projection, 16)
    arrays = q, valid, lse, np.ones(n, np.int32), end, context, index, projection, free, voting_heads(heads, 2, 4)
    return tuple(map(jnp.asarray, arrays))


@pytest.mark.slow
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("budget", [2**30, 1])
def test_retrieve(budget: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Both forms find the same, also with so little room that the query blocks are taken one by one."""
    monkeypatch.setattr("jaxinfer.kernels.selection.retrieve._SCORE_BYTES", budget)
    monkeypatch.setattr("jaxinfer.kernels.selection.retrieve.device", lambda: TWO_PROCESSORS)
    sizes = {"scale": SCALE, "block": 64, "group": 16, "probes": 2, "candidates": 4}
    operands = case(2, 4, 4, 64, 12, 64)
    run = functools.partial(retrieve, **sizes)
    wanted = jax.jit(functools.partial(run, implementation="reference"))(*operands)
    with interpreted(capsys, monkeypatch):
        found = jax.block_until_ready(jax.jit(functools.partial(run, implementation="mosaic"))(*operands))
    np.testing.assert_array_equal(found.candidates, wanted.candidates)
    np.testing.assert_allclose(found.masses, wanted.masses, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "index_dim", "voting", "candidates"),
    [
        (2**16, 128, 576, 64, (4, 8), 64),
        (2**19, 128, 576, 64, (4, 8), 64),
        (2**20, 128, 576, 64, (4, 8), 64),
        (2**19, 128, 576, 128, (8, 8), 128),
        (2**17, 128, 576, 192, (4, 8), 64),
        (2**17, 128, 576, 256, (4, 8), 64),
        (2**17, 4, 320, 64, (4, 1), 64),
    ],
)
def test_lowers_for_cuda(tokens: int, heads: int, dim: int, index_dim: int, voting: tuple, candidates: int):
    shape = jax.ShapeDtypeStruct
    sizes = {"block": 128, "group": 4, "probes": 4, "candidates": candidates}
    lowered = lower_for_cuda(
        functools.partial(retrieve, scale=SCALE, implementation="mosaic", **sizes),
        shape((256, 32, heads, dim), jnp.bfloat16),
        shape((256, 32), jnp.bool_),
        shape((256, 32, heads), jnp.float32),
        shape((256,), jnp.int32),
        shape((256,), jnp.int32),
        shape((tokens, dim), jnp.bfloat16),
        shape((tokens // 4, index_dim), TYPE),
        shape((dim, index_dim), jnp.bfloat16),
        shape((tokens,), jnp.bool_),
        shape(voting, jnp.int32),
    )
    assert all(kernel in lowered for kernel in ("block_scores", "block_votes", "block_masses"))


def test_operands_that_do_not_fit_are_refused():
    sizes = {"scale": SCALE, "block": 64, "group": 16, "probes": 2, "candidates": 4}
    q, *rest = case(2, 4, 4, 64, 12, 64)
    with pytest.raises(ValueError, match="queries are float32"):
        retrieve(q.astype(jnp.float32), *rest, **sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="the index is bfloat16, not float8_e4m3fn"):
        retrieve(q, *rest[:5], rest[5].astype(jnp.bfloat16), *rest[6:], **sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="index of 448 numbers do not fit into registers"):
        retrieve(*case(2, 4, 4, 448, 12, 64, 448), **sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="index of 72 numbers are no multiple of 64"):
        retrieve(*case(2, 4, 4, 128, 12, 64, 72), **sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="blocks have 2 groups, not 4, 8, 16 or 32"):
        retrieve(*case(2, 4, 4, 64, 12, 32), **sizes | {"block": 32}, implementation="mosaic")
    with pytest.raises(ValueError, match="blocks have 256 keys, not 64 or 128"):
        retrieve(*case(2, 4, 4, 64, 12, 256), **sizes | {"block": 256}, implementation="mosaic")
    with pytest.raises(ValueError, match="there are 33 probes, more than 32"):
        retrieve(*case(2, 33, 2, 64, 12, 64), **sizes | {"probes": 33}, implementation="mosaic")
