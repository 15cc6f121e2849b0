"""Block-sparse attention for Hopper: the lists, the kernel in the interpreter, and lowered for CUDA at real shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mla_sparse import mla_blocks
from jaxinfer.kernels.mosaic import mla_blocks as mosaic
from jaxinfer.kernels.reference import mla_sparse as reference
from tests.kernels.interpreter import interpreted
from tests.kernels.products import lower_for_cuda

ROPE, SCALE, KEYS = 64, 0.1, 1024


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sizes of a case, the keys of a block, and how likely a key does not count."""

    n: int = 2
    queries: int = 16
    heads: int = 8
    groups: int = 2
    rank: int = 128
    block: int = 128
    listed: int = 3
    masked: float = 0.0


def case(kind: Kind) -> tuple:
    """Lists of different lengths, the first of them empty; blocks that nobody reads are NaN.

    With some keys masked, so is the whole of the last list's first block, which is NaN as well.
    """
    rng = np.random.default_rng(dataclasses.astuple(kind)[0])
    number = KEYS // kind.block
    blocks = np.full((kind.n, kind.groups, kind.listed), -1, np.int32)
    for i in range(1, kind.n * kind.groups):
        chosen = np.sort(rng.permutation(number - 1)[: min(1 + (i - 1) % kind.listed, number - 1)])
        blocks[i // kind.groups, i % kind.groups, : len(chosen)] = chosen
    context = rng.normal(size=(number, kind.block, kind.rank + ROPE))
    context[[i for i in range(number) if i not in blocks]] = np.nan
    q = rng.normal(size=(kind.n, kind.queries, kind.heads, kind.rank + ROPE))
    free = rng.random(KEYS) >= kind.masked
    if kind.masked:
        masked = blocks[-1, -1, 0]
        free[masked * kind.block : (masked + 1) * kind.block] = False
        context[masked] = np.nan
    context = context.reshape(KEYS, -1)
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(context, jnp.bfloat16), jnp.asarray(blocks), jnp.asarray(free)


def sizes_of(kind: Kind) -> dict:
    return {"block": kind.block, "kv_rank": kind.rank, "scale": SCALE}


def compare(kind: Kind, operands: tuple, capsys, monkeypatch, processors: int = 4):
    sizes = sizes_of(kind)
    run = functools.partial(mosaic.mla_blocks, **sizes, multiprocessors=processors)
    with interpreted(capsys, monkeypatch):
        out, lse = jax.block_until_ready(jax.jit(run)(*operands))
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    q, *rest = operands
    wanted, wanted_lse = reference.mla_blocks(q.astype(jnp.float32), *rest, **sizes)
    out, lse, wanted, wanted_lse = (np.asarray(x, np.float32) for x in (out, lse, wanted, wanted_lse))
    # Weights and the output are rounded to bfloat16.
    assert np.linalg.norm(out - wanted) <= 4e-3 * np.linalg.norm(wanted)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)
    assert np.all(out[np.isneginf(wanted_lse)] == 0)


CASES = {
    "two queries in a row tile": Kind(n=1, queries=8, heads=64, masked=0.02),
    "an odd number of row tiles has no clusters": Kind(queries=2, heads=64),
    "padded rows": Kind(n=1, queries=32, heads=4, groups=4, masked=0.02),
    "two row tiles of a query": Kind(n=1, queries=1, heads=256),
    "padded rows, 256 numbers": Kind(n=1, queries=8, heads=12, rank=256),
    "blocks of 256": Kind(n=1, queries=8, heads=16, block=256, listed=2, masked=0.02),
}
COMMON = list(CASES)[:3]
"""The others take their time."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in COMMON else [pytest.mark.slow]) for n in CASES])
def test_kernel_against_reference(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    compare(CASES[name], case(CASES[name]), capsys, monkeypatch)


ONE_TILE = Kind(n=1, queries=2, heads=32, groups=1, listed=3)


def one_tile(factors: list[float]) -> tuple:
    """One row tile, whose scores in the blocks of its list are like 30 times normal numbers times the factors."""
    q, context, _, free = case(dataclasses.replace(ONE_TILE, n=2))
    context = np.array(np.where(np.isnan(context), 1, context)).reshape(8, 128, -1)
    for index, factor in enumerate(factors):
        context[index] *= factor * 30 / (SCALE * (ONE_TILE.rank + ROPE) ** 0.5)
    blocks = jnp.arange(len(factors), dtype=jnp.int32)[None, None]
    return q[:1], jnp.asarray(context.reshape(KEYS, -1), jnp.bfloat16), blocks, free


@pytest.mark.parametrize("factors", [[0.1, 1.0, 0.1], [1.0, 0.1, 0.5]])
def test_later_scores_may_be_much_larger_and_smaller(factors, capsys, monkeypatch):
    """By some 90 nats: the weights stay in range, and the reference is not asked."""
    monkeypatch.setattr(mosaic, "_mended", lambda q, context, blocks, free, out, lse, sizes: (out, lse))
    compare(ONE_TILE, one_tile(factors), capsys, monkeypatch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the weights overflow
def test_weights_out_of_range_are_left_to_the_reference(capsys, monkeypatch):
    compare(ONE_TILE, one_tile([0.1, 5.0, 0.1]), capsys, monkeypatch)
    monkeypatch.setattr(mosaic, "_mended", lambda q, context, blocks, free, out, lse, sizes: (out, lse))
    run = functools.partial(mosaic.mla_blocks, **sizes_of(ONE_TILE), multiprocessors=4)
    with interpreted(capsys, monkeypatch):
        _, lse = jax.block_until_ready(jax.jit(run)(*one_tile([0.1, 5.0, 0.1])))
    assert np.isnan(lse).any()


@pytest.mark.parametrize("block", [128, 256])
def test_lists_have_the_blocks_of_which_a_key_counts(block: int):
    rng = np.random.default_rng(block)
    free = rng.random((KEYS // 128, 128)) > 0.005
    free[2] = False
    number = KEYS // block
    blocks = np.stack([rng.permutation(np.r_[np.arange(number), [-1] * 2])[:4] for _ in range(6)]).reshape(3, 2, 4)
    entries, counts, bias = mosaic.lists(jnp.asarray(blocks, jnp.int32), jnp.asarray(free.ravel()), block)
    np.testing.assert_array_equal(np.asarray(bias).reshape(-1, 128) == 0, free)
    assert np.isneginf(np.asarray(bias).reshape(-1, 128)[~free]).all()
    for row, listed in enumerate(blocks.reshape(6, 4)):
        parts = sorted(b * (block // 128) + i for b in listed[listed >= 0] for i in range(block // 128))
        wanted = [4 * b + (not free[b, :64].all()) + 2 * (not free[b, 64:].all()) for b in parts if free[b].any()]
        assert counts[row] == len(wanted)
        np.testing.assert_array_equal(entries[row, : len(wanted)], wanted)


def operands(n: int, heads: int, groups: int, keys: int, rank: int = 512) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = jax.ShapeDtypeStruct
    return (
        shape((n, 32, heads, rank + ROPE), jnp.bfloat16),
        shape((keys, rank + ROPE), jnp.bfloat16),
        shape((n, groups, 20), jnp.int32),
        shape((keys,), jnp.bool_),
    )


@pytest.mark.parametrize(
    "kind",
    [(256, 128, 4, 2**16), (256, 128, 4, 2**20), (256, 128, 8, 2**18), (64, 16, 4, 2**17), (256, 4, 4, 2**17, 256)],
)
def test_lowers_for_cuda(kind: tuple):
    """Also contexts of more than 2^29 elements, reached by row, not by element."""
    rank = kind[4] if len(kind) > 4 else 512
    run = functools.partial(mla_blocks, block=128, kv_rank=rank, scale=SCALE, implementation="mosaic")
    assert "mosaic_gpu" in lower_for_cuda(run, *operands(*kind))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": jnp.float32}, "queries are float32"),
        ({"block": 64}, "blocks of 64 keys are no multiple of 128"),
        ({"kv_rank": 64}, "kv_rank = 64 is no multiple of 128"),
        ({"kv_rank": 128}, "the rope part has 448 dimensions, not 64"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict, words: str):
    q, *rest = operands(4, 16, 4, 1024)
    sizes = {"block": 128, "kv_rank": 512} | {name: value for name, value in change.items() if name != "dtype"}
    q = jax.ShapeDtypeStruct(q.shape, change.get("dtype", q.dtype))
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(mla_blocks, **sizes, scale=1.0, implementation="mosaic"), q, *rest)
