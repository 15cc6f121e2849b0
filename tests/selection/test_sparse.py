"""Sparse attention: the definition by a mask, the forms that read only what is selected, and that both are one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.mla_sparse import listed_keys, listed_values, mla_blocks, mla_window
from jaxinfer.kernels.reference import mla_sparse as reference
from jaxinfer.kernels.selection.grid import eligible_blocks, window_start
from jaxinfer.kernels.selection.sources import SOURCES, sources
from jaxinfer.sharding.collectives import merge

HEADS, NOPE, ROPE, V, RANK = 4, 8, 4, 6, 10
BLOCK, QUERIES, SINKS, KEYS = 8, 4, 16, 256


masked = jax.jit(reference.mla_masked, static_argnames="scale")
all_sources = jax.jit(sources, static_argnames=("sinks", "block"))


class Case:
    """Queries at the end of a context, and a random selection of what they read."""

    def __init__(self, seed: int, positions: np.ndarray, window: int = 40, listed: int = 5, groups: int = 2):
        rng = np.random.default_rng(seed)
        self.positions = positions.astype(np.int32)
        self.q = rng.normal(size=(len(positions), HEADS, NOPE + ROPE)).astype(np.float32)
        self.context = rng.normal(size=(KEYS, RANK + ROPE)).astype(np.float32)
        self.k_b = rng.normal(size=(HEADS, NOPE, RANK)).astype(np.float32)
        # Values of unit size, so that a bound on errors is one relative to them.
        self.v_b = (rng.normal(size=(HEADS, V, RANK)) / RANK**0.5).astype(np.float32)
        sizes = {"window": window, "block": BLOCK, "query_block": QUERIES, "dense_below": 60}
        self.first = window_start(self.positions, **sizes).astype(np.int32)
        self.anchor = rng.random(KEYS) < 0.05
        n = len(positions) // QUERIES
        self.hot = np.full((n, 2), -1, np.int32)
        self.blocks = np.full((n, groups, listed), -1, np.int32)
        for i in range(n):
            first, end = eligible_blocks(int(self.first[i * QUERIES]), sinks=SINKS, block=BLOCK)
            eligible = rng.permutation(np.arange(first, max(first, end)))
            hot, others = eligible[:2], eligible[2:]
            self.hot[i, : len(hot)] = hot
            for g in range(groups):
                chosen = [*hot, *rng.permutation(others)[: listed - 2]]
                self.blocks[i, g, : len(chosen)] = chosen

    def sources(self) -> np.ndarray:
        arrays = self.positions, self.first, self.anchor, self.hot, self.blocks
        return np.asarray(all_sources(*map(jnp.asarray, arrays), sinks=SINKS, block=BLOCK))

    def masked(self):
        mask = np.repeat(self.sources() > 0, HEADS // self.blocks.shape[1], axis=1)
        arrays = self.q, self.context, self.k_b, self.v_b, mask
        return masked(*map(jnp.asarray, arrays), scale=0.3)

    def composed(self):
        at = np.flatnonzero(self.anchor | (np.arange(KEYS) < SINKS))
        shared = np.pad(at, (0, KEYS // 4 - len(at)), constant_values=KEYS - 1)
        before = np.searchsorted(at, self.first).astype(np.int32)
        arrays = self.q, self.context, self.k_b, self.v_b, self.positions, self.first, shared, before
        return composed(*map(jnp.asarray, (*arrays, self.blocks, ~self.anchor)))


@jax.jit
def composed(q, context, k_b, v_b, positions, first, shared, before, blocks, free):
    """Window and shared keys expanded, blocks absorbed."""
    expanded = mla_window(q, context, k_b, v_b, first, positions + 1, context[shared], before, scale=0.3)
    absorbed = jnp.concatenate((jnp.einsum("thn,hnc->thc", q[..., :NOPE], k_b), q[..., NOPE:]), axis=-1)
    split = absorbed.reshape(-1, QUERIES, *absorbed.shape[1:])
    out, lse = mla_blocks(split, context, blocks, free, block=BLOCK, kv_rank=RANK, scale=0.3)
    values = jnp.einsum("nqhc,hvc->nqhv", out, v_b.astype(jnp.float32)).reshape(-1, HEADS, V)
    return merge(*expanded, values, lse.reshape(-1, HEADS))


def assert_close(got, wanted, atol: float = 1e-5) -> None:
    for ours, its in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, its, atol=atol)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), start=st.integers(0, KEYS // QUERIES - 8))
def test_composed_form_equals_the_definition(seed: int, start: int):
    case = Case(seed, start * QUERIES + np.arange(32))
    assert_close(case.composed(), case.masked())


def test_rows_without_a_query_read_nothing():
    positions = np.arange(200, 232)
    positions[29:] = -1
    case = Case(0, positions)
    case.first[29:] = case.first[28]
    out, lse = case.composed()
    assert_close((out[:29], lse[:29]), [array[:29] for array in case.masked()])
    assert (case.sources()[29:] == -1).all()


def test_a_selection_of_everything_is_dense_attention_bit_for_bit():
    case = Case(1, np.arange(128, 160), listed=20)
    for i in range(len(case.blocks)):
        case.blocks[i, :, :] = -1
        first, end = eligible_blocks(int(case.first[i * QUERIES]), sinks=SINKS, block=BLOCK)
        case.blocks[i, :, : end - first] = np.arange(first, end)
    got = case.masked()
    q, context, k_b, v_b = map(jnp.asarray, (case.q, case.context, case.k_b, case.v_b))
    limit = jnp.asarray(case.positions + 1)
    for ours, dense in zip(got, mla_prefill(q, context, k_b, v_b, limit, scale=0.3), strict=True):
        np.testing.assert_array_equal(ours, dense)
    assert_close(case.composed(), got)


def test_sources_are_told_apart():
    case = Case(2, np.arange(200, 232))
    found = case.sources()
    for t, position in enumerate(case.positions):
        for g in range(2):
            listed, hot = set(case.blocks[t // QUERIES, g]) - {-1}, set(case.hot[t // QUERIES]) - {-1}
            for key in range(KEYS):
                if key > position:
                    wanted = -1
                elif key >= case.first[t]:
                    wanted = SOURCES.index("window")
                elif key < SINKS:
                    wanted = SOURCES.index("sinks")
                elif case.anchor[key]:
                    wanted = SOURCES.index("anchors")
                elif key // BLOCK in listed:
                    wanted = SOURCES.index("hot" if key // BLOCK in hot else "retrieved")
                else:
                    wanted = SOURCES.index("missed")
                assert found[t, g, key] == wanted
    assert set(np.unique(found)) == {-1, 0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("tile", [512, 32, 24])
def test_window_of_any_ranges(tile: int, monkeypatch: pytest.MonkeyPatch):
    """With tiles of keys that divide the context, and that do not; keys outside every range hold no number."""
    monkeypatch.setattr(reference, "_TILE", tile)
    monkeypatch.setattr(reference, "_SCORE_BYTES", HEADS * tile * 4 * 8)
    rng = np.random.default_rng(5)
    case = Case(3, np.arange(100, 132))
    first = rng.integers(60, 120, 32).astype(np.int32)
    limit = first + rng.integers(-3, 40, 32).astype(np.int32)
    first[7], limit[7] = 250, 250
    keys = np.arange(KEYS)
    mask = (keys >= first[:, None]) & (keys < limit[:, None])
    clean, k_b, v_b, q = map(jnp.asarray, (case.context, case.k_b, case.v_b, case.q))
    wanted = reference.mla_masked(q, clean, k_b, v_b, jnp.repeat(jnp.asarray(mask)[:, None], HEADS, 1), scale=0.3)
    case.context[~mask.any(axis=0)] = np.nan
    unread, before = jnp.full_like(clean[:1], jnp.nan), jnp.zeros(32, jnp.int32)
    arrays = q, jnp.asarray(case.context), k_b, v_b, jnp.asarray(first), jnp.asarray(limit), unread, before
    got = mla_window(*arrays, scale=0.3)
    assert_close(got, wanted)
    assert np.isneginf(got[1][7]).all() and not np.asarray(got[0][7]).any()


@pytest.mark.parametrize("budget", [2**28, 1])
def test_blocks_of_any_kind(budget: int, monkeypatch: pytest.MonkeyPatch):
    """None at all, and blocks of which no key counts; also one query block at a time."""
    monkeypatch.setattr(reference, "_SCORE_BYTES", budget)
    case = Case(4, np.arange(200, 216))
    case.blocks[1] = -1
    case.anchor[case.blocks[2, 0, 0] * BLOCK :][:BLOCK] = True
    assert_close(case.composed(), case.masked())
    q = jnp.zeros((4, QUERIES, HEADS, RANK + ROPE))
    arrays = q, jnp.asarray(case.context), jnp.asarray(case.blocks), jnp.asarray(~case.anchor)
    out, lse = mla_blocks(*arrays, block=BLOCK, kv_rank=RANK, scale=1.0)
    assert np.isneginf(lse[1]).all() and not np.asarray(out[1]).any()


def test_bfloat16_accumulates_in_float32():
    case = Case(6, np.arange(200, 232))
    for name in ("q", "context", "k_b", "v_b"):
        rounded = jnp.asarray(getattr(case, name), jnp.bfloat16)
        setattr(case, name, np.asarray(rounded.astype(jnp.float32)))
    wanted, wanted_lse = case.masked()
    for name in ("q", "context", "k_b", "v_b"):
        setattr(case, name, jnp.asarray(getattr(case, name), jnp.bfloat16))
    out, lse = case.composed()
    assert out.dtype == lse.dtype == jnp.float32
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 1e-2
    np.testing.assert_allclose(lse, wanted_lse, rtol=2**-8, atol=2**-7)  # two roundings of each logit's factors


def test_decode_over_listed_tokens():
    rng = np.random.default_rng(7)
    page_size, dim = 4, RANK + ROPE
    cache = rng.normal(size=(2, 12, page_size, dim)).astype(np.float32)
    table = rng.permutation(12).reshape(3, 4).astype(np.int32)
    tokens = np.stack([rng.permutation(16)[:6] for _ in range(3)]).astype(np.int32)
    tokens[0, 3:], tokens[1] = -1, -1
    pages = np.where(tokens < 0, -1, np.take_along_axis(table, tokens // page_size, axis=1)).astype(np.int32)
    q = rng.normal(size=(3, HEADS, dim)).astype(np.float32)
    read = np.zeros(cache.shape[1:3], bool)
    read[pages[tokens >= 0], tokens[tokens >= 0] % page_size] = True
    poisoned = jnp.asarray(np.where(read[None, ..., None], cache, np.nan))
    where = jnp.int32(1), jnp.asarray(pages), jnp.asarray(tokens % page_size)
    found = listed_keys(jnp.asarray(q), poisoned, *where, scale=0.4)
    open_keys = rng.random(tokens.shape) < 0.6
    open_keys[0, 0], open_keys[2] = True, rng.permutation([True, True, True, False, False, False])
    out, lse = listed_values(found, jnp.asarray(open_keys), kv_rank=RANK)
    for b in range(3):
        keys = np.stack([cache[1, table[b, t // page_size], t % page_size] for t in range(16)])[tokens[b]]
        for wanted_lse, kept in ((found.lse, tokens[b] >= 0), (lse, (tokens[b] >= 0) & open_keys[b])):
            scores = jnp.asarray(0.4 * q[b] @ keys[kept].T)
            np.testing.assert_allclose(wanted_lse[b], jax.nn.logsumexp(scores, axis=-1), atol=2e-6)
        wanted = jax.nn.softmax(scores, axis=-1) @ keys[kept][:, :RANK] if np.any(kept) else 0
        np.testing.assert_allclose(out[b], wanted, atol=2e-6)
