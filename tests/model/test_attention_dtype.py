"""The engine with attention in fp8: what the casts cost is computed, and the engine must cost the same."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.kernels.reference import mla_prefill as reference
from jaxinfer.model import attention, sparse
from tests.oracles import oracle


def rounded(x):
    """Four significant bits: e4m3 without its range, so that no scale is in it."""
    mantissa, exponent = jnp.frexp(x.astype(jnp.float32))
    return jnp.ldexp(jnp.round(mantissa * 16) / 16, exponent)


def fake(q, latents, k_b, v_b, key_limit, *, scale, e4m3):
    """Attention in float32 on rounded numbers."""
    assert e4m3
    rank = k_b.shape[2]
    latents = jnp.where((jnp.arange(len(latents)) < jnp.max(key_limit))[:, None], latents, 0)
    latent, rope = latents[:, :rank].astype(jnp.bfloat16), latents[:, rank:]
    k, v = (
        rounded(jnp.einsum("sc,hdc->shd", latent, w.astype(jnp.bfloat16), preferred_element_type=jnp.bfloat16))
        for w in (k_b, v_b)
    )
    rope = jnp.broadcast_to(rounded(rope)[:, None], (*k.shape[:2], rope.shape[1]))
    return reference._attend(rounded(q), jnp.concatenate((k, rope), axis=-1), v, key_limit, scale)


def served(
    name: str, mesh: str, attention_dtype: str, prompts: list[list[int]], attention: str = "dense"
) -> np.ndarray:
    with LLM(
        model=str(oracle(name)),
        precision="fp32",
        attention_dtype=attention_dtype,
        attention=attention,
        mesh=mesh,
        chunk_size=8,
        page_size=8,
        max_context=64,
        max_num_seqs=1,
    ) as llm:
        return np.stack([llm.logits(ids) for ids in prompts])


def deviation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)))


@pytest.mark.parametrize(
    "name, mesh",
    [("deepseek_v3", "cp=2"), pytest.param("deepseek_v2_lite", "cp=1", marks=pytest.mark.slow)],
)
def test_logits_move_by_what_the_casts_cost(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch):
    """A number on the border of two is rounded the other way now and then, and moves its prompt."""
    prompts = np.load(oracle(name) / "reference.npz")["input_ids"][0][:30].reshape(3, 10).tolist()
    plain, got = (served(name, mesh, kind, prompts) for kind in ("bf16", "fp8"))
    monkeypatch.setattr(attention, "mla_prefill", fake)
    expected = served(name, mesh, "fp8", prompts)
    cost = deviation(expected, plain)
    assert cost > 1e-3 * np.std(plain)
    assert deviation(got, plain) == pytest.approx(cost, rel=0.1)
    assert deviation(got, expected) < 0.2 * cost


def test_retrieved_blocks_are_read_in_fp8(monkeypatch: pytest.MonkeyPatch):
    """Beside dense attention, and not the windows: they cost less than all keys do."""
    grid = "window=8,anchor_gap=8,sinks=8,block=8,query_block=8,group=4,dense_below=16,hot_epoch=16"
    hybrid = f"hybrid:{grid},candidates=8,voters=4,retrieve_blocks=4,hot_blocks=2,head_groups=1"
    prompts = np.load(oracle("deepseek_v3") / "reference.npz")["input_ids"][0][:60].reshape(1, 60).tolist()
    got = served("deepseek_v3", "cp=1", "fp8", prompts, hybrid)
    dense = [served("deepseek_v3", "cp=1", kind, prompts) for kind in ("bf16", "fp8")]
    in_float32 = sparse.mla_blocks
    monkeypatch.setattr(sparse, "mla_blocks", lambda *operands, unit, **sizes: in_float32(*operands, **sizes))
    without = served("deepseek_v3", "cp=1", "fp8", prompts, hybrid)
    np.testing.assert_array_equal(got[:, :16], without[:, :16])
    cost, of_dense = deviation(got[:, 16:], without[:, 16:]), deviation(dense[0][:, 16:], dense[1][:, 16:])
    assert 0.05 * of_dense < cost < of_dense
