"""Block-sparse attention in e4m3: what is rounded, the kernel in the interpreter, and lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.mla_sparse import mla_blocks
from jaxinfer.kernels.mosaic import block_attention_e4m3 as kernel
from jaxinfer.kernels.mosaic import mla_blocks as bfloat16
from jaxinfer.kernels.mosaic import mla_blocks_e4m3 as mosaic
from jaxinfer.kernels.mosaic.attention_e4m3 import value_order
from jaxinfer.kernels.reference import mla_sparse as reference
from jaxinfer.kernels.reference.expansion import E4M3
from tests.kernels.interpreter import as_e4m3, interpreted
from tests.kernels.products import lower_for_cuda
from tests.kernels.test_mla_blocks import CASES, KEYS, ONE_TILE, ROPE, SCALE, Kind, case, one_tile, operands, sizes_of

UNIT = 0.5
WIDE = Kind(n=2, queries=4, heads=64, masked=0.02)


def compare(kind: Kind, given: tuple, capsys, monkeypatch, unit: float = UNIT):
    """The bound is what rounds of the weights: 2^-4 at most, 2.6e-2 of their root mean square."""
    sizes = sizes_of(kind)
    monkeypatch.setattr(kernel, "as_e4m3", as_e4m3)
    monkeypatch.setattr(kernel, "any_differ", lambda first, second, _: jnp.any(first != second).astype(jnp.int32))
    run = functools.partial(mosaic.mla_blocks, **sizes, multiprocessors=4)
    with interpreted(capsys, monkeypatch):
        out, lse = jax.block_until_ready(jax.jit(run)(*given, jnp.float32(unit)))
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    q, *rest = given
    wanted, wanted_lse = reference.mla_blocks(q.astype(jnp.float32), *rest, jnp.float32(unit), **sizes)
    out, lse, wanted, wanted_lse = (np.asarray(x, np.float32) for x in (out, lse, wanted, wanted_lse))
    assert np.any(wanted != 0)
    assert np.linalg.norm(out - wanted) <= 3e-2 * np.linalg.norm(wanted)
    # The center's part of the scores and the rest may be as large as the largest of all, and cancel.
    largest = np.max(np.abs(wanted_lse), where=np.isfinite(wanted_lse), initial=0.0)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=2e-5 + 1e-6 * largest)
    assert np.all(out[np.isneginf(wanted_lse)] == 0)


SHAPES = {
    "two queries in a row tile": WIDE,
    "padded rows": CASES["padded rows"],
    "an odd number of row tiles has no clusters": CASES["an odd number of row tiles has no clusters"],
    "two row tiles of a query": CASES["two row tiles of a query"],
    "padded rows, 256 numbers": CASES["padded rows, 256 numbers"],
    "blocks of 256": dataclasses.replace(CASES["blocks of 256"], n=2),
}
COMMON = list(SHAPES)[:2]
"""The others take their time."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in COMMON else [pytest.mark.slow]) for n in SHAPES])
def test_kernel_against_reference(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    compare(SHAPES[name], case(SHAPES[name]), capsys, monkeypatch)


@pytest.mark.parametrize(
    "factors",
    [
        [0.05, 0.2, 1.0, 3.0, 9.0],
        pytest.param([9.0, 3.0, 1.0, 0.2], marks=pytest.mark.slow),
        pytest.param([0.1, 5.0, 0.1, 10.0, 0.5], marks=pytest.mark.slow),
    ],
)
def test_scores_may_grow_and_shrink_by_hundreds_of_nats(factors, capsys, monkeypatch):
    compare(ONE_TILE, one_tile(factors), capsys, monkeypatch, unit=32.0)


@pytest.mark.parametrize("masked", [(slice(0, 64), slice(192, 320)), (slice(64, 192),)])
def test_tiles_of_which_no_key_counts(masked: tuple, capsys, monkeypatch):
    """The first tile, the second, and two of different blocks; the other warpgroup's tile has all the weight."""
    q, context, blocks, free = one_tile([1.0, 1.0, 1.0])
    for keys in masked:
        free = free.at[keys].set(False)
    compare(ONE_TILE, (q, context, blocks, free), capsys, monkeypatch, unit=8.0)


def rounded(x, unit):
    return np.asarray(jnp.clip(jnp.asarray(x / unit, jnp.float32), -448, 448).astype(E4M3).astype(jnp.float32)) * unit


def test_reference_is_attention_of_rounded_numbers():
    """With a few latents beyond 448 units, which are cut off, and queries of very different sizes."""
    kind = Kind(n=2, queries=2, heads=4, masked=0.1)
    q, context, blocks, free = case(kind)
    q = q * jnp.asarray(10.0 ** np.random.default_rng(1).uniform(-6, 1, (kind.n, 2, 4, 1)), jnp.bfloat16)
    unit = 2.0**-8
    out, lse = mla_blocks(
        q.astype(jnp.float32),
        context,
        blocks,
        free,
        **sizes_of(kind),
        unit=jnp.float32(unit),
        implementation="reference",
    )
    wide, keys = (np.asarray(a.astype(jnp.float32), np.float64) for a in (q, context))
    center = np.asarray(reference.center_of(context, blocks, kind.block, kind.rank), np.float64)
    values = rounded(keys[:, : kind.rank] - center, unit)
    assert np.nanmax(np.abs(np.asarray(context[:, : kind.rank], np.float32))) > 448 * unit
    for n, query, head in np.ndindex(kind.n, kind.queries, kind.heads):
        listed = np.asarray(blocks)[n, head * kind.groups // kind.heads]
        seen = [k for b in listed if b >= 0 for k in range(b * kind.block, (b + 1) * kind.block) if free[k]]
        if not seen:
            assert np.isneginf(lse[n, query, head]) and np.all(out[n, query, head] == 0)
            continue
        row = wide[n, query, head]
        row_unit = 2.0 ** np.ceil(np.log2(np.abs(row[: kind.rank]).max() / 448))
        scores = values[seen] @ rounded(row[: kind.rank], row_unit) + center @ row[: kind.rank]
        scores = (scores + keys[seen, kind.rank :] @ row[kind.rank :]) * SCALE
        weights = np.exp(scores - scores.max())
        wanted = weights @ values[seen] / weights.sum() + center
        np.testing.assert_allclose(out[n, query, head], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[n, query, head], scores.max() + np.log(weights.sum()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_operands_make_the_scores_of_the_reference(size: float, capsys, monkeypatch):
    """Whatever the size of the queries, and of a row whose latent part is 0."""
    kind = Kind(n=1, queries=8, heads=16)
    q, context, _, _ = case(dataclasses.replace(kind, n=2))
    q = jnp.where(jnp.arange(8)[:, None, None] == 3, q * (jnp.arange(kind.rank + ROPE) >= kind.rank), q)[:1] * size
    q, context = q.astype(jnp.bfloat16), jnp.nan_to_num(context)
    rows, shape = bfloat16.rows_of(q, kind.groups, kind.rank, SCALE)
    center, unit = jnp.linspace(-0.3, 0.5, kind.rank), jnp.float32([UNIT])
    with interpreted(capsys, monkeypatch):
        made, offset = jax.block_until_ready(mosaic.queries_of(shape, rows, center, unit))
    made |= mosaic.keys_of(context, center, unit)
    arrays = {name: np.asarray(array.astype(jnp.float32), np.float64) for name, array in made.items()}
    found = arrays["q"] @ arrays["keys"].T
    found = found + arrays["q_rope"] @ np.asarray(context[:, kind.rank :].astype(jnp.float32), np.float64).T
    factor, offset = (np.asarray(a).reshape(2, 8, 8).swapaxes(0, 1).reshape(8, 16, 1) for a in (made["factor"], offset))
    found = found * factor + offset
    wide_q, wide_context = reference._rounded(q.astype(jnp.float32), context, center, UNIT)
    wanted = np.einsum("qhd,sd->qhs", np.asarray(wide_q[0], np.float64), np.asarray(wide_context, np.float64))
    exact = np.asarray(q[0, ..., : kind.rank].astype(jnp.float32), np.float64) @ np.asarray(center)
    wanted = (wanted + exact[..., None]) * SCALE / np.log(2)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())
    tiled = arrays["keys"].reshape(-1, 4, 16, kind.rank)[:, :, value_order()].reshape(-1, 64, kind.rank)
    np.testing.assert_array_equal(arrays["values"], tiled.swapaxes(1, 2))


@pytest.mark.parametrize("none", [False, True])
def test_center_is_the_mean_of_listed_numbers(none: bool):
    """Of blocks that are not listed, and of numbers that are none, nothing."""
    kind = Kind(n=3, listed=2)
    _, context, blocks, _ = case(kind)
    context = context * 2 + 3
    listed = np.unique(np.asarray(blocks)[[0, 1, 2], :, [0, 1, 0]])
    context = context.at[int(listed[-1]) * kind.block, 5].set(jnp.nan)
    center = reference.center_of(context, jnp.full_like(blocks, -1) if none else blocks, kind.block, kind.rank)
    if none:
        assert np.all(np.asarray(center) == 0)
    else:
        np.testing.assert_allclose(center, 3, atol=0.5)


def test_operation_is_near_the_one_in_bfloat16():
    given = case(WIDE)
    (out, lse), (wanted, wanted_lse) = (
        mla_blocks(*given, **sizes_of(WIDE), unit=unit, implementation="reference")
        for unit in (jnp.float32(UNIT), None)
    )
    out, wanted = (np.asarray(a, np.float32) for a in (out, wanted))
    assert 1e-2 < np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 6e-2
    np.testing.assert_allclose(lse, wanted_lse, atol=0.1)


@pytest.mark.parametrize(
    "kind",
    [(256, 128, 4, 2**19), (256, 128, 4, 2**23), (256, 128, 8, 2**18), (64, 16, 4, 2**17), (256, 4, 4, 2**17, 256)],
)
def test_lowers_for_cuda(kind: tuple):
    """Also contexts of more than 2^31 elements, reached by row and tile, not by element."""
    rank = kind[4] if len(kind) > 4 else 512
    run = functools.partial(mla_blocks, block=128, kv_rank=rank, scale=SCALE, implementation="mosaic")
    unit = jax.ShapeDtypeStruct((), jnp.float32)
    assert "mla_blocks_e4m3" in lower_for_cuda(lambda *given: run(*given[:4], unit=given[4]), *operands(*kind), unit)


def test_operands_that_do_not_fit_are_refused():
    q, *rest = operands(4, 16, 4, KEYS)
    run = functools.partial(mla_blocks, block=128, kv_rank=128, scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match="the rope part has 448 dimensions, not 64"):
        jax.eval_shape(lambda *given: run(*given, unit=jnp.float32(1)), q, *rest)
