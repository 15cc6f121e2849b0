"""What lies outside the window and between two anchors is found: retrieval brings it, whatever its place."""

import numpy as np
import pytest

from jaxinfer.build import build_engine
from jaxinfer.configs.engine import EngineOptions
from jaxinfer.configs.probe import PROBE
from jaxinfer.evaluation.haystack import king_james, noise
from jaxinfer.evaluation.scoring import ask, score_parts
from jaxinfer.evaluation.tasks import Settings, make_sample, ordinary_tokens
from jaxinfer.llm import LLM

LOOKUPS = 12
GRID = "window=256,anchor_gap=128,sinks=64,dense_below=512,hot_epoch=256"
# A value's place is three tokens; the codes of all others are noise, which a mean of many tokens drowns in: groups are
# small, the index has all numbers that the probe's keys have, and every query speaks for itself.
FINE = (
    f"hybrid:{GRID},block=32,group=4,index_dim=128,probes=32,head_groups=1,voters=8,candidates=24,retrieve_blocks=8,"
    "hot_blocks=2"
)
BLIND = f"hybrid:{GRID},block=32,group=32,probes=1,head_groups=1,voters=1,candidates=1,retrieve_blocks=1,hot_blocks=0"
TIGHT = f"hybrid:{GRID},block=64,candidates=16,retrieve_blocks=4,hot_blocks=2"
"""At 4,096 tokens about 800 keys a query."""


def opened(model: str | None, context: int, attention: str, mesh: str = "") -> LLM:
    options = EngineOptions(model=model, mesh=mesh, max_context=context, max_num_seqs=1, attention=attention)
    return LLM.from_engine(build_engine(options, progress=False))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "cp=4"])
def test_the_constructed_model_finds_every_value(mesh: str):
    settings = Settings(tokenizer=None, ordinary=np.arange(8192), haystack=noise(), kv_lookups=LOOKUPS, kv_key_tokens=3)
    sample = make_sample("kv", 2048, 0.0, 0, settings)
    with opened(PROBE, 2048, FINE, mesh) as llm:
        assert sum(score_parts(sample, ask(llm, [sample])[0])) == LOOKUPS


@pytest.mark.slow
def test_without_retrieval_most_values_are_lost():
    """So that the test above shows what it should."""
    settings = Settings(tokenizer=None, ordinary=np.arange(8192), haystack=noise(), kv_lookups=LOOKUPS, kv_key_tokens=3)
    sample = make_sample("kv", 2048, 0.0, 0, settings)
    with opened(PROBE, 2048, BLIND) as llm:
        assert sum(score_parts(sample, ask(llm, [sample])[0])) <= LOOKUPS // 2


@pytest.mark.slow
def test_the_bundled_model_finds_the_pass_key_at_every_depth():
    with opened(None, 4096, TIGHT) as llm:
        assert llm.tokenizer is not None
        settings = Settings(
            tokenizer=llm.tokenizer,
            ordinary=ordinary_tokens(llm.tokenizer, llm.tokenizer.vocab_size),
            haystack=king_james(),
        )
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
            sample = make_sample("passkey", 4096, depth, 0, settings)
            assert sum(score_parts(sample, ask(llm, [sample])[0])) == 1, depth
