"""The generated prompts: lengths, places, determinism, and the wording that the bundled model is trained on."""

import dataclasses
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from jaxinfer.engine.anchors import Anchors, boundary_codes
from jaxinfer.evaluation import tasks
from jaxinfer.evaluation.haystack import Haystack, fit, is_held_out, king_james, noise, words
from jaxinfer.evaluation.tasks import TASKS, Settings, make_sample, ordinary_tokens
from jaxinfer.tokenizer import byte_tokenizer
from launch.bundled_model import vocabulary, wordings

BYTES = byte_tokenizer()
SETTINGS = Settings(tokenizer=BYTES, ordinary=ordinary_tokens(BYTES, 512), haystack=king_james())

# Bytes by which a prompt may miss its length: one more word, list item or needle.
SLACK = {"niah_multikey_needles": 90, "niah_multikey_uuid": 130, "cwe": 60}


def sample(name: str, length: int = 5000, depth: float = 0.3, number: int = 0, settings: Settings = SETTINGS):
    return make_sample(name, length, depth if TASKS[name].has_depth else None, number, settings)


@pytest.mark.parametrize("name", TASKS)
def test_lengths_are_met_and_never_exceeded(name: str) -> None:
    for length in (3000, 5000):
        found = sample(name, length)
        total = len(found.ids) + found.answer_tokens
        assert length - SLACK.get(name, 20) <= total <= length
        if found.text is not None:
            assert found.ids == BYTES.encode(found.text)


@pytest.mark.parametrize("name", TASKS)
def test_equal_arguments_give_equal_samples_and_others_do_not(name: str) -> None:
    found = sample(name)
    assert found == sample(name)
    other_seed = Settings(tokenizer=BYTES, ordinary=SETTINGS.ordinary, haystack=king_james(), seed=1)
    assert found.ids != sample(name, settings=other_seed).ids
    assert found.ids != sample(name, number=1).ids


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].kind == "text"])
def test_what_is_asked_for_stands_where_it_should(name: str) -> None:
    for depth in (0.0, 0.4, 1.0):
        found = sample(name, 6000, depth)
        assert found.text is not None
        for part in found.parts:
            places = [place.start() for place in re.finditer(re.escape(str(part.reference)), found.text)]
            assert places
            if part.depth is not None:
                assert abs(places[0] / len(found.text) - part.depth) < 0.15
        assert not any(str(part.reference) in found.text.split("\n")[-1] for part in found.parts)  # the question


@pytest.mark.parametrize("name", ["niah_single", "passkey"])
def test_between_anchors_nothing_but_retrieval_reaches_it(name: str) -> None:
    settings = dataclasses.replace(SETTINGS, between_anchors=True)
    for depth in (0.0, 0.9, 1.0):
        found = sample(name, 20000, depth, settings=settings)
        assert found.text is not None and found == sample(name, 20000, depth, settings=settings)
        assert found.parts[0].depth == depth
        value = str(found.parts[0].reference)
        place = found.text.index(value)  # a byte is a token
        assert 128 < place < 20000 - 2 * 4096 + 1000
        for boundaries in (True, False):
            anchors: list[int] = []
            Anchors(boundary_codes(BYTES, BYTES.vocab_size), 512, boundaries).extend(anchors, found.ids)
            assert not any(place - 40 < anchor < place + len(value) + 10 for anchor in anchors)
            assert any(abs(place - anchor) < 512 for anchor in anchors)
    with pytest.raises(ValueError, match="niah_multiquery: expected a task that hides one thing"):
        sample("niah_multiquery", 20000, settings=settings)


def test_ruler_counts() -> None:
    needles = re.compile(r"One of the special magic numbers for ([\w-]+) is: (\d{7})\.")
    for name, keys, values in (("niah_single", 1, 1), ("niah_multikey", 4, 4), ("niah_multivalue", 1, 4)):
        found = needles.findall(sample(name).text or "")
        assert (len(dict(found)), len(found)) == (keys, values)
    chain = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", sample("vt").text or "")
    assert len(chain) == 5 and all(new[1] == old[0] for old, new in pairwise(chain))
    listed = re.findall(r"\d+\. ([\w-]+)", sample("cwe", 30000).text or "")
    common = Counter(listed).most_common(11)
    assert {word for word, _ in common[:10]} == {str(part.reference) for part in sample("cwe", 30000).parts}
    assert [count for _, count in common] == [30] * 10 + [3]
    coded = Counter(re.findall(r"\b[a-z]{6}\b", (sample("fwe").text or "").split("\n")[1]))
    assert [word for word, _ in coded.most_common(3)] == [part.reference for part in sample("fwe").parts]


def test_the_wording_is_the_one_that_the_bundled_model_is_trained_on() -> None:
    ruler = {wording.fact: wording for wording in wordings.RULER}
    facts = {tasks.NEEDLE.format(kind=kind, key="{key}", value="{value}") for kind in ("number", "word", "uuid")}
    assert set(ruler) == facts
    number = {
        field: getattr(tasks, field).format(kind="number", key="{key}") for field in dir(tasks) if "ONE_" in field
    }
    asked = {(w.question, w.prefix) for w in wordings.RULER}
    assert (number["ONE_QUESTION"], number["ONE_PREFIX"]) in asked
    many = tuple(text.format(kind="number", key="{key}") for text in (tasks.MANY_QUESTION, tasks.MANY_PREFIX))
    assert many in {w.many for w in wordings.RULER} and many in {w.several for w in wordings.RULER}
    passkey = wordings.PASSKEY
    assert (passkey.fact, passkey.question, passkey.prefix) == (
        tasks.PASSKEY_FACT,
        tasks.PASSKEY_QUESTION,
        tasks.PASSKEY_PREFIX,
    )
    assert all(vocabulary._is_held_out(word) == is_held_out(word) for word in words().all[:200])


def test_names_come_from_held_out_words() -> None:
    names = words().names(np.random.default_rng(0), 500)
    assert len(set(names)) == 500
    assert all(is_held_out(part) for name in names for part in name.split("-"))


def test_a_chat_puts_the_question_in_a_turn_and_the_prefix_behind_it() -> None:
    settings = Settings(tokenizer=BYTES, ordinary=SETTINGS.ordinary, haystack=king_james(), chat=True)
    found = sample("passkey", settings=settings)
    assert found.text is not None and found.text.endswith("What is the pass key?<|end|><|assistant|>The pass key is")
    assert 4980 <= len(found.ids) + found.answer_tokens <= 5000


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least .* tokens for this task, got 100"):
        sample("niah_single", 100)
    without = Settings(tokenizer=None, ordinary=np.arange(512), haystack=king_james())
    with pytest.raises(ValueError, match="no tokenizer"):
        sample("niah_single", settings=without)
    assert len(sample("kv", 512, settings=without).ids) == 508
    with pytest.raises(ValueError, match="words in it"):
        Haystack("  ")


def test_a_haystack_begins_anew_after_its_end() -> None:
    hay = Haystack("A b. C d e.\nF g.")
    assert hay.with_sentences(0, 7, [], []) == "A b. C d e.\nF g."
    assert hay.with_sentences(5, 10, [0.0, 0.5, 1.0], ["X.", "Y.", "Z."]) == "X. F g.\nA b. Y. C d e.\nF g.\nA Z."
    assert noise().with_sentences(0, 4, [0.9], ["N."]) == "The grass is green. N."


def test_fit_finds_the_largest_size() -> None:
    for per_unit, budget in ((1, 1000), (7, 1000), (23, 99), (0.4, 5000)):
        calls: list[int] = []
        size = fit(lambda n, calls=calls: calls.append(n) or n, lambda n, p=per_unit: 50 + int(p * n), budget)
        assert 50 + int(per_unit * size) <= budget < 50 + int(per_unit * (size + 1))
        assert len(calls) < 12
