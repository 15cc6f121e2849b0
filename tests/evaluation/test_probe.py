"""The constructed model: it finds every value when the engine is exact and its dials allow it, and not otherwise."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest

from jaxinfer.build import build_engine
from jaxinfer.checkpoint.constructed import token_codes
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.model import ModelConfig
from jaxinfer.configs.probe import CLUSTERS, PROBE, ProbeDials, split_dials
from jaxinfer.evaluation.haystack import noise
from jaxinfer.evaluation.scoring import ask, score_parts
from jaxinfer.evaluation.tasks import Sample, Settings, make_sample
from jaxinfer.llm import LLM

LOOKUPS = 12


def opened(context: int, mesh: str = "", precision: str = "fp32", **overrides: float) -> LLM:
    options = EngineOptions(
        model=PROBE, mesh=mesh, precision=precision, max_context=context, max_num_seqs=1, overrides=overrides
    )
    return LLM.from_engine(build_engine(options))


def lookups(length: int, key_tokens: int = 3) -> Sample:
    settings = Settings(
        tokenizer=None, ordinary=np.arange(8192), haystack=noise(), kv_lookups=LOOKUPS, kv_key_tokens=key_tokens
    )
    return make_sample("kv", length, 0.0, 0, settings)


def found(llm: LLM, sample: Sample) -> int:
    """Values found: eleven in teacher-forced prefill, one in decode."""
    return round(sum(score_parts(sample, ask(llm, [sample])[0])))


@pytest.fixture(scope="module", params=["", "cp=8"])
def mesh(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_every_value_is_found(mesh: str, precision: str) -> None:
    with opened(8192, mesh, precision) as llm:
        assert found(llm, lookups(512)) == LOOKUPS
        if (mesh, precision) == ("", "bf16"):
            assert found(llm, lookups(8192)) == LOOKUPS


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_value_is_found_in_long_texts(mesh: str, precision: str) -> None:
    with opened(32768, mesh, precision) as llm:
        assert found(llm, lookups(8192)) == LOOKUPS
        assert found(llm, lookups(32768)) == LOOKUPS


@pytest.mark.parametrize("beta", [1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_weak_beta_fails_as_predicted(beta: float) -> None:
    """The answer's weight is a softmax over the right place, the near misses (one token less) and everything else."""
    sample, length = lookups(1024), 1024
    with opened(1024, beta=beta) as llm:
        (answer,) = ask(llm, [sample])
        score = sum(score_parts(sample, answer))
    assert answer.logits is not None
    rows = [row for part in sample.parts for row in part.rows or ()]
    targets = [token for part in sample.parts if part.rows for token in part.reference]
    logits = answer.logits[np.searchsorted(answer.rows, rows), targets]
    # Codes of different tokens have a cosine of variance 1/64; the projections to 43 dimensions add some.
    noise_of = [math.exp(beta**2 * tokens / 43 / 2) for tokens in (1, 3)]
    # A near miss resembles the tokens before a value's first token only.
    near = length / 32 / LOOKUPS * math.exp(2 * beta) * noise_of[0] / 4
    weight = math.exp(3 * beta) / (math.exp(3 * beta) + near + length * noise_of[1])
    # The norm behind the layers counts a full answer; a weak one leaves the others larger.
    predicted = 20 * weight * math.sqrt(6 / (5 + weight**2))
    assert 0.75 < float(np.mean(logits)) / predicted < 1.35
    assert (score < 3) == (beta == 1.0)


def test_correlated_codes_need_a_strong_beta() -> None:
    sample = lookups(1024, key_tokens=2)
    with opened(1024, correlation=0.98, key_tokens=2) as llm:
        assert found(llm, sample) < 4
    with opened(1024, correlation=0.98, key_tokens=2, beta=1000.0) as llm:
        assert found(llm, sample) == LOOKUPS


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.98])
def test_codes_of_a_cluster_resemble_each_other(correlation: float) -> None:
    code = token_codes(2048, correlation, np.random.default_rng(0))
    np.testing.assert_allclose(np.linalg.norm(code, axis=1), 1, atol=1e-5)
    cosines = code[:: 2 * CLUSTERS] @ code[CLUSTERS :: 2 * CLUSTERS].T
    assert np.mean(cosines) == pytest.approx(correlation, abs=0.05)
    assert abs(np.mean(code[::CLUSTERS] @ code[1::CLUSTERS].T)) < 0.05


def test_the_probe_is_an_ordinary_model() -> None:
    with opened(1024) as llm:
        config = llm.config
        assert isinstance(config, ModelConfig) and config.architecture == "deepseek_v3"
        assert (config.num_dense_layers, config.num_moe_layers, llm.tokenizer) == (1, 1, None)
        router = llm.engine.runner.params["moe"]["moe"]["router"]
        assert np.asarray(router).std() > 0.5
        experts = np.argsort(np.random.default_rng(0).standard_normal((500, 384)) @ np.asarray(router)[0].T)[:, -1]
        assert len(set(experts.tolist())) == config.num_experts


def test_dials() -> None:
    dials, rest = split_dials({"beta": 8, "max_position_embeddings": 4096})
    assert dials == ProbeDials(beta=8) and rest == {"max_position_embeddings": 4096}
    for overrides, words in (
        ({"hidden_size": 128}, "got hidden_size"),
        ({"beta": 0}, "positive beta"),
        ({"key_tokens": 4}, "2 or 3"),
        ({"correlation": 1.0}, r"\[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=words):
            split_dials(overrides)
    with pytest.raises(ValueError, match="hidden_size"):
        build_engine(EngineOptions(model=PROBE, overrides={"hidden_size": 128}))
    assert dataclasses.asdict(ProbeDials())["key_tokens"] == 3
