"""A prompt's few last tokens read the cache as decode does: same answers, on every mesh, beside hybrid attention."""

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.configs.presets import preset
from jaxinfer.model import attention
from tests.oracles import oracle

HYBRID = (
    "hybrid:window=128,anchor_gap=64,sinks=64,block=64,hot_epoch=256,dense_below=256,candidates=6,voters=4,"
    "retrieve_blocks=2,hot_blocks=2"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every prefill reads in the absorbed form; the counts of tokens that it was asked for."""
    asked: list[int] = []
    monkeypatch.setattr(attention, "absorbs_prefill", lambda tokens, *_: asked.append(tokens) or True)
    return asked


@pytest.mark.parametrize("mesh", ["tp=2,cp=4", pytest.param("cp=8", marks=pytest.mark.slow)])
def test_logits_are_the_references(mesh: str, absorbed: list[int]):
    reference = np.load(oracle("deepseek_v3") / "reference.npz")
    sizes = {"chunk_size": 16, "page_size": 16, "max_num_seqs": 2}
    with LLM(model=str(oracle("deepseek_v3")), precision="fp32", mesh=mesh, **sizes) as llm:
        for ids, logits in zip(reference["input_ids"], reference["logits"], strict=True):
            np.testing.assert_allclose(llm.logits(ids.tolist()), logits, atol=5e-5, rtol=0)
    assert absorbed


@pytest.mark.parametrize("policy", ["dense", pytest.param(HYBRID, marks=pytest.mark.slow)])
def test_several_tiles_and_sequences(policy: str, monkeypatch: pytest.MonkeyPatch):
    """Chunks that two prompts share, whose contexts are several tiles each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (700, 333)]
    sizes = {"max_context": 1024, "max_num_seqs": 2, "chunk_size": 64, "mesh": "cp=2"}
    found = []
    for absorb in (False, True):
        monkeypatch.setattr(attention, "absorbs_prefill", lambda *_, absorb=absorb: absorb)
        with LLM(model="tiny-random", precision="fp32", attention=policy, **sizes) as llm:
            tokens = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
            found.append((llm.logits(prompts[0]), tokens))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=2e-5)
    assert found[1][1] == found[0][1]


def test_chosen_for_few_queries_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    large, small = preset("deepseek-v3", {}), preset("deepseek-v2-lite", {})
    assert not attention.absorbs_prefill(1, 128, large)  # on CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert attention.absorbs_prefill(128, 128, large) and not attention.absorbs_prefill(1024, 128, large)
    # A tile has room for 64 heads.
    assert attention.absorbs_prefill(32, 16, small) and not attention.absorbs_prefill(128, 16, small)
