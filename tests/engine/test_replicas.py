"""Replicas that take a step together do not see each other, however unequal what they read."""

import numpy as np
import pytest

from jaxinfer.engine.request import SamplingParams
from jaxinfer.llm import LLM


@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.slow), "cp=2,ep=2"])
def test_prompts_of_unequal_lengths_are_scored_as_alone(mesh: str):
    """Contexts of several tiles in one replica, while the other has fewer."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (1200, 700, 60)]
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(model="tiny-random", mesh=mesh, max_context=2048, chunk_size=128) as llm:
        together = llm.generate(prompts, wanted)
        alone = [llm.generate([prompt], wanted)[0] for prompt in prompts]
    for ours, its in zip(together, alone, strict=True):
        scores = [[entry.chosen.logprob for entry in output.prompt_logprobs[1:]] for output in (ours, its)]
        np.testing.assert_allclose(*scores, atol=1e-4)
