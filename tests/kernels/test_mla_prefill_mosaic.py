"""The Mosaic kernel of MLA prefill: in the interpreter against the float32 reference, and lowered for CUDA."""

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

from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.mosaic import attention
from jaxinfer.kernels.mosaic import mla_prefill as mosaic
from jaxinfer.kernels.mosaic.attention import Blocks, schedule
from jaxinfer.kernels.reference import mla_prefill as reference
from tests.kernels.products import lower_for_cuda

RANK = 32


@contextmanager
def interpreted(capsys: pytest.CaptureFixture) -> Iterator[None]:
    """Runs Mosaic kernels on the CPU and fails if two of their threads race, in other memory than registers.

    Teaches JAX's interpreter what it lacks: left operands in registers, stores to accumulators, and the vote.
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
        return jnp.any(~(sums <= attention._LARGE)).astype(jnp.int32)

    def store(acc, value):
        ref_set(acc, ..., value)

    try:
        with (
            patch.object(plgpu, "wgmma", any_wgmma),
            patch.object(attention, "_any_large", any_large),
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


def compare(q, latents, k_b, v_b, limit, capsys, blocks: Blocks, multiprocessors: int = 4, scale: float = 0.1):
    limit = jnp.asarray(limit, jnp.int32)
    with interpreted(capsys):
        out, lse = mosaic.mla_prefill(
            q, latents, k_b, v_b, limit, scale=scale, blocks=blocks, multiprocessors=multiprocessors
        )
        out, lse = np.asarray(out), np.asarray(lse)
    wanted, wanted_lse = (np.asarray(a) for a in reference.mla_prefill(q, latents, k_b, v_b, limit, scale=scale))
    empty = np.asarray(limit) == 0
    assert np.all(out[empty] == 0)
    assert np.all(lse[empty] == -np.inf)
    np.testing.assert_allclose(lse[~empty], wanted_lse[~empty], atol=1e-3)
    assert np.linalg.norm(out - wanted) <= 4e-3 * np.linalg.norm(wanted)


def causal(tokens: int, keys: int) -> np.ndarray:
    return np.arange(tokens) + 1 + keys - tokens


INTERPRETED = {
    # tokens, keys, heads, nope, rope, v, limits, blocks, multiprocessors: no length is a multiple of a tile.
    "causal": (150, 213, 3, 64, 64, 64, causal(150, 213), Blocks(keys=64), 4),
    "one query, one key": (1, 1, 1, 64, 64, 64, causal(1, 1), Blocks(keys=64), 2),
    "fewer items than thread blocks": (64, 100, 1, 64, 64, 64, causal(64, 100), Blocks(keys=64), 6),
    "nothing before the last block": (512, 130, 2, 64, 64, 64, np.repeat((0, 77), 256), Blocks(keys=64), 2),
    "the bundled model's heads": (130, 300, 2, 64, 64, 128, causal(130, 300), Blocks(), 2),
    "DeepSeek's heads": (130, 300, 2, 128, 64, 128, causal(130, 300), Blocks(), 2),
    "GLM-5's heads": (70, 90, 1, 192, 64, 256, causal(70, 90), Blocks(keys=64), 2),
    "three stages": (270, 333, 1, 64, 64, 64, causal(270, 333), Blocks(keys=64, stages=3), 4),
    "heads apart": (150, 213, 3, 64, 64, 64, causal(150, 213), Blocks(keys=64, l2_bytes=0), 4),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_kernel_against_the_reference(name: str, capsys: pytest.CaptureFixture):
    *shape, limits, blocks, multiprocessors = INTERPRETED[name]
    compare(*case(0, *shape), limits, capsys, blocks, multiprocessors)


def test_any_key_limits(capsys: pytest.CaptureFixture):
    """Rows that see nothing among rows that see much: a mask on every tile, blocks without a key."""
    rng = np.random.default_rng(1)
    limits = rng.integers(0, 201, 300) * (rng.random(300) < 0.7)
    limits[128:256] = 0
    compare(*case(1, 300, 200, 2, 64, 64, 64), limits, capsys, Blocks(keys=64))


def rising(latents: jax.Array) -> jax.Array:
    return latents * jnp.linspace(0.1, 4, len(latents), dtype=jnp.bfloat16)[:, None]


def test_large_scores(capsys: pytest.CaptureFixture):
    """Scores in the hundreds, rising with the keys: weights are beyond float32 until the largest is found again."""
    q, latents, k_b, v_b = case(2, 150, 256, 1, 64, 64, 64)
    compare(q, rising(latents), k_b, v_b, causal(150, 256), capsys, Blocks(keys=64), scale=3.0)


def test_falling_scores(capsys: pytest.CaptureFixture):
    """The first tile outweighs what follows."""
    q, latents, k_b, v_b = case(2, 64, 256, 1, 64, 64, 64)
    compare(q, rising(latents)[::-1], k_b, v_b, causal(64, 256), capsys, Blocks(keys=64), scale=3.0)


def test_weights_are_found_again_in_every_tile(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_LARGE", -1.0)
    compare(*case(2, 150, 256, 2, 64, 64, 64), causal(150, 256), capsys, Blocks(keys=64))


def test_weights_far_from_one(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Scores that grow by less than what float32 holds are never weighed again."""
    monkeypatch.setattr(attention, "_LARGE", 2.0**100)
    q, latents, k_b, v_b = case(2, 64, 256, 1, 64, 64, 64)
    compare(q, rising(latents), k_b, v_b, causal(64, 256), capsys, Blocks(keys=64), scale=0.3)


def test_what_was_not_written_is_never_read(capsys: pytest.CaptureFixture):
    q, latents, k_b, v_b = case(3, 100, 200, 2, 64, 64, 64)
    compare(q, latents.at[90:].set(jnp.nan), k_b, v_b, np.arange(100) * 90 // 99, capsys, Blocks(keys=64))


def test_nothing_to_see(capsys: pytest.CaptureFixture):
    q, latents, k_b, v_b = case(4, 10, 20, 2, 64, 64, 64)
    compare(q, latents * jnp.nan, k_b, v_b, np.zeros(10), capsys, Blocks(keys=64))


def test_schedule_is_longest_first():
    limits = jnp.asarray([3] * 128 + [0] * 128 + [300] * 191 + [500] * 64 + [129], jnp.int32)
    order, rows = (np.asarray(a).tolist() for a in schedule(limits, 128))
    assert order == [[1, 0], [4, 1]]
    assert rows == [[1, 1, 1, 1, 3, 3, 4, 4], [0, 0, 0, 0, 2, 2, 2, 1]]


def lower(tokens: int, keys: int, heads: int, nope: int = 128, rope: int = 64, v: int = 128, rank: int = 512) -> str:
    operands = (tokens, heads, nope + rope), (keys, rank + rope), (heads, nope, rank), (heads, v, rank)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in operands]
    prefill = functools.partial(mla_prefill, scale=0.1, implementation="mosaic")
    return lower_for_cuda(prefill, *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32))


REAL = {
    "DeepSeek-V3, 8K on 8K": (8192, 8192, 128),
    "DeepSeek-V3, 8K on 64K": (8192, 65536, 128),
    "DeepSeek-V3, more than 2^31 elements of everything": (2**17 + 3, 2**18 + 5, 128),
    "V2-Lite": (4096, 4096, 16),
    "Kimi": (8192, 16384, 64),
    "GLM-5": (4096, 8192, 64, 192, 64, 256),
    "bundled": (2048, 2048, 4, 64, 64, 128, 256),
    "one token": (1, 1, 16),
}


@pytest.mark.parametrize("name", REAL)
def test_lowers_for_cuda(name: str):
    assert "mosaic_gpu" in lower(*REAL[name])


def test_operands_that_do_not_fit_are_refused():
    operands = case(5, 8, 8, 1, 64, 64, 64)
    limit = jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match="queries are float32"):
        mla_prefill(operands[0].astype(jnp.float32), *operands[1:], limit, scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match=r"8 \+ 64 and 64 are not all multiples of 64"):
        mla_prefill(*case(5, 8, 8, 1, 8, 64, 64), limit, scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match="do not fit into registers"):
        mla_prefill(*case(5, 8, 8, 1, 64, 64, 320), limit, scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match=r"expected keys % 64 = 0"):
        Blocks(keys=96)
