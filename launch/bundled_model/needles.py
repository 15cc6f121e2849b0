"""Facts hidden in text and questions about them, in RULER's words (arXiv 2404.06654) and in others.  No jax here."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from launch.bundled_model.tasks import Draft, Sample, haystack, sentence_end
from launch.bundled_model.vocabulary import ASSISTANT, END, USER, Vocabulary
from launch.bundled_model.wordings import (
    ANSWERS,
    ATTRIBUTES,
    BARE_ANSWERS,
    BARE_FACTS,
    BARE_QUESTIONS,
    FACTS,
    FRAMES,
    HELD_OUT,
    HELD_OUT_ATTRIBUTES,
    PASSKEY,
    QUESTIONS,
    RULER,
    WORDINGS,
    Wording,
)

NOISE_SHARE = 0.2
PASSKEY_NOISE_SHARE = 0.6
"""Of the texts: repeated sentences.  RULER's single needle and the passkey task have them."""
SEVERAL = (2, 3, 4, 4, 4)
"""Values of one key, or keys asked for at once; RULER has four."""


class Fact(NamedTuple):
    """What is hidden."""

    statement: str
    value: str


class Question(NamedTuple):
    """What is asked for; the answer lists the values of each group of facts, each in the order in which they stand."""

    groups: list[list[int]]
    """Numbers of facts, by key."""
    text: str
    prefix: str
    """Beginning of the answer, up to the space before the value."""
    frame: tuple[str, str] = ("\n", " ")
    """Before the question, and between question and answer."""


def needles(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """One wording in a sample: RULER's, the passkey's, or one of the others that always ask as they state."""
    draw = rng.random()
    if draw < 0.6:
        wording = RULER[rng.integers(len(RULER))]
    elif draw < 0.8:
        wording = PASSKEY
    else:
        wording = WORDINGS[rng.integers(len(WORDINGS))]
    return _one_wording(rng, tokens, vocabulary, text, wording, True)


def paraphrases(
    rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray, held_out: bool
) -> Sample:
    """Facts about attributes of names, stated and asked for in forms that are drawn independently.

    `held_out`: the wordings that are never trained on; the answer's beginning is then given, also in chats.
    """
    if held_out:
        return _one_wording(rng, tokens, vocabulary, text, HELD_OUT[rng.integers(len(HELD_OUT))], False)
    count = _how_many(rng, tokens)
    hidden = count + int(count * rng.uniform(0, 1))
    bare = rng.random() < 0.35
    forms = (BARE_FACTS, BARE_QUESTIONS, BARE_ANSWERS) if bare else (FACTS, QUESTIONS, ANSWERS)
    # Half of the samples keep to one form, so that wordings can be told apart by what they say alone.
    chosen = [[form[rng.integers(len(form))]] if rng.random() < 0.5 else list(form) for form in forms]
    frame = FRAMES[rng.integers(len(FRAMES))] if rng.random() < 0.6 else FRAMES[0]
    chat = rng.random() < 0.4
    kind = int(rng.choice(3, p=(0.8, 0.12, 0.08)))
    subjects = _subjects(rng, hidden, vocabulary, bare)
    facts, questions = [], []
    for number, (key, attribute) in enumerate(subjects):
        words = {"key": key, "attribute": attribute}
        value = _value(rng, kind, vocabulary, 3, 10)
        facts.append(Fact(_pick(rng, chosen[0]).format(value=value, **words), value))
        if number < count:
            # In a chat the beginning of the answer is scored, so there is only one.
            answer = forms[2][0] if chat else _pick(rng, chosen[2])
            asked = _pick(rng, chosen[1]).format(**words)
            questions.append(Question([[number]], asked, answer.format(**words), frame))
    noise = PASSKEY_NOISE_SHARE if bare else NOISE_SHARE
    made = _hide(rng, tokens, vocabulary, text, facts, questions, "", chat, True, noise)
    return made if made is not None else paraphrases(rng, tokens, vocabulary, text, held_out)


def _pick(rng: np.random.Generator, forms: Sequence[str]) -> str:
    return forms[rng.integers(len(forms))]


def _how_many(rng: np.random.Generator, tokens: int) -> int:
    return int(min(max(tokens // 96, 8), 160) * rng.uniform(0.3, 1))


def _subjects(rng: np.random.Generator, count: int, vocabulary: Vocabulary, bare: bool) -> list[tuple[str, str]]:
    """Different pairs of name and attribute; with `bare`, things without an owner ("secret code"), and no attribute."""
    nouns = [noun for noun in vocabulary.nouns if noun not in HELD_OUT_ATTRIBUTES]
    if bare:
        found: dict[str, None] = {}
        while len(found) < count:
            noun = _pick(rng, ATTRIBUTES) if rng.random() < 0.5 else _pick(rng, nouns)
            found[f"{_pick(rng, vocabulary.adjectives)} {noun}" if rng.random() < 0.9 else noun] = None
        return [(thing, "") for thing in found]
    attributes = [_pick(rng, ATTRIBUTES)]
    if rng.random() < 0.5:
        # Several of one name, so that the question's attribute decides.
        more = [_pick(rng, nouns) for _ in range(3)] + [_pick(rng, ATTRIBUTES) for _ in range(3)]
        attributes = list(dict.fromkeys(attributes + more))
    elif rng.random() < 0.4:
        attributes = [_pick(rng, nouns)]
    names = _names(rng, -(-count // len(attributes)) + 1, vocabulary)
    pairs = [(name, attribute) for name in names for attribute in attributes]
    return [pairs[i] for i in rng.permutation(len(pairs))[:count]]


def _one_wording(
    rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray, wording: Wording, trained: bool
) -> Sample:
    chat = rng.random() < 0.3
    one = "{key}" not in wording.fact
    queries = 1 if one else _how_many(rng, tokens)
    draw = rng.random()
    several = int(rng.choice(SEVERAL))
    per_key = several if wording.many_fact and draw < 0.35 else 1
    at_once = several if wording.several[0] and draw > 0.65 else 1
    extra = 0 if one else int(queries * rng.uniform(0, 1))
    keys = _names(rng, queries * at_once + extra, vocabulary)
    kind = int(rng.choice(3, p=(0.8, 0.1, 0.1))) if wording.any_value else 0
    facts, of = [], []
    for key in keys:
        of.append(list(range(len(facts), len(facts) + per_key)))
        for _ in range(per_key):
            value = _value(rng, kind, vocabulary, 5, 8)
            facts.append(Fact(wording.state(key, value), value))
    questions = []
    for i in range(0, queries * at_once, at_once):
        asked = keys[i : i + at_once]
        form = wording.several if at_once > 1 else wording.many if per_key > 1 else (wording.question, wording.prefix)
        name = asked[0] if at_once == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        questions.append(Question(of[i : i + at_once], form[0].format(key=name), form[1].format(key=name)))
    intro = wording.intro if rng.random() < 0.7 else ""
    noise = PASSKEY_NOISE_SHARE if wording is PASSKEY else NOISE_SHARE
    made = _hide(rng, tokens, vocabulary, text, facts, questions, intro, chat, trained, noise)
    return made if made is not None else _one_wording(rng, tokens, vocabulary, text, wording, trained)


def _hide(
    rng: np.random.Generator,
    tokens: int,
    vocabulary: Vocabulary,
    text: np.ndarray,
    facts: list[Fact],
    questions: list[Question],
    intro: str,
    chat: bool,
    score_prefix: bool,
    noise_share: float,
) -> Sample | None:
    """The sample; None if the facts and questions leave less than an eighth of it to the text around them.

    Questions stand behind their facts, half of them soon, the others at the end; those of a chat all at the end.
    `score_prefix`: whether an answer in a chat is scored from its beginning on; elsewhere it never is.
    """
    encoded = [vocabulary.ids(" " + fact.statement) for fact in facts]
    answers = [_listed([facts[i].value for group in question.groups for i in group]) for question in questions]
    overhead = sum(map(len, encoded)) + sum(
        len(vocabulary.ids(question.frame[0] + question.text))
        + len(vocabulary.ids(question.frame[1] + question.prefix))
        + sum(len(vocabulary.ids(piece)) for piece in pieces)
        + 4
        for question, pieces in zip(questions, answers, strict=True)
    )
    head = vocabulary.ids(intro + "\n") if intro else ()
    room = tokens - overhead - len(head) - 8
    if room < tokens // 8:
        return None
    hay = haystack(rng, room, vocabulary, text, noise_share)
    ends = np.flatnonzero(vocabulary.ends_sentence[hay]) + 1
    ends = ends if len(ends) else np.array([len(hay)])

    places = rng.uniform(0, len(hay), len(facts))
    events = [(place, 0, i) for i, place in enumerate(places.tolist())]
    for number, question in enumerate(questions):
        after = max(places[i] for group in question.groups for i in group)
        time = float(len(hay))
        if not chat and len(questions) > 1 and rng.random() < 0.5:
            # Some way behind the fact, log-uniform.
            time = after + np.exp(rng.uniform(np.log(8), np.log(len(hay))))
        events.append((min(time, float(len(hay))), 1, number))
    order = rng.permutation(len(events))
    snapped = [(sentence_end(place, ends, len(hay)), what, i) for place, what, i in events]
    stream = sorted((snapped[i] for i in order), key=lambda event: event[:2])

    stand = {i: rank for rank, (_, what, i) in enumerate(stream) if what == 0}
    draft = Draft(tokens)
    draft.add((USER,) if chat else ())
    draft.add(head)
    at, open_turn = 0, chat
    for place, what, i in stream:
        if place > at:
            draft.cut()
            draft.add(hay[at:place].tolist())
            draft.cut()
            at = place
        if what == 0:
            draft.add(encoded[i])
            continue
        question = questions[i]
        found = [facts[f].value for group in question.groups for f in sorted(group, key=stand.__getitem__)]
        pieces = [token for piece in _listed(found) for token in vocabulary.ids(piece)]
        if chat:
            draft.add(vocabulary.ids("\n") if open_turn else (USER,))
            draft.add((*vocabulary.ids(question.text), END, ASSISTANT))
            begin = list(vocabulary.ids(question.prefix))
            if score_prefix:
                draft.add_answer([*begin, *pieces, END])
            else:
                draft.add(begin)
                draft.add_answer([*pieces, END])
            open_turn = False
        else:
            before, between = question.frame
            draft.add(vocabulary.ids(before + question.text))
            draft.add(
                vocabulary.ids(between + question.prefix) if question.prefix else vocabulary.ids(between.rstrip(" "))
            )
            draft.add_answer(pieces)
            draft.add(vocabulary.ids("\n"))
    if at < len(hay):
        draft.add(hay[at:].tolist())
    return draft.finish(text)


def _listed(values: list[str]) -> list[str]:
    """The values as an answer, in pieces that begin with a space or are punctuation."""
    if len(values) == 1:
        return [" " + values[0], "."]
    pieces = [" " + values[0]]
    for value in values[1:-1]:
        pieces += [",", " " + value]
    return [*pieces, ",", " and", " " + values[-1], "."]


def _names(rng: np.random.Generator, count: int, vocabulary: Vocabulary) -> list[str]:
    """Different names "adjective-noun"; in a third of the samples many share the adjective or the noun."""
    pool_a = list(rng.choice(vocabulary.adjectives, 400))
    pool_n = list(rng.choice(vocabulary.nouns, 400))
    draw = rng.random()
    if draw < 0.17:
        pool_a = pool_a[: max(2, count // 8)]
    elif draw < 0.33:
        pool_n = pool_n[: max(2, count // 8)]
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{pool_a[rng.integers(len(pool_a))]}-{pool_n[rng.integers(len(pool_n))]}"] = None
    return list(found)


def _value(rng: np.random.Generator, kind: int, vocabulary: Vocabulary, fewest: int, below: int) -> str:
    """A number (kind 0) of `fewest` to `below - 1` digits, a name of two words (1) or a UUID (2)."""
    if kind == 0:
        digits = int(rng.integers(fewest, below))
        return str(rng.integers(10 ** (digits - 1), 10**digits))
    if kind == 1:
        return f"{rng.choice(vocabulary.adjectives)}-{rng.choice(vocabulary.nouns)}"
    number = rng.bytes(16).hex()
    return "-".join((number[:8], number[8:12], number[12:16], number[16:20], number[20:]))
