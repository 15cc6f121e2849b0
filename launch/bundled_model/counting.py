"""RULER's tasks beyond look-ups: chains of variables, most common and most frequent words.  No jax here."""

from collections import Counter
from itertools import pairwise

import numpy as np

from launch.bundled_model.tasks import Draft, Sample, haystack, sentence_end
from launch.bundled_model.vocabulary import Ids, Vocabulary

NOISE_SHARE = 0.5
VARIABLE_FRAMES = (("\n", "\n"), ("\n", "\n"), (" ", "."), (" ", " .\n"))
"""Around an assignment."""


def variable_tracking(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Chains of assignments, several in a sequence: "VAR X = 12345", "VAR Y = VAR X"; who holds 12345?"""
    most = min(max(tokens // 256, 2), 48)
    count = int(np.exp(rng.uniform(0, np.log(most + 1))))
    names = _invented(rng, count * 5, 5, "A")
    full = rng.random() < 0.5
    chains = [names[5 * i : 5 * i + (5 if full else int(rng.integers(2, 6)))] for i in range(count)]
    values = [str(rng.integers(10000, 100000)) for _ in chains]
    before, after = VARIABLE_FRAMES[rng.integers(len(VARIABLE_FRAMES))]
    statements, questions = [], []
    for chain, value in zip(chains, values, strict=True):
        texts = [f"VAR {chain[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in pairwise(chain))]
        statements.append([vocabulary.ids(before + text) + vocabulary.ids(after) for text in texts])
        ask = f"Question: Find all variables that are assigned the value {value} in the text above."
        begin = "Answer: According to the chain(s) of variable assignment in the text above, "
        begin += f"{len(chain)} variables are assigned the value {value}, they are:"
        answer = [token for name in chain for token in vocabulary.ids(" " + name)] + list(vocabulary.ids("\n"))
        between = " " if rng.random() < 0.5 else "\n"
        questions.append((vocabulary.ids("\n" + ask + between + begin), answer))
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text."
    overhead = sum(len(s) for chain in statements for s in chain) + sum(len(q) + len(a) for q, a in questions)
    head = vocabulary.ids(intro + "\n\n")
    hay = haystack(rng, max(tokens - overhead - len(head) - 4, 16), vocabulary, text, NOISE_SHARE)
    ends = np.append(np.flatnonzero(vocabulary.ends_sentence[hay]) + 1, len(hay))
    events = []
    for number, chain in enumerate(statements):
        places = np.sort(rng.uniform(0, len(hay), len(chain))).tolist()
        # Statements that meet at the end of one sentence stay in the chain's order.
        events += [(sentence_end(p, ends, len(hay)), number, i) for i, p in enumerate(places)]
    draft = Draft(tokens)
    draft.add(head)
    at = 0
    for place, number, i in sorted(events):
        if place > at:
            draft.cut()
            draft.add(hay[at:place].tolist())
            draft.cut()
            at = place
        draft.add(statements[number][i])
    draft.add(hay[at:].tolist())
    for i in rng.permutation(len(questions)):
        draft.add(questions[i][0])
        draft.add_answer(questions[i][1])
    return draft.finish(text)


def _invented(rng: np.random.Generator, count: int, size: int, first: str) -> list[str]:
    """Different words of `size` random letters, of the 26 from `first` on."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chr(ord(first) + i) for i in rng.integers(0, 26, size))] = None
    return list(found)


def word_counts(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """The most common words of a numbered list, or the most frequent words of a coded text."""
    make = common_words if rng.random() < 0.5 else frequent_words
    return make(rng, tokens, vocabulary, text)


def common_words(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Ten words stand in the list several times as often as the others; asked for in the order in which they appear."""
    head = vocabulary.ids(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    ask = vocabulary.ids("\nQuestion: What are the 10 most common words in the above list?")
    begin = vocabulary.ids(" Answer: The top 10 words that appear most often in the list are:")
    room = tokens - len(head) - len(ask) - len(begin) - 80
    often = max(3, min(int(rng.integers(8, 31)), room // 150))
    seldom = int(rng.integers(1, max(often // 5, 1) + 1))
    pool = rng.permutation(vocabulary.adjectives + vocabulary.nouns).tolist()
    rare = min((room // 6 - 10 * often) // seldom, len(pool) - 10)
    while True:
        listed = rng.permutation(pool[:10] * often + pool[10 : 10 + rare] * seldom).tolist()
        items = [vocabulary.ids(f" {i}. {word}" if i > 1 else f"1. {word}") for i, word in enumerate(listed, 1)]
        if sum(map(len, items)) <= room:
            break
        rare = int(rare * 0.93)
    common = sorted(pool[:10], key=listed.index)
    draft = Draft(tokens)
    draft.add(head)
    draft.add([token for item in items for token in item])
    draft.add((*ask, *begin))
    draft.add_answer([t for i, word in enumerate(common, 1) for t in vocabulary.ids(f" {i}. {word}")])
    draft.add(vocabulary.ids("\n"))
    return draft.finish(text)


def frequent_words(rng: np.random.Generator, tokens: int, vocabulary: Vocabulary, text: np.ndarray) -> Sample:
    """Invented words whose frequencies fall by a power of their rank; the three most frequent, dots not counted."""
    head = vocabulary.ids(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words.\n"
    )
    ask = vocabulary.ids(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    begin = vocabulary.ids(" Answer: According to the coded text above, the three most frequently appeared words are:")
    room = tokens - len(head) - len(ask) - len(begin) - 40
    words = ["....", *_invented(rng, max(tokens // 50, 6) - 1, 6, "a")]
    share = 1 / np.arange(1, len(words) + 1) ** rng.uniform(1.7, 2.3)
    share /= share.sum()
    size = room // 2
    while True:
        counts = (size * share).astype(int)
        counts[1:4] = np.maximum(counts[1:4], (4, 3, 2))
        counts[4:] = np.minimum(counts[4:], counts[3] - 1)
        listed = rng.permutation(np.repeat(words, counts)).tolist()
        encoded: list[Ids] = [vocabulary.ids(listed[0]), *(vocabulary.ids(" " + word) for word in listed[1:])]
        if sum(map(len, encoded)) <= room:
            break
        size = int(size * 0.93)
    top = [word for word, _ in Counter(word for word in listed if word != "....").most_common(3)]
    draft = Draft(tokens)
    draft.add(head)
    draft.add([token for word in encoded for token in word])
    draft.add((*ask, *begin))
    answer = f" {top[0]}, {top[1]}, {top[2]}."
    draft.add_answer(vocabulary.ids(answer))
    draft.add(vocabulary.ids("\n"))
    return draft.finish(text)
