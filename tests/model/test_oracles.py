"""The reference fixtures through the public interface, on every kind of mesh.

`make test` runs each fixture once, on meshes of different kinds; `make test-all` their whole grid.
"""

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxinfer import LLM, SamplingParams
from tests.oracles import oracle, oracle_long

MESHES = ["cp=1", "cp=2", "cp=4", "cp=8", "dp=2,cp=4", "cp=4,ep=2", "tp=2,cp=4", "ep=8"]
FIXTURES = ["deepseek_v3", "deepseek_v3_fp8", "deepseek_v3_mtp", "deepseek_v2_lite"]
TOLERANCE = 5e-5

# (mesh, fixture, attention and dense weights divided at rest) of the fast spread.
SPREAD = [
    ("cp=1", "deepseek_v3_fp8", False),
    ("cp=8", "deepseek_v3", False),
    ("dp=2,cp=4", "deepseek_v3_mtp", False),
    ("cp=4,ep=2", "deepseek_v2_lite", False),
    ("tp=2,cp=4", "deepseek_v3", True),
]
GRID = [(m, f, False) for m in MESHES for f in FIXTURES] + [(m, "deepseek_v3", True) for m in MESHES if m != "ep=8"]


LONG_SPREAD = [("cp=8", 8, 64), ("cp=4,ep=2", 64, 8)]
LONG_GRID = [(m, chunk, page) for m in MESHES for chunk in (8, 16, 64, "whole") for page in (8, 64)]


def cases(spread: list[tuple], grid: list[tuple]) -> list:
    """The spread, and what else is in the grid as slow cases."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in grid if case not in spread]
    return [pytest.param(*case) for case in spread] + slow


@pytest.mark.parametrize("mesh, name, at_rest", cases(SPREAD, GRID))
def test_logits_and_greedy_continuation(mesh: str, name: str, at_rest: bool):
    reference = np.load(oracle(name) / "reference.npz")
    with LLM(
        model=str(oracle(name)),
        precision="fp32",
        mesh=mesh,
        chunk_size=16,
        page_size=16,
        max_num_seqs=2,
        shard_dense_weights=at_rest,
    ) as llm:
        prompts = [row.tolist() for row in reference["input_ids"]]
        for ids, logits in zip(prompts, reference["logits"], strict=True):
            np.testing.assert_allclose(llm.logits(ids), logits, atol=TOLERANCE, rtol=0)
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0))
        if "greedy" in reference.files:  # deepseek_v3_mtp has logits only
            for answer, greedy, margin in zip(answers, reference["greedy"], reference["greedy_margin"], strict=True):
                unsure = np.flatnonzero(margin < 1e-3)
                sure = unsure[0] if len(unsure) else len(greedy)
                assert answer.token_ids[:sure] == greedy[:sure].tolist()
        # What decode computes token by token is what a prefill of the longer text computes.
        first = answers[0]
        longer = log_softmax(llm.logits(prompts[0] + first.token_ids), axis=-1)[len(prompts[0]) - 1 : -1]
        expected = longer[np.arange(16), first.token_ids]
        decoded = [item.chosen.logprob for item in first.outputs[0].logprobs or []]
        np.testing.assert_allclose(decoded, expected, atol=TOLERANCE, rtol=0)
        assert llm.engine.runner.compilations.count == 0


@pytest.mark.parametrize("mesh, chunk, page", cases(LONG_SPREAD, LONG_GRID))
def test_long_prompt_in_chunks(mesh: str, chunk: int | str, page: int, tmp_path):
    """1,536 tokens: neither the chunk nor the page nor the mesh shows in the answer."""
    folder = oracle_long(tmp_path)
    reference = np.load(folder / "reference.npz")
    size = 1536 if chunk == "whole" else int(chunk)
    with LLM(
        model=str(folder),
        precision="fp32",
        mesh=mesh,
        chunk_size=size,
        page_size=page,
        max_context=2048,
        max_num_seqs=1,
    ) as llm:
        ids, rows = reference["input_ids"].reshape(-1).tolist(), reference["rows"]
        expected = reference["logits"].reshape(len(rows), -1)
        np.testing.assert_allclose(llm.logits(ids, rows=rows), expected, atol=TOLERANCE, rtol=0)
