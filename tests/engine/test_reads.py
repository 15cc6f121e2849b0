"""What hybrid attention says it read, against what the policy says, position by position."""

import numpy as np
import pytest

from jaxinfer.configs.attention import Hybrid, parse_policy
from jaxinfer.engine.reads import ReadCounter
from jaxinfer.engine.request import Request, SamplingParams, Sequence
from jaxinfer.engine.step import PrefillSegment, Step
from jaxinfer.llm import LLM
from jaxinfer.model.policies import Policies

PROMPT, DECODED = 600, 3
ATTENTION = (
    "hybrid:window=64,anchor_gap=64,sinks=32,block=32,hot_epoch=64,dense_below=128,head_groups=2,voters=4,candidates=8,"
    "retrieve_blocks=2,hot_blocks=0,1=dense"
)
POLICY = parse_policy(ATTENTION)
ANCHORS = list(range(31, PROMPT, 32))


def expected(positions: range, anchors: list[int]) -> dict[str, int]:
    """By the definition, for two layers of which the second is dense."""
    assert isinstance(POLICY, Hybrid)
    found: dict[str, int] = dict.fromkeys(("queries", "all", "window", "shared"), 0)
    for position in positions:
        found["queries"] += 2
        found["all"] += position + 1
        begin = position // 32 * 32
        if begin < POLICY.dense_below:
            found["all"] += position + 1
            continue
        first = max(0, begin - POLICY.window) // 32 * 32
        found["window"] += sum(first <= key <= position for key in range(PROMPT + DECODED))
        found["shared"] += sum(key < 32 or key in anchors for key in range(first))
    return found


def test_counts_follow_from_positions_and_the_device():
    counter = ReadCounter(Policies.of(POLICY, 2))
    ids = [1] * (PROMPT + 1)
    sequence = Sequence(
        request=Request(id="a", prompt_ids=ids[:-1]),
        index=0,
        token_ids=ids,
        num_prompt=PROMPT,
        max_new_tokens=5,
        seed=0,
        anchors=ANCHORS,
    )
    # Those of the dense layer mean nothing.
    reads = np.array([[[[1.5, 6.0, 0.75, 1], [4.0, 2.0, 9, 9]]], [[[9] * 4] * 2]], np.float32)
    prefill = Step(prefill=[[PrefillSegment(sequence=sequence, start=64, count=448)]], decode=[[]])
    found = counter.of_step(prefill, reads)
    sampled = {"captured": 0.75, "sampled": 1}
    assert found == expected(range(64, 512), ANCHORS) | {"hot": 48, "retrieved": 192} | sampled
    found = counter.of_step(Step(prefill=[[]], decode=[[sequence]]), reads)
    assert found == expected(range(PROMPT, PROMPT + 1), ANCHORS) | {"hot": 128, "retrieved": 64}


@pytest.mark.slow
def test_counts_of_a_model():
    ids = np.random.default_rng(0).integers(0, 256, PROMPT).tolist()
    with LLM(model="tiny-random", attention=ATTENTION, max_context=1024, chunk_size=256, max_num_seqs=1) as llm:
        llm.generate([ids], SamplingParams(temperature=0, max_tokens=1))
        prompt = llm.engine.stats().reads
        llm.generate([ids], SamplingParams(temperature=0, max_tokens=DECODED + 1, ignore_eos=True))
        both = llm.engine.stats().reads
    # Every query block retrieves two of the whole blocks between the sinks and its window.
    eligible = [max(0, (begin - 64) // 32 - 1) for begin in range(128, PROMPT, 32) for _ in range(begin, begin + 32)]
    assert prompt["retrieved"] == 32 * sum(min(2, count) for count in eligible[: PROMPT - 128])
    assert prompt["hot"] == 0 and prompt["queries"] == 2 * PROMPT
    # A token reads its candidates, and as many hot blocks as a prompt retrieves, which may be among them.
    assert both["queries"] == 2 * (2 * PROMPT + DECODED)
    decoded = both["hot"] + both["retrieved"] - 2 * prompt["retrieved"]
    assert 32 * 8 * DECODED <= decoded <= 32 * 10 * DECODED and both["hot"] <= 32 * 2 * DECODED
