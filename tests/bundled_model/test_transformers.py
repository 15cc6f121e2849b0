"""The bundled model against transformers (float32, CPU): `launch/bundled_model/make_reference.py`."""

import numpy as np
import pytest

from jaxinfer.engine.request import SamplingParams
from jaxinfer.llm import LLM
from tests.oracles import FIXTURES

BOUND = {"atol": 5e-5, "rtol": 0}


@pytest.fixture(scope="module")
def llm():
    with LLM(precision="fp32", max_context=512, chunk_size=256, max_num_seqs=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "jaxinfer_12m" / "reference.npz") as file:
        return dict(file)


def test_logits_as_a_whole(llm: LLM, reference: dict[str, np.ndarray]):
    """A millionth of the norm: a few units in the last place of float32.

    Single logits of up to 47 are as far as 6.1e-5 apart; transformers' own float32 is 5.1e-5 from its float64.
    """
    logits = llm.logits(reference["input_ids"], rows=reference["rows"])
    assert np.linalg.norm(logits - reference["logits"]) <= 1e-6 * np.linalg.norm(reference["logits"])


def test_every_row(llm: LLM, reference: dict[str, np.ndarray]):
    """By numbers that depend on all of a row's logits."""
    ids = reference["input_ids"]
    logits = llm.logits(ids)
    top = logits.max(axis=-1)
    logsumexp = top + np.log(np.exp((logits - top[:, None]).astype(np.float64)).sum(axis=-1))
    np.testing.assert_allclose(logsumexp, reference["logsumexp"], **BOUND)
    following = logits[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(following, reference["next_logit"], **BOUND)
    ours = np.take_along_axis(logits, reference["argmax"][:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(ours, top, **BOUND)


def test_greedy_continuation(llm: LLM, reference: dict[str, np.ndarray]):
    greedy = reference["greedy"].tolist()
    params = SamplingParams(temperature=0, max_tokens=len(greedy))
    (out,) = llm.generate([reference["input_ids"].tolist()], params)
    assert out.token_ids == greedy
    assert " 70815" in out.text


def test_tokenizer(llm: LLM, reference: dict[str, np.ndarray]):
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    ids = reference["input_ids"].tolist()
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    chat = tokenizer.encode(
        tokenizer.apply_chat_template([{"role": "user", "content": "What is the pass key?"}]), add_special_tokens=False
    )
    assert chat == reference["chat_ids"].tolist()
