"""From what a model answers to scores."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.engine.request import Request, RequestOutput, SamplingParams, TokenLogprobs
from jaxinfer.evaluation.tasks import Part, Sample
from jaxinfer.llm import LLM


@dataclass(kw_only=True)
class Answer:
    """What came back for a sample."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    rows: list[int] = field(default_factory=list)
    """Positions of the prompt whose logits were asked for, ascending."""
    logits: np.ndarray | None = None
    """Their logits, float32 `[rows, vocab]`."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    seconds: float | None = None
    """From arrival to the first token."""


def ask(
    llm: LLM, samples: Sequence[Sample], *, scored: bool = True, rows: Sequence[Sequence[int]] | None = None
) -> list[Answer]:
    """Answers samples greedily, all of them together in the engine, and then asks for the logits of all.

    `rows` asks for the logits at these positions of each prompt, besides those that its score needs; `scored=False`
    leaves out what only the score of a text's perplexity needs.  Raises RuntimeError if the engine fails on one.
    """
    requests: list[Request] = []
    wanted: list[list[int]] = []
    for i, sample in enumerate(samples):
        needed = {row for part in sample.parts for row in part.rows or ()} | set(rows[i] if rows is not None else ())
        wanted.append(sorted(needed))
        params = SamplingParams(
            temperature=0,
            max_tokens=sample.answer_tokens,
            ignore_eos=sample.text is None,
            prompt_logprobs=0 if scored and not sample.parts else None,
        )
        requests.append(Request(id=f"sample-{i}", prompt_ids=sample.ids, params=params))
    answers = [
        Answer(
            token_ids=list(output.token_ids),
            text=output.text,
            rows=wanted[i],
            prompt_logprobs=output.prompt_logprobs,
            seconds=output.metrics.ttft,
        )
        for i, output in enumerate(_run(llm, requests))
    ]
    with_rows = [i for i, needed in enumerate(wanted) if needed]
    # Behind the answers rather than beside them: a long prompt may fill the cache alone.
    requests = [Request(id=f"rows-{i}", prompt_ids=samples[i].ids, logit_rows=tuple(wanted[i])) for i in with_rows]
    for i, output in zip(with_rows, _run(llm, requests), strict=True):
        answers[i].logits = output.logits
    return answers


def _run(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    outputs = llm.run(requests)
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"the engine failed on {len(output.prompt_token_ids)} tokens: {output.error}")
    return outputs


def score_parts(sample: Sample, answer: Answer) -> list[float]:
    """1 or 0 for each part of a sample; their mean is the sample's score, as RULER's `string_match_all` has it."""
    return [float(_is_right(part, answer)) for part in sample.parts]


def _is_right(part: Part, answer: Answer) -> bool:
    if isinstance(part.reference, str):
        return contains(answer.text, part.reference)
    if part.rows is None:
        return answer.token_ids[: len(part.reference)] == part.reference
    assert answer.logits is not None
    likeliest = answer.logits[np.searchsorted(answer.rows, part.rows)].argmax(axis=-1)
    return likeliest.tolist() == part.reference


def contains(answer: str, reference: str) -> bool:
    """RULER's match: the reference is somewhere in the answer, whatever its case."""
    printable = re.sub(r"[\x00-\x1f]", "\n", answer).strip()
    return reference.lower() in printable.lower()


def bits_per_byte(entries: Sequence[TokenLogprobs | None]) -> float:
    """Cross entropy of a text, in bits for each byte of the tokens that were predicted (all but the first)."""
    scored = [entry.chosen for entry in entries if entry is not None]
    size = sum(len(token.token_bytes) for token in scored)
    return -sum(token.logprob for token in scored) / math.log(2) / size
