"""Which heads look for what is asked for: the share of their softmax on a needle while the answer is written."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.configs.attention import Hybrid
from jaxinfer.evaluation.attention_rows import AtLayer, by_layer
from jaxinfer.evaluation.tasks import Sample
from jaxinfer.llm import LLM

_ROWS = 32
"""Queries that are looked at: the last of the prompt, and those of the answer but its last token."""


def head_scores(
    llm: LLM, samples: Iterable[Sample], progress: Callable[[], Any] = lambda: None
) -> tuple[tuple[float, ...], ...]:
    """The mean over the samples of each head's largest share on what the answer repeats, `[layers][heads]`.

    Dense attention; the right answer follows the prompt, so that the heads that copy it show.  A sample is a text with
    one part, which stands in it once or in neighbouring places.  `progress` is called after each.  Raises ValueError
    for a model without a tokenizer, for samples that are something else, and if there are none.
    """
    if llm.tokenizer is None:
        raise ValueError("expected a model with a tokenizer")
    found = []
    for sample in samples:
        ids, answer, first, last = _needle(llm, sample)
        rows = [len(ids) - answer - 1 + i for i in range(min(answer, _ROWS))]
        rows += [rows[-1]] * (_ROWS - len(rows))  # as many for every sample
        span = jnp.int32(first), jnp.int32(last)
        everything = Hybrid(window=-(-len(ids) // 128) * 128, dense_below=0)
        found.append(np.stack(by_layer(llm, ids, rows, everything, _share, *span)))
        progress()
    if not found:
        raise ValueError("expected samples, got none")
    mean = np.clip(np.mean(found, axis=0), 0, 1)
    return tuple(tuple(round(float(score), 4) for score in row) for row in mean)


def _share(at: AtLayer, first: jax.Array, last: jax.Array) -> jax.Array:
    """The largest share `[H]` that a query spends on the positions `first .. last - 1`."""
    places = jnp.arange(at.mass.shape[2])
    return jnp.max(jnp.sum(jnp.where((places >= first) & (places < last), at.mass, 0), axis=2), axis=0)


def _needle(llm: LLM, sample: Sample) -> tuple[list[int], int, int, int]:
    """Tokens of prompt and answer, how many the answer has, and the tokens that it repeats: from, up to."""
    tokenizer, text = llm.tokenizer, sample.text
    assert tokenizer is not None
    if text is None or len(sample.parts) != 1 or not isinstance(sample.parts[0].reference, str):
        raise ValueError("expected samples of text that ask for one thing")
    value = sample.parts[0].reference
    first = len(tokenizer.encode(text[: text.index(value)])) - 1
    last = len(tokenizer.encode(text[: text.rindex(value) + len(value)]))
    answer = tokenizer.encode(" " + value, add_special_tokens=False)
    return [*sample.ids, *answer], len(answer), first, last
