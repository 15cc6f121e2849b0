"""Block-sparse attention for Hopper: the lists, the kernel in the interpreter, and lowered for CUDA at real shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mosaic import mla_blocks as mosaic
from jaxinfer.kernels.mosaic.mla_blocks import Plan
from jaxinfer.kernels.reference import mla_sparse as reference
from tests.kernels.interpreter import interpreted

ROPE, SCALE, KEYS = 64, 0.1, 1024
PLAN = Plan(cluster=1, prefetch=0)
"""The interpreter knows no prefetch."""


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
    """Lists of different lengths, the first of them empty; blocks that nobody reads are NaN."""
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
    context = context.reshape(KEYS, -1)
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(context, jnp.bfloat16), jnp.asarray(blocks), jnp.asarray(free)


def compare(kind: Kind, operands: tuple, plan: Plan, capsys, monkeypatch, scale: float = SCALE, processors: int = 4):
    sizes = {"block": kind.block, "kv_rank": kind.rank, "scale": scale}
    run = functools.partial(mosaic.mla_blocks, **sizes, multiprocessors=processors, plan=plan)
    with interpreted(capsys, monkeypatch):
        out, lse = jax.block_until_ready(jax.jit(run)(*operands))
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    q, *rest = operands
    wanted, wanted_lse = reference.mla_blocks(q.astype(jnp.float32), *rest, **sizes)
    out, lse, wanted, wanted_lse = (np.asarray(x, np.float32) for x in (out, lse, wanted, wanted_lse))
    # Weights and the output are rounded to bfloat16.
    assert np.linalg.norm(out - wanted) <= 4e-3 * np.linalg.norm(wanted)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    assert np.all(out[np.isneginf(wanted_lse)] == 0)


CASES = {
    "two queries in a row tile": (Kind(queries=4, heads=64), PLAN),
    "eight queries in a row tile": (Kind(queries=8, heads=16, masked=0.02), PLAN),
    "two row tiles of a query": (Kind(n=1, queries=1, heads=256), PLAN),
    "clusters": (Kind(queries=8, heads=32, masked=0.02), Plan(cluster=2, prefetch=0)),
    "an odd number of row tiles has no clusters": (Kind(n=1, queries=3, heads=128, groups=2), Plan(prefetch=0)),
    "two tiles of queries in registers": (
        Kind(n=1, queries=4, heads=32, rank=256),
        Plan(cluster=1, prefetch=0, held=2),
    ),
    "values after the scores": (Kind(n=1, queries=4, heads=32), Plan(cluster=1, prefetch=0, values_first=False)),
    "padded rows": (Kind(queries=32, heads=4, groups=4, masked=0.02), PLAN),
    "padded rows, 256 numbers": (Kind(n=1, queries=8, heads=12, groups=2, rank=256), PLAN),
    "blocks of 256": (Kind(queries=8, heads=16, block=256, listed=2, masked=0.02), PLAN),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_against_reference(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    kind, plan = CASES[name]
    compare(kind, case(kind), plan, capsys, monkeypatch)
