"""Prefill attention in e4m3: the casts, the Mosaic kernel in the interpreter against float32, and lowered for CUDA."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import get_memory_space_idx
from jax._src.state.primitives import ref_set

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mla_prefill import mla_prefill, workspace
from jaxinfer.kernels.mosaic import attention_e4m3
from jaxinfer.kernels.mosaic import mla_prefill_e4m3 as mosaic
from jaxinfer.kernels.mosaic.attention_e4m3 import Blocks
from jaxinfer.kernels.reference import mla_prefill as reference
from jaxinfer.kernels.reference.expansion import Operands, expand
from tests.kernels.interpreter import as_e4m3
from tests.kernels.products import lower_for_cuda

RANK = 32
rounded = jax.jit(expand)


@contextmanager
def interpreted(capsys: pytest.CaptureFixture) -> Iterator[None]:
    """Runs Mosaic kernels on the CPU and fails if two of their threads race, in other memory than registers.

    Teaches JAX's interpreter what it lacks: left operands in registers, the rounding between layouts, and the vote.
    """
    wgmma = plgpu.wgmma

    def any_wgmma(acc, a, b):
        if isinstance(a, jax.Array):
            acc[...] = acc[...] + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))
            # A plain read, which has to be ordered before the next copy as the tensor cores' own need not be.
            plgpu.commit_smem()
        else:
            wgmma(acc, a, b)

    def any_large(sums, _):
        return jnp.any(~(sums <= attention_e4m3._LARGEST)).astype(jnp.int32)

    def store(acc, value):
        ref_set(acc, ..., value)

    try:
        with (
            patch.object(plgpu, "wgmma", any_wgmma),
            patch.object(attention_e4m3, "_any_large", any_large),
            patch.object(attention_e4m3, "as_e4m3", as_e4m3),
            patch.object(primitives, "wgmma_accumulator_store", store),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        ):
            yield
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    races = capsys.readouterr().out.split("RACE DETECTED")[1:]
    registers = f"memory_space_id={get_memory_space_idx(plgpu.REGS)},"
    assert not [race for race in races if registers not in race]


def case(seed: int, tokens: int, keys: int, heads: int, nope: int, rope: int, v: int):
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    q, latents = normal(tokens, heads, nope + rope), normal(keys, RANK + rope)
    return q, latents, normal(heads, nope, RANK) / 8, normal(heads, v, RANK) / 8


def compare(q, latents, k_b, v_b, limit, capsys, multiprocessors: int = 4, scale: float = 0.1, bound: float = 3e-2):
    """The bound is what rounds of the weights: 2^-4 at most, 2.6e-2 of their root mean square."""
    limit = jnp.asarray(limit, jnp.int32)
    with interpreted(capsys):
        out, lse = mosaic.mla_prefill(
            q, latents, k_b, v_b, limit, scale=scale, blocks=Blocks(stages=2), multiprocessors=multiprocessors
        )
        out, lse = np.asarray(out), np.asarray(lse)
    wanted, wanted_lse = (np.asarray(a) for a in reference.mla_prefill_e4m3(q, latents, k_b, v_b, limit, scale=scale))
    empty = np.asarray(limit) == 0
    assert np.all(out[empty] == 0)
    assert np.all(lse[empty] == -np.inf)
    np.testing.assert_allclose(lse[~empty], wanted_lse[~empty], atol=1e-3)
    assert np.linalg.norm(out - wanted) <= bound * np.linalg.norm(wanted)


def causal(tokens: int, keys: int) -> np.ndarray:
    return np.arange(tokens) + 1 + keys - tokens


INTERPRETED = {
    # tokens, keys, heads, nope, rope, v, limits, multiprocessors: no length is a multiple of a tile.
    "causal": (150, 213, 3, 64, 64, 64, causal(150, 213), 4),
    "one query, one key": (1, 1, 1, 64, 64, 64, causal(1, 1), 2),
    "fewer items than thread blocks": (64, 100, 1, 64, 64, 64, causal(64, 100), 6),
    "nothing before the last block": (512, 130, 2, 64, 64, 64, np.repeat((0, 77), 256), 2),
    "DeepSeek's heads": (130, 300, 2, 128, 64, 128, causal(130, 300), 2),
    "heads of 192": (70, 400, 1, 192, 64, 128, causal(70, 400), 2),
}


SLOW = "DeepSeek's heads", "fewer items than thread blocks", "nothing before the last block", "heads of 192"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in INTERPRETED])
def test_kernel_against_the_reference(name: str, capsys: pytest.CaptureFixture):
    *shape, limits, multiprocessors = INTERPRETED[name]
    compare(*case(0, *shape), limits, capsys, multiprocessors)


def rising(latents: jax.Array) -> jax.Array:
    return latents * jnp.linspace(0.1, 4, len(latents), dtype=jnp.bfloat16)[:, None]


def test_any_key_limits(capsys: pytest.CaptureFixture):
    """Rows that see nothing among rows that see much, scores rising over hundreds: tiles are weighed again."""
    rng = np.random.default_rng(1)
    limits = rng.integers(0, 401, 300) * (rng.random(300) < 0.7)
    limits[128:256] = 0
    q, latents, k_b, v_b = case(1, 300, 400, 1, 64, 64, 64)
    compare(q, rising(latents), k_b, v_b, limits, capsys, scale=3.0)


@pytest.mark.slow
def test_falling_scores(capsys: pytest.CaptureFixture):
    """The first tile outweighs what follows by more than float32 holds."""
    q, latents, k_b, v_b = case(2, 64, 400, 1, 64, 64, 64)
    compare(q, rising(latents)[::-1], k_b, v_b, causal(64, 400), capsys, scale=3.0)


def test_equal_weights_are_not_biased(capsys: pytest.CaptureFixture):
    """Weights relative to the largest score, as near to each other as these, are rounded one way by up to 6 %."""
    q, latents, k_b, v_b = case(3, 64, 1024, 1, 64, 64, 64)
    latents, v_b = jnp.abs(latents), jnp.abs(v_b)
    limit = jnp.full(64, 1024, jnp.int32)
    with interpreted(capsys):
        out, _ = mosaic.mla_prefill(q, latents, k_b, v_b, limit, scale=1e-3, blocks=Blocks(stages=2), multiprocessors=2)
        out = np.asarray(out)
    wanted = np.asarray(reference.mla_prefill_e4m3(q, latents, k_b, v_b, limit, scale=1e-3)[0])
    bias = (out - wanted).mean(axis=2) / wanted.mean(axis=2)
    assert np.abs(bias).max() < 1e-3


def test_rows_that_fill_up_a_block_see_nothing(capsys: pytest.CaptureFixture):
    """NaN there would be cut off, but have every tile of the block weighed again."""
    q, latents, k_b, v_b = case(10, 72, 130, 1, 64, 64, 64)
    made = mosaic.operands(q, latents, k_b, v_b, jnp.int32(130))
    limit = jnp.full(72, 130, jnp.int32)
    with interpreted(capsys):
        out, lse = attention_e4m3.attend(made, limit, scale=0.1, blocks=Blocks(stages=2), multiprocessors=2)
        out, lse = np.asarray(out), np.asarray(lse)
    assert len(out) == 256 and np.all(out[72:] == 0) and np.all(np.isneginf(lse[:, 72:]))
    assert np.all(np.isfinite(lse[:, :72]))


@pytest.mark.slow
def test_what_was_not_written_is_never_read(capsys: pytest.CaptureFixture):
    q, latents, k_b, v_b = case(4, 100, 200, 2, 64, 64, 64)
    compare(q, latents.at[90:].set(jnp.nan), k_b, v_b, np.arange(100) * 90 // 99, capsys)


def wide(operands: Operands) -> list[np.ndarray]:
    """The float64 queries and keys `[*, H, nope + rope]` and values `[S, H, v]` that e4m3 operands stand for."""
    arrays = {name: np.asarray(getattr(operands, name).astype(jnp.float32), np.float64) for name in vars(operands)}
    q = np.concatenate((arrays["q"], arrays["q_rope"]), axis=-1) * arrays["q_scale"].T[..., None]
    shared = np.repeat(arrays["k_rope"][:, None], arrays["k"].shape[1], axis=1)
    v = arrays["v"] * arrays["v_scale"][:, None, None]
    return [q, np.concatenate((arrays["k"], shared), axis=-1), v.transpose(2, 0, 1)]


def test_casts_round_to_four_bits_whatever_the_sizes():
    """Heads, tokens and halves of very different sizes: scores and values are off by what e4m3 rounds."""
    rng = np.random.default_rng(5)
    q, latents, k_b, v_b = case(5, 40, 300, 3, 128, 64, 128)
    q = q * jnp.asarray(10.0 ** rng.uniform(-3, 3, (40, 1, 1)), jnp.bfloat16)
    k_b, v_b = (w * jnp.asarray([1e-3, 1.0, 100.0], jnp.bfloat16)[:, None, None] for w in (k_b, v_b))
    latents = latents.at[:, RANK:].multiply(10)
    got_q, got_k, got_v = wide(rounded(q, latents, k_b, v_b))
    whole = [np.asarray(a.astype(jnp.float32), np.float64) for a in (q, latents, k_b, v_b)]
    k = np.einsum("sc,hdc->shd", whole[1][:, :RANK], whole[2])
    k = np.concatenate((k, np.repeat(whole[1][:, None, RANK:], 3, axis=1)), axis=-1)
    v = np.einsum("sc,hdc->shd", whole[1][:, :RANK], whole[3])
    got, scores = (np.einsum("thd,shd->ths", *pair) for pair in ((got_q, got_k), (whole[0], k)))
    # Each of two factors is rounded by 2.6e-2 in the root mean square, and 6e-2 at most.
    error = np.linalg.norm(got - scores, axis=2) / np.linalg.norm(scores, axis=2)
    assert error.mean() < 4e-2 and error.max() < 8e-2
    assert np.max(np.linalg.norm(got_v - v, axis=(0, 2)) / np.linalg.norm(v, axis=(0, 2))) < 3e-2


def test_casts_do_not_depend_on_the_block():
    """Scales are powers of two: a key alone, and the same among larger ones, are the same numbers."""
    q, latents, k_b, v_b = case(6, 40, 300, 3, 128, 64, 128)
    latents = latents.at[-1].multiply(50)
    (q_some, k_some, v_some), (q_all, k_all, v_all) = (wide(rounded(q, a, k_b, v_b)) for a in (latents[:200], latents))
    some, every = (np.einsum("thd,shd->ths", *pair) for pair in ((q_some, k_some), (q_all, k_all[:200])))
    np.testing.assert_allclose(some, every, atol=1e-3 * np.abs(every).max())
    np.testing.assert_allclose(v_some, v_all[:200], atol=1e-4 * np.abs(v_all).max())


def test_casts_of_nothing_are_finite():
    operands = rounded(*(jnp.zeros_like(array) for array in case(7, 8, 16, 2, 64, 64, 64)))
    assert all(np.all(array == 0) for array in wide(operands))


def test_public_operation_without_any_key():
    q, latents, k_b, v_b = case(8, 10, 20, 2, 64, 64, 64)
    out, lse = mla_prefill(q, latents * jnp.nan, k_b, v_b, jnp.zeros(10, jnp.int32), scale=1.0, e4m3=True)
    assert np.all(np.asarray(out) == 0) and np.all(np.isneginf(lse))


def test_public_operation_is_near_the_one_in_bfloat16():
    operands = case(9, 50, 300, 4, 64, 64, 64)
    limit = jnp.asarray(causal(50, 300), jnp.int32)
    (out, lse), (wanted, wanted_lse) = (
        mla_prefill(*operands, limit, scale=0.1, e4m3=e4m3, implementation="reference") for e4m3 in (True, False)
    )
    assert 1e-2 < np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 6e-2
    np.testing.assert_allclose(lse, wanted_lse, atol=5e-2)


def lower(tokens: int, keys: int, heads: int, nope: int = 128, rope: int = 64, v: int = 128, rank: int = 512) -> str:
    operands = (tokens, heads, nope + rope), (keys, rank + rope), (heads, nope, rank), (heads, v, rank)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in operands]
    prefill = functools.partial(mla_prefill, scale=0.1, e4m3=True, implementation="mosaic")
    return lower_for_cuda(prefill, *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32))


REAL = {
    "DeepSeek-V3, 8K on 8K": (8192, 8192, 128),
    "DeepSeek-V3, 8K on 64K": (8192, 65536, 128),
    "DeepSeek-V3, more than 2^31 elements of everything": (2**17 + 3, 2**18 + 5, 128),
    "V2-Lite": (4096, 4096, 16),
    "bundled": (2048, 2048, 4, 64, 64, 128, 256),
    "keys of 192": (4096, 8192, 64, 192, 64, 128),
    "one token": (1, 1, 16),
}


@pytest.mark.parametrize("name", REAL)
def test_lowers_for_cuda(name: str):
    assert "mosaic_gpu" in lower(*REAL[name])


def test_operands_that_do_not_fit_are_refused():
    operands = case(5, 8, 8, 1, 64, 64, 64)
    limit = jnp.zeros(8, jnp.int32)
    mosaic_only = functools.partial(mla_prefill, scale=1.0, e4m3=True, implementation="mosaic")
    with pytest.raises(ValueError, match="queries are float32"):
        mosaic_only(operands[0].astype(jnp.float32), *operands[1:], limit)
    with pytest.raises(ValueError, match="values of 256 numbers"):
        mosaic_only(*case(5, 8, 8, 1, 64, 64, 256), limit)


@pytest.mark.parametrize("gpu", [False, True])
def test_workspace_bounds_what_xla_reserves(gpu: bool, monkeypatch: pytest.MonkeyPatch):
    shapes = (256, 8, 192), (512, 576), (8, 128, 512), (8, 128, 512)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    prefill = functools.partial(mla_prefill, scale=0.1, e4m3=True, implementation="reference")
    compiled = jax.jit(prefill).lower(*operands, jax.ShapeDtypeStruct((256,), jnp.int32)).compile()
    reserved = compiled.memory_analysis().temp_size_in_bytes
    monkeypatch.setattr(dispatch, "_no_hopper", lambda: None if gpu else "no GPU")
    if gpu:  # keys and values of every head; no scores
        assert 512 * 8 * (128 + 128) * 3 <= workspace(*operands, e4m3=True) < reserved
    else:
        assert reserved <= workspace(*operands, e4m3=True) <= 3 * reserved
