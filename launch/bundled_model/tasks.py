"""Generated retrieval tasks as token sequences with a mask on the answers.  No jax here: worker processes run it.

Every function takes a random generator, the number of tokens wanted and the vocabulary, and returns a `Sample` of
exactly that many tokens, which begins with bos.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from launch.bundled_model.vocabulary import ASSISTANT, BOS, END, USER, Ids, Vocabulary
from launch.bundled_model.wordings import HELD_OUT, LISTS, NOISE, PASSKEY, RULER, WORDINGS, Wording

ABSENT_SHARE = 0.05
"""Of the questions about a list: those about a key that is not in it; the answer is "none"."""


class Sample(NamedTuple):
    """One sequence."""

    tokens: np.ndarray
    """uint16 `[n]`."""
    answer: np.ndarray
    """uint16 `[n]`: 0 where a token is not scored, else the number (from 1) of the answer it belongs to."""
    cuts: np.ndarray
    """int `[m]`: places where positions may skip without going through anything that has to be found."""


class Draft:
    """A sample being written."""

    def __init__(self, tokens: int):
        self.wanted = tokens
        self.tokens: list[int] = [BOS]
        self.answer: list[int] = [0]
        self.cuts: list[int] = []
        self.answers = 0

    @property
    def room(self) -> int:
        return self.wanted - len(self.tokens)

    def add(self, ids: Ids | list[int]):
        """Tokens that are not scored."""
        self.tokens.extend(ids)
        self.answer.extend([0] * len(ids))

    def add_answer(self, ids: Ids | list[int]):
        """Tokens that are scored, as one answer."""
        self.answers += 1
        self.tokens.extend(ids)
        self.answer.extend([self.answers] * len(ids))

    def cut(self):
        self.cuts.append(len(self.tokens))

    def finish(self, filler: np.ndarray | None = None) -> Sample:
        """The sample; missing tokens are taken from `filler`, and an answer that was cut off is not scored."""
        if self.room > 0:
            if filler is None or len(filler) < self.room:
                raise ValueError(f"expected {self.room} more tokens to fill the sample")
            self.cut()
            # A place that depends on the sample, so that not all end with the same text.
            start = sum(self.tokens) % (len(filler) - self.room + 1)
            self.add(filler[start : start + self.room].tolist())
        answer = np.array(self.answer, np.uint16)
        if len(answer) > self.wanted and answer[self.wanted] == answer[self.wanted - 1]:
            answer[answer == answer[self.wanted - 1]] = 0
        cuts = np.array([cut for cut in self.cuts if 0 < cut < self.wanted], np.int64)
        return Sample(np.array(self.tokens[: self.wanted], np.uint16), answer[: self.wanted], cuts)


def repeat_copy(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Spans of 32 to 512 tokens, random or natural, then the same spans again in another order.

    The first two tokens of a repeated span cannot be known and are not scored.
    """
    draft = Draft(tokens)
    separator = vocabulary.ids("\n")
    while draft.room > 200:
        longest = min(512, draft.room // 3)
        budget = int(np.exp(rng.uniform(np.log(longest), np.log(max(draft.room // 2, longest + 1)))))
        spans: list[list[int]] = []
        while budget > 0:
            size = min(int(np.exp(rng.uniform(np.log(32), np.log(longest)))), max(budget, 32))
            if rng.random() < 0.7:
                spans.append(rng.choice(vocabulary.ordinary, size).tolist())
            else:
                start = rng.integers(len(text) - size)
                spans.append(text[start : start + size].tolist())
            budget -= size + 1
        for span in spans:
            draft.cut()
            draft.add(separator)
            draft.add(span)
        for i in rng.permutation(len(spans)):
            draft.cut()
            draft.add(separator)
            draft.add(spans[i][:2])
            draft.add_answer(spans[i][2:])
    return draft.finish(text)


def key_values(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Lists of keys and values, and keys again whose values are asked for, between the pairs and after them."""
    draft = Draft(tokens)
    while draft.room > 300:
        before, between, after = (vocabulary.ids(part) for part in LISTS[rng.integers(len(LISTS))])
        key_tokens = int(rng.integers(1, 4))
        digits = int(rng.integers(5, 8))
        per_pair = len(before) + len(between) + len(after) + key_tokens + digits + 1
        room = draft.room // per_pair
        pairs = int(np.exp(rng.uniform(np.log(8), np.log(max(room * 0.8, 9)))))
        queries = int(min(room - pairs, max(16, min(128, pairs))))
        keys = _keys(rng, pairs + 1, key_tokens, vocabulary)
        values = _values(rng, pairs, digits, vocabulary)
        pairs = min(pairs, len(keys) - 1)
        absent = keys[pairs]
        question = rng.random() < 0.5
        # When each query comes: half of them some pairs after theirs (log-uniform), the others behind the list.
        targets = rng.permutation(pairs)[:queries] if queries <= pairs else rng.integers(0, pairs, queries)
        distance = np.exp(rng.uniform(0, np.log(pairs + 1), len(targets))).astype(int)
        times = np.where(rng.random(len(targets)) < 0.5, targets + distance, pairs)
        by_time: dict[int, list[int]] = {}
        for target, time in zip(targets.tolist(), np.minimum(times, pairs).tolist(), strict=True):
            by_time.setdefault(time, []).append(target)
        draft.cut()
        draft.add(vocabulary.ids("\n\n"))
        for pair in range(pairs):
            for target in by_time.get(pair, ()):
                _ask_value(draft, vocabulary, before, between, after, keys[target], values[target], question)
            draft.cut()
            draft.add([*before, *keys[pair], *between, *values[pair], *after])
        last = by_time.get(pairs, [])
        for i in rng.permutation(len(last)):
            target = last[i]
            draft.cut()
            if question and rng.random() < ABSENT_SHARE:
                _ask_value(draft, vocabulary, before, between, after, absent, vocabulary.ids(" none"), question)
            _ask_value(draft, vocabulary, before, between, after, keys[target], values[target], question)
    return draft.finish(text)


def _ask_value(draft, vocabulary, before, between, after, key, value, question: bool):
    if question:
        draft.add([*vocabulary.ids("What is the value of"), *vocabulary.ids(' "'), *key, *vocabulary.ids('"?')])
        draft.add_answer([*value, *vocabulary.ids("\n")])
    else:
        draft.add([*before, *key, *between])
        draft.add_answer([*value, after[0]])
        draft.add(after[1:])


def _keys(rng: np.random.Generator, count: int, size: int, vocabulary: Vocabulary) -> list[list[int]]:
    """Different keys of `size` tokens; half of the lists share few beginnings, so that one token does not decide."""
    first = rng.choice(vocabulary.starts, (2 * count, 1))
    rest = rng.choice(vocabulary.spaced, (2 * count, size - 1))
    if size > 1 and rng.random() < 0.5:
        shared = int(rng.integers(1, max(count // 8, 2)))
        group = rng.integers(0, shared, 2 * count)
        first = first[:shared][group]
        rest[:, : size - 2] = rest[:shared, : size - 2][group]
    found = dict.fromkeys(map(tuple, np.concatenate((first, rest), axis=1).tolist()))
    return [list(key) for key in list(found)[:count]]


def _values(rng: np.random.Generator, count: int, digits: int, vocabulary: Vocabulary) -> list[list[int]]:
    space = vocabulary.ids(" ")[0]
    numbers = np.array([vocabulary.ids(str(digit))[0] for digit in range(10)])
    if rng.random() < 0.2:
        return rng.choice(vocabulary.spaced, (count, 2)).tolist()
    drawn = numbers[rng.integers(0, 10, (count, digits))]
    drawn[:, 0] = numbers[rng.integers(1, 10, count)]
    return np.concatenate((np.full((count, 1), space), drawn), axis=1).tolist()


def needles(
    rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray, held_out: bool = False
) -> Sample:
    """Facts hidden in text, and questions about them (RULER, arXiv 2404.06654, and other wordings)."""
    chat = rng.random() < 0.3
    draw = rng.random()
    if held_out:
        wording = HELD_OUT[rng.integers(len(HELD_OUT))]
    elif draw < 0.5:
        wording = RULER[rng.integers(len(RULER))]
    elif draw < 0.65:
        wording = PASSKEY
    else:
        wording = WORDINGS[rng.integers(len(WORDINGS))]
    if "{key}" not in wording.fact:
        queries, per_key, at_once = 1, 1, 1
    else:
        queries = int(min(max(tokens // 96, 8), 160) * rng.uniform(0.3, 1))
        per_key = int(rng.integers(2, 5)) if wording.many_fact and rng.random() < 0.25 else 1
        at_once = int(rng.integers(2, 5)) if wording.several and per_key == 1 and rng.random() < 0.25 else 1
    extra = 0 if "{key}" not in wording.fact else int(queries * rng.uniform(0, 1))
    keys = _names(rng, queries * at_once + extra, vocabulary)
    kind = rng.choice(3, p=(0.8, 0.1, 0.1)) if wording.any_value else 0
    values = [[_value(rng, int(kind), vocabulary) for _ in range(per_key)] for _ in keys]
    questions = [list(range(i * at_once, (i + 1) * at_once)) for i in range(queries)]

    facts = [(key, value) for key in range(len(keys)) for value in values[key]]
    encoded = {i: vocabulary.ids(" " + wording.state(keys[key], value)) for i, (key, value) in enumerate(facts)}
    asked = [_question(wording, [keys[k] for k in group], [values[k] for k in group], chat) for group in questions]
    overhead = sum(map(len, encoded.values())) + sum(
        len(vocabulary.ids(q)) + len(vocabulary.ids(p)) + sum(len(vocabulary.ids(v)) for v in a) + 6
        for q, p, a in asked
    )
    intro = vocabulary.ids(wording.intro + "\n") if wording.intro and rng.random() < 0.7 else ()
    room = tokens - overhead - len(intro) - 8
    if room < tokens // 8:
        return needles(rng, tokens, vocabulary, text, held_out)
    hay = _haystack(rng, room, vocabulary, text)
    ends = np.flatnonzero(vocabulary.ends_sentence[hay]) + 1
    ends = ends if len(ends) else np.array([len(hay)])

    places = rng.uniform(0, len(hay), len(facts))
    events = [(place, 0, i) for i, place in enumerate(places.tolist())]
    first_fact = {key: [i for i, (owner, _) in enumerate(facts) if owner == key] for key in range(len(keys))}
    for number, group in enumerate(questions):
        after = max(places[i] for key in group for i in first_fact[key])
        time = float(len(hay))
        if not chat and len(questions) > 1 and rng.random() < 0.5:
            # Some way behind the fact, log-uniform.
            time = after + np.exp(rng.uniform(np.log(8), np.log(len(hay))))
        events.append((min(time, float(len(hay))), 1, number))
    order = rng.permutation(len(events))
    events = sorted((events[i] for i in order), key=lambda event: (_snap(event[0], ends, len(hay)), event[1]))

    # Facts of one key are asked for in the order in which they stand.
    stand = {i: rank for rank, (_, what, i) in enumerate(events) if what == 0}
    draft = Draft(tokens)
    draft.add((USER,) if chat else ())
    draft.add(intro)
    at, open_turn = 0, chat
    for place, what, i in events:
        place = _snap(place, ends, len(hay))
        if place > at:
            draft.cut()
            draft.add(hay[at:place].tolist())
            draft.cut()
            at = place
        if what == 0:
            draft.add(encoded[i])
            continue
        group = questions[i]
        ordered = [[facts[f][1] for f in sorted(first_fact[key], key=stand.__getitem__)] for key in group]
        question, prefix, answers = _question(wording, [keys[key] for key in group], ordered, chat)
        if chat:
            draft.add(vocabulary.ids("\n") if open_turn else (USER,))
            draft.add((*vocabulary.ids(question), END, ASSISTANT))
            draft.add_answer((*vocabulary.ids(prefix), *(t for a in answers for t in vocabulary.ids(a)), END))
            open_turn = False
        else:
            draft.add((*vocabulary.ids("\n" + question), *vocabulary.ids(" " + prefix)))
            draft.add_answer([t for answer in answers for t in vocabulary.ids(answer)])
            draft.add(vocabulary.ids("\n"))
    if at < len(hay):
        draft.add(hay[at:].tolist())
    return draft.finish(text)


def _snap(place: float, ends: np.ndarray, size: int) -> int:
    """The next end of a sentence."""
    if place >= size:
        return size
    at = int(np.searchsorted(ends, place))
    return int(ends[at]) if at < len(ends) else size


def _question(wording: Wording, keys: list[str], values: list[list[str]], chat: bool) -> tuple[str, str, list[str]]:
    """The question, the beginning of the answer, and the pieces of the rest."""
    del chat
    if len(keys) > 1:
        names = ", ".join(keys[:-1]) + ", and " + keys[-1]
        flat = [value for group in values for value in group]
        return wording.several[0].format(key=names), wording.several[1].format(key=names), _listed(flat)
    if len(values[0]) > 1:
        question, prefix = wording.many
        return question.format(key=keys[0]), prefix.format(key=keys[0]), _listed(values[0])
    return wording.question.format(key=keys[0]), wording.prefix.format(key=keys[0]), [" " + values[0][0], "."]


def _listed(values: list[str]) -> list[str]:
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


def _value(rng: np.random.Generator, kind: int, vocabulary: Vocabulary) -> str:
    if kind == 0:
        digits = int(rng.integers(5, 8))
        return str(rng.integers(10 ** (digits - 1), 10**digits))
    if kind == 1:
        return f"{rng.choice(vocabulary.adjectives)}-{rng.choice(vocabulary.nouns)}"
    number = rng.bytes(16).hex()
    return "-".join((number[:8], number[8:12], number[12:16], number[16:20], number[20:]))


def _haystack(rng: np.random.Generator, size: int, vocabulary: Vocabulary, text: np.ndarray) -> np.ndarray:
    if rng.random() < 0.2:
        noise = np.array(vocabulary.ids(NOISE), np.uint16)
        return np.tile(noise, -(-size // len(noise)))[:size]
    start = rng.integers(len(text) - size)
    hay = text[start : start + size].copy()
    hay[hay < 7] = vocabulary.ids("\n")[0]  # borders of documents
    return hay


def variable_tracking(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """RULER's chains of assignments, several in a sequence: "VAR X = 12345", "VAR Y = VAR X"; who holds 12345?"""
    count = int(min(max(tokens // 256, 2), 48) * rng.uniform(0.5, 1))
    names = _letters(rng, count * 5)
    chains = [names[5 * i : 5 * i + int(rng.integers(2, 6))] for i in range(count)]
    values = [str(rng.integers(10000, 100000)) for _ in chains]
    statements, questions = [], []
    for chain, value in zip(chains, values, strict=True):
        texts = [f" VAR {chain[0]} = {value}"]
        texts += [f" VAR {new} = VAR {old}" for old, new in pairwise(chain)]
        statements.append([vocabulary.ids(text) + vocabulary.ids(" .\n") for text in texts])
        ask = f"Question: Find all variables that are assigned the value {value} in the text above."
        begin = "Answer: According to the chain(s) of variable assignment in the text above, "
        begin += f"{len(chain)} variables are assigned the value {value}, they are:"
        answer = [token for name in chain for token in vocabulary.ids(" " + name)] + list(vocabulary.ids("\n"))
        questions.append((vocabulary.ids("\n" + ask + "\n" + begin), answer))
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text."
    overhead = sum(len(s) for chain in statements for s in chain) + sum(len(q) + len(a) for q, a in questions)
    head = vocabulary.ids(intro + "\n\n")
    hay = _haystack(rng, max(tokens - overhead - len(head) - 4, 16), vocabulary, text)
    ends = np.append(np.flatnonzero(vocabulary.ends_sentence[hay]) + 1, len(hay))
    events = []
    for chain in statements:
        places = np.sort(rng.uniform(0, len(hay), len(chain)))
        events += [
            (_snap(p, ends, len(hay)), i, s) for i, (p, s) in enumerate(zip(places.tolist(), chain, strict=True))
        ]
    draft = Draft(tokens)
    draft.add(head)
    at = 0
    for place, _, statement in sorted(events, key=lambda event: event[:2]):
        if place > at:
            draft.cut()
            draft.add(hay[at:place].tolist())
            draft.cut()
            at = place
        draft.add(statement)
    draft.add(hay[at:].tolist())
    for i in rng.permutation(len(questions)):
        draft.add(questions[i][0])
        draft.add_answer(questions[i][1])
    return draft.finish(text)


def _letters(rng: np.random.Generator, count: int) -> list[str]:
    """Different names of five capital letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chr(65 + i) for i in rng.integers(0, 26, 5))] = None
    return list(found)
