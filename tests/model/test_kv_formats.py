"""The engine with a quantised cache: the same as with a float32 cache of numbers that were rounded before."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.configs.kv_format import FORMATS
from jaxinfer.engine.memory import device_bytes
from jaxinfer.kernels.norm import rms_norm
from jaxinfer.kernels.rope import apply_rope
from jaxinfer.model import attention
from tests.oracles import oracle

TOLERANCE = 5e-5
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def rounded(x, name: str):
    """Rows rounded as the format holds a latent that 128 does not divide: one scale each."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-4) * jnp.float32(1 / LARGEST[name])
    parts = jnp.clip(x / scale, -LARGEST[name], LARGEST[name])
    return (jnp.round(parts) if name == "int8" else parts.astype(FORMATS[name].dtype).astype(jnp.float32)) * scale


def round_what_is_written(monkeypatch: pytest.MonkeyPatch, name: str):
    """Fake quantisation: float32 arrays of rounded numbers; with int8, queries of decode are rounded as well."""

    def write(cache, layer, page, offset, latents, norm, eps, cos, sin):
        rank = norm.shape[0]
        latent = rounded(rms_norm(latents[:, :rank], norm, eps), name)
        key = apply_rope(latents[:, rank:], cos, sin).astype(jnp.bfloat16).astype(jnp.float32)
        return cache.at[layer, page, offset].set(jnp.concatenate((latent, key), axis=-1), mode="drop")

    def decode(q, *arguments, kv_rank, scale, schedule):
        q = jnp.concatenate((rounded(q[..., :kv_rank], name), q[..., kv_rank:]), axis=-1)
        return exact(q, *arguments, kv_rank=kv_rank, scale=scale, schedule=schedule)

    exact = attention.mla_decode
    monkeypatch.setattr(attention, "cache_write", write)
    if name == "int8":
        monkeypatch.setattr(attention, "mla_decode", decode)


def answers(name: str, kv: str, mesh: str, prompt: list[int]) -> tuple[np.ndarray, list[int], list[float]]:
    """Logits of the prompt, and greedy tokens after it with their log-probabilities."""
    with LLM(
        model=str(oracle(name)),
        precision="fp32",
        kv=kv,
        mesh=mesh,
        chunk_size=16,
        page_size=16,
        max_num_seqs=2,
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        output = llm.generate([prompt], greedy)[0].outputs[0]
        chosen = [item.chosen.logprob for item in output.logprobs or []]
        assert llm.engine.runner.compilations.count == 0
        runner, config = llm.engine.runner, llm.engine.config
        tokens = runner.capacity.pages_per_rank * runner.capacity.layout.page_size
        size = config.num_layers * FORMATS[kv].token_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
        assert device_bytes(runner.cache) == tokens * size
        return llm.logits(prompt), output.token_ids, chosen


@pytest.mark.parametrize(
    "kv, name, mesh",
    [
        ("int8", "deepseek_v3", "cp=1"),
        pytest.param("int8", "deepseek_v2_lite", "cp=4", marks=pytest.mark.slow),
        ("fp8_e4m3", "deepseek_v3", "cp=2"),
        pytest.param("fp8_e5m2", "deepseek_v3", "dp=2,cp=4", marks=pytest.mark.slow),
        pytest.param("int8", "deepseek_v3", "cp=4,ep=2", marks=pytest.mark.slow),
    ],
)
def test_same_as_rounded_numbers_in_float32(kv: str, name: str, mesh: str, monkeypatch: pytest.MonkeyPatch):
    reference = np.load(oracle(name) / "reference.npz")
    prompt, exact = reference["input_ids"][0].tolist(), reference["logits"][0]
    logits, tokens, chosen = answers(name, kv, mesh, prompt)
    round_what_is_written(monkeypatch, kv)
    wanted, wanted_tokens, wanted_chosen = answers(name, "fp32", mesh, prompt)
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)
    assert tokens == wanted_tokens
    np.testing.assert_allclose(chosen, wanted_chosen, atol=TOLERANCE, rtol=0)
    # The rounding is there at all.
    assert np.abs(logits - exact).max() > 100 * TOLERANCE
