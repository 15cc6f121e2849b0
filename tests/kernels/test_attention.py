"""The attention kernels against a slow and obvious form in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mla_decode import mla_decode
from jaxinfer.kernels.mla_prefill import mla_prefill, workspace
from jaxinfer.kernels.reference import mla_prefill as prefill_reference
from jaxinfer.sharding.collectives import merge

HEADS, NOPE, ROPE, V, RANK = 3, 8, 4, 6, 10


def softmax_rows(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Output and log-sum-exp of one query; 0 and -inf without keys."""
    if not len(scores):
        return np.zeros(values.shape[1]), -np.inf
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum(), scores.max() + np.log(weights.sum())


def case(seed: int, tokens: int, keys: int):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(tokens, HEADS, NOPE + ROPE))
    latents = rng.normal(size=(keys, RANK + ROPE))
    k_b, v_b = rng.normal(size=(HEADS, NOPE, RANK)), rng.normal(size=(HEADS, V, RANK))
    return q, latents, k_b, v_b


def expected_prefill(q, latents, k_b, v_b, limit, scale):
    out, lse = np.zeros((len(q), HEADS, V)), np.zeros((len(q), HEADS))
    for t in range(len(q)):
        for h in range(HEADS):
            seen = latents[: limit[t]]
            keys = np.concatenate((seen[:, :RANK] @ k_b[h].T, seen[:, RANK:]), axis=1)
            out[t, h], lse[t, h] = softmax_rows(keys @ q[t, h] * scale, seen[:, :RANK] @ v_b[h].T)
    return out, lse


def as_f32(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(array, jnp.float32) for array in arrays]


@pytest.mark.parametrize("score_bytes", [2**30, 64])
def test_prefill_of_any_key_limits(score_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Also with a budget so small that every query is a block of its own."""
    monkeypatch.setattr(prefill_reference, "SCORE_BYTES", score_bytes)
    q, latents, k_b, v_b = case(0, tokens=8, keys=13)
    limit = np.array([0, 1, 13, 5, 0, 12, 13, 2], np.int32)
    got = mla_prefill(*as_f32(q, latents, k_b, v_b), jnp.asarray(limit), scale=0.3)
    for ours, wanted in zip(got, expected_prefill(q, latents, k_b, v_b, limit, 0.3), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6)


def test_prefill_never_reads_what_was_not_written():
    q, latents, k_b, v_b = case(1, tokens=4, keys=9)
    limit = jnp.asarray([3, 0, 5, 4], jnp.int32)
    clean = mla_prefill(*as_f32(q, latents, k_b, v_b), limit, scale=1.0)
    latents[5:] = np.nan
    poisoned = mla_prefill(*as_f32(q, latents, k_b, v_b), limit, scale=1.0)
    for ours, wanted in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_prefill_without_any_key_is_the_identity_of_the_merge():
    q, latents, k_b, v_b = case(2, tokens=4, keys=6)
    nothing = jnp.zeros(4, jnp.int32)
    out, lse = mla_prefill(*as_f32(q, np.full_like(latents, np.nan), k_b, v_b), nothing, scale=1.0)
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(lse))
    some = mla_prefill(*as_f32(q, latents, k_b, v_b), nothing + 6, scale=1.0)
    for merged in (merge(out, lse, *some), merge(*some, out, lse)):
        for ours, wanted in zip(merged, some, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    both_out, both_lse = merge(out, lse, out, lse)
    assert np.all(np.asarray(both_out) == 0) and np.all(np.isneginf(both_lse))


def test_prefill_in_parts_merges_to_one_pass():
    q, latents, k_b, v_b = case(3, tokens=5, keys=12)
    limit = np.array([0, 3, 6, 9, 12], np.int32)
    q, latents, k_b, v_b = as_f32(q, latents, k_b, v_b)
    whole = mla_prefill(q, latents, k_b, v_b, jnp.asarray(limit), scale=0.5)
    merged = jnp.zeros((5, HEADS, V)), jnp.full((5, HEADS), -jnp.inf)
    for start in (8, 0, 4):
        part = jnp.asarray(np.clip(limit - start, 0, 4))
        merged = merge(*merged, *mla_prefill(q, latents[start : start + 4], k_b, v_b, part, scale=0.5))
    for ours, wanted in zip(merged, whole, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6)


def test_decode_over_pages_of_very_different_lengths(monkeypatch: pytest.MonkeyPatch):
    from jaxinfer.kernels.reference import mla_decode as reference

    monkeypatch.setattr(reference, "_TILE_BYTES", 4 * 4 * (RANK + ROPE + 2 * HEADS) * 4 * 2)  # two pages at a time
    rng = np.random.default_rng(4)
    page_size, dim = 4, RANK + ROPE
    lengths = np.array([0, 1, 19, 8], np.int32)
    cache = np.full((2, 12, page_size, dim), np.nan)
    order = rng.permutation(12)
    table = np.full((4, 5), 10**6, np.int32)
    q, rows, taken = rng.normal(size=(4, HEADS, dim)), [], 0
    for b, length in enumerate(lengths):
        keys = rng.normal(size=(length, dim))
        rows.append(keys)
        for page, first in enumerate(range(0, length, page_size)):
            table[b, page] = order[taken]
            cache[1, order[taken], : len(keys[first : first + page_size])] = keys[first : first + page_size]
            taken += 1
    arguments = *as_f32(q[:, None], cache), jnp.int32(1), jnp.asarray(table), jnp.asarray(lengths)
    out, lse = (x[:, 0] for x in mla_decode(*arguments, kv_rank=RANK, scale=0.2))
    for b, keys in enumerate(rows):
        for h in range(HEADS):
            wanted, wanted_lse = softmax_rows(keys @ q[b, h] * 0.2, keys[:, :RANK])
            np.testing.assert_allclose(out[b, h], wanted, atol=2e-6)
            np.testing.assert_allclose(lse[b, h], wanted_lse, atol=2e-6)


def test_bfloat16_operands_accumulate_in_float32():
    q, latents, k_b, v_b = case(5, tokens=4, keys=64)
    limit = jnp.full(4, 64, jnp.int32)
    arrays = [array.astype(jnp.bfloat16) for array in as_f32(q, latents, k_b, v_b)]
    out, lse = mla_prefill(*arrays, limit, scale=0.3)
    rounded = [np.asarray(array, np.float64) for array in arrays]
    wanted, wanted_lse = expected_prefill(*rounded, np.full(4, 64), 0.3)
    assert out.dtype == lse.dtype == jnp.float32
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 1e-2
    np.testing.assert_allclose(lse, wanted_lse, atol=3e-2)


@pytest.mark.parametrize("gpu", [False, True])
def test_prefill_workspace_bounds_what_xla_reserves(gpu: bool, monkeypatch: pytest.MonkeyPatch):
    shapes = (256, 8, 192), (512, 576), (8, 128, 512), (8, 128, 512)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    reserved = (
        jax.jit(functools.partial(mla_prefill, scale=0.1, implementation="reference"))
        .lower(*operands, jax.ShapeDtypeStruct((256,), jnp.int32))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    monkeypatch.setattr(dispatch, "_no_hopper", lambda: None if gpu else "no GPU")
    if gpu:  # keys and values of every head; no scores
        assert 512 * 8 * (128 + 128) * 2 <= workspace(*operands) < reserved
    else:
        assert reserved <= workspace(*operands) <= 3 * reserved
