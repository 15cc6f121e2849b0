"""The tasks: prompts of a wanted length with what an answer has to contain.

Wordings and definitions are those of RULER (arXiv 2404.06654), without its worked examples, over the bundled haystack;
`passkey` is that of arXiv 2305.16300.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from jaxinfer.evaluation.anchored import hidden_depths, is_between_anchors
from jaxinfer.evaluation.haystack import Haystack, fit, noise, words
from jaxinfer.evaluation.lookups import VALUE_TOKENS, make_lookups
from jaxinfer.tokenizer import Tokenizer

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ONE_INTRO = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards."
)
ONE_QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
ONE_PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"
MANY_INTRO = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards."
)
MANY_QUESTION = "What are all the special magic {kind}s for {key} mentioned in the provided text?"
MANY_PREFIX = "The special magic {kind}s for {key} mentioned in the provided text are"
PASSKEY_INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
PASSKEY_FACT = "The pass key is {value}. Remember it. {value} is the pass key."
PASSKEY_QUESTION = "What is the pass key?"
PASSKEY_PREFIX = "The pass key is"
CHAIN_INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text."
CHAIN_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
CHAIN_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
COMMON_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often."
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
CODED_INTRO = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words."
)
CODED_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
CODED_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing an answer is scored for."""

    depth: float | None
    """Where in the text it stands, 0 (beginning) to 1; None where the question has no place."""
    reference: str | list[int]
    """What the answer has to contain (text), or to begin with (token ids)."""
    rows: list[int] | None = None
    """Instead of the answer: positions of the prompt whose likeliest next tokens have to be the reference."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and what is scored."""

    ids: list[int]
    answer_tokens: int
    parts: list[Part]
    text: str | None = None
    """The whole prompt as text; None for prompts made of token ids."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What samples depend on besides task, length, depth and number."""

    tokenizer: Tokenizer | None
    ordinary: np.ndarray
    """Token ids without a special meaning, int `[n]` (see `ordinary_tokens`)."""
    haystack: Haystack
    seed: int = 0
    chat: bool = False
    """Put the question into a chat turn; the answer begins with the task's prefix all the same."""
    answer_tokens: int | None = None
    """Most tokens of an answer; None: the task's own number."""
    between_anchors: bool = False
    """Hide what has a depth out of reach of hybrid attention's window and anchors (see `evaluation.anchored`)."""
    kv_lookups: int = 12
    kv_key_tokens: int = 3
    kv_distractors: float = 1 / 32


@dataclass(frozen=True)
class Draft:
    """A prompt before it is tokens: text to read, question, beginning of the answer."""

    intro: str
    context: str
    question: str
    prefix: str
    parts: list[Part]

    @property
    def body(self) -> str:
        return "\n".join(piece for piece in (self.intro, self.context, self.question) if piece)


type Write = Callable[[np.random.Generator, Haystack, int, int, float | None], Draft]
"""From a generator, a haystack, the wanted tokens, a size that the text grows with, and a depth, to a prompt."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task by name.  `answer_tokens` is RULER's room for an answer."""

    kind: Literal["text", "ids", "perplexity"]
    answer_tokens: int
    has_depth: bool
    write: Write | None = None


def _number(rng: np.random.Generator) -> str:
    return str(rng.integers(10**6, 10**7))


def _uuid(rng: np.random.Generator) -> str:
    digits = rng.bytes(16).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _needles(keys: int, asked: int, per_key: int, value: Callable[[np.random.Generator], str], kind: str) -> Write:
    """A task with `keys` names, of which `asked` are asked for, with `per_key` values each, hidden in text."""

    def write(rng, haystack, tokens, size, depth):
        del tokens
        names = words().names(rng, keys)
        start = int(rng.integers(len(haystack.words)))
        facts = [(name, value(rng)) for name in names for _ in range(per_key)]
        # What is asked for is spread evenly over the text, beginning at the depth; the rest lies anywhere.
        scored = asked * per_key
        spread = [(depth + i / scored) % 1.0 if scored > 1 else depth for i in range(scored)]
        places = [*spread, *rng.random(len(facts) - scored).tolist()]
        sentences = [NEEDLE.format(kind=kind, key=key, value=found) for key, found in facts]
        parts = [Part(depth=place, reference=facts[i][1]) for i, place in enumerate(spread)]
        context = haystack.with_sentences(start, size, places, sentences)
        return _question(context, names[:asked], kind, parts)

    return write


def _question(context: str, names: list[str], kind: str, parts: list[Part]) -> Draft:
    """The question of the needle tasks: in the singular for one value, as RULER has it."""
    key = names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
    one = len(parts) == 1
    return Draft(
        (ONE_INTRO if one else MANY_INTRO).format(kind=kind),
        context,
        (ONE_QUESTION if one else MANY_QUESTION).format(kind=kind, key=key),
        (ONE_PREFIX if one else MANY_PREFIX).format(kind=kind, key=key),
        parts,
    )


def _only_needles(named: bool, value: Callable[[np.random.Generator], str], kind: str) -> Write:
    """A task whose text is nothing but needles; names are words or UUIDs."""

    def write(rng, haystack, tokens, size, depth):
        del haystack, tokens
        count = size + 1
        asked = round(depth * (count - 1))
        # One by one, so that a longer text begins as a shorter one does.
        stream = _distinct(rng, lambda g: words().names(g, 1)[0] if named else _uuid(g))
        facts = [(next(stream), value(rng)) for _ in range(count)]
        key, found = facts[asked]
        context = " ".join(NEEDLE.format(kind=kind, key=key, value=found) for key, found in facts)
        return _question(context, [key], kind, [Part(depth=depth, reference=found)])

    return write


def _distinct(rng: np.random.Generator, draw: Callable[[np.random.Generator], str]) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        text = draw(rng)
        if text not in seen:
            seen.add(text)
            yield text


def _in_noise(write: Write) -> Write:
    return lambda rng, haystack, tokens, size, depth: write(rng, noise(), tokens, size, depth)


def _passkey(rng, haystack, tokens, size, depth) -> Draft:
    del haystack, tokens
    value = str(rng.integers(10**4, 10**5))
    context = noise().with_sentences(0, size, [depth], [PASSKEY_FACT.format(value=value)])
    return Draft(PASSKEY_INTRO, context, PASSKEY_QUESTION, PASSKEY_PREFIX, [Part(depth=depth, reference=value)])


def _variable_tracking(rng, haystack, tokens, size, depth) -> Draft:
    """One chain of four hops: "VAR A = 12345", "VAR B = VAR A", ..."""
    del haystack, tokens, depth
    stream = _distinct(rng, lambda g: "".join(chr(ord("A") + letter) for letter in g.integers(26, size=5)))
    names = [next(stream) for _ in range(5)]
    value = str(rng.integers(10**4, 10**5))
    statements = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in pairwise(names))]
    places = np.sort(rng.random(len(statements))).tolist()
    context = noise().with_sentences(0, size, places, [f"\n{statement}\n" for statement in statements])
    return Draft(
        CHAIN_INTRO + "\n",
        context,
        CHAIN_QUESTION.format(value=value),
        CHAIN_PREFIX.format(count=len(names), value=value),
        [Part(depth=None, reference=name) for name in names],
    )


def _common_words(rng, haystack, tokens, size, depth) -> Draft:
    """Ten words thirty times each among others three times each; below 4,096 tokens ten times and once."""
    del haystack, depth
    often, seldom = (30, 3) if tokens >= 4096 else (10, 1)
    single = rng.permutation(words().all).tolist()
    pool, shift = single, 0
    while len(pool) < 10 + size:  # the longest texts need more words than there are
        shift += 1
        pool = pool + [f"{a}-{b}" for a, b in zip(single, single[shift:] + single[:shift], strict=True)]
    common, rare = pool[:10], pool[10 : 10 + size]
    listed = rng.permutation([word for word in common for _ in range(often)] + [w for w in rare for _ in range(seldom)])
    context = " ".join(f"{i}. {word}" for i, word in enumerate(listed.tolist(), start=1))
    parts = [Part(depth=None, reference=word) for word in common]
    return Draft(COMMON_INTRO, context, COMMON_QUESTION, COMMON_PREFIX, parts)


def _frequent_words(rng, haystack, tokens, size, depth) -> Draft:
    """Coded words whose frequencies fall with the square of their rank; the first rank is dots, to be ignored."""
    del haystack, depth
    stream = _distinct(rng, lambda g: "".join(chr(ord("a") + letter) for letter in g.integers(26, size=6)))
    vocabulary = ["....", *(next(stream) for _ in range(max(tokens // 50, 4) - 1))]
    share = 1 / (np.arange(1, len(vocabulary) + 1) ** 2 * (np.pi**2 / 6))
    counts = (size * share).astype(int)
    # In the smallest texts, too, three ranks stand out.
    counts[1:4] = np.maximum(counts[1:4], (4, 3, 2))
    counts[4:] = np.minimum(counts[4:], counts[3] - 1)
    listed = rng.permutation(np.repeat(vocabulary, counts))
    parts = [Part(depth=None, reference=word) for word in vocabulary[1:4]]
    return Draft(CODED_INTRO, " ".join(listed.tolist()), CODED_QUESTION, CODED_PREFIX, parts)


def _excerpt(rng, haystack, tokens, size, depth) -> Draft:
    del tokens, depth
    start = int(rng.integers(len(haystack.words)))
    return Draft("", haystack.with_sentences(start, size + 2, [], []), "", "", [])


def _text(write: Write, answer_tokens: int, has_depth: bool = True) -> Task:
    return Task(kind="text", answer_tokens=answer_tokens, has_depth=has_depth, write=write)


TASKS: dict[str, Task] = {
    "niah_single": _text(_needles(1, 1, 1, _number, "number"), 128),
    "niah_single_noise": _text(_in_noise(_needles(1, 1, 1, _number, "number")), 128),
    "niah_single_uuid": _text(_needles(1, 1, 1, _uuid, "uuid"), 128),
    "niah_multikey": _text(_needles(4, 1, 1, _number, "number"), 128),
    "niah_multikey_needles": _text(_only_needles(True, _number, "number"), 128),
    "niah_multikey_uuid": _text(_only_needles(False, _uuid, "uuid"), 128),
    "niah_multivalue": _text(_needles(1, 1, 4, _number, "number"), 128),
    "niah_multiquery": _text(_needles(4, 4, 1, _number, "number"), 128),
    "vt": _text(_variable_tracking, 30, has_depth=False),
    "cwe": _text(_common_words, 120, has_depth=False),
    "fwe": _text(_frequent_words, 50, has_depth=False),
    "passkey": _text(_passkey, 16),
    "kv": Task(kind="ids", answer_tokens=VALUE_TOKENS, has_depth=True),
    "ppl": Task(kind="perplexity", answer_tokens=1, has_depth=False, write=_excerpt),
}


def make_sample(name: str, length: int, depth: float | None, number: int, settings: Settings) -> Sample:
    """Sample `number` of a task at a length (prompt and room for the answer, in tokens of the model) and a depth.

    The same arguments give the same sample. Raises ValueError if the length is too short for the task or the model has
    no tokenizer for a task made of text.
    """
    task = TASKS[name]
    millionths = -1 if depth is None else round(depth * 10**6)
    key = [settings.seed, sorted(TASKS).index(name), length, millionths + 1, number]
    if task.kind == "ids":
        assert depth is not None
        return _ids_sample(np.random.default_rng(key), length, depth, settings)
    tokenizer = settings.tokenizer
    if tokenizer is None:
        raise ValueError(f"{name}: this model has no tokenizer; expected a task on token ids: kv")
    write = task.write
    assert write is not None

    def make(size: int, place: float | None = depth) -> Sample:
        draft = write(np.random.default_rng(key), settings.haystack, length, size, place)
        if settings.chat and task.kind == "text":
            turn = [{"role": "user", "content": draft.body}]
            text = tokenizer.apply_chat_template(turn) + draft.prefix
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            text = " ".join(piece for piece in (draft.body, draft.prefix) if piece)
            ids = tokenizer.encode(text)
        room = task.answer_tokens if settings.answer_tokens is None else settings.answer_tokens
        if task.kind == "text" and settings.answer_tokens is None:
            # Tokenizers with a small vocabulary need more than RULER's numbers allow for.
            listed = " " + ", ".join(str(part.reference) for part in draft.parts)
            room = max(room, len(tokenizer.encode(listed, add_special_tokens=False)) + 8)
        elif task.kind == "perplexity":
            room = 1
        return Sample(ids=ids, answer_tokens=room, parts=draft.parts, text=text)

    def tokens(sample: Sample) -> int:
        return len(sample.ids) + sample.answer_tokens

    if depth is None or not settings.between_anchors:
        return fit(make, tokens, length)
    for place in hidden_depths(depth, length):
        sample = fit(partial(make, place=place), tokens, length)
        if len(sample.parts) != 1:
            raise ValueError(f"{name}: expected a task that hides one thing, to hide it between anchors")
        (part,) = sample.parts
        if is_between_anchors(sample.ids, str(sample.text), str(part.reference), tokenizer):
            return replace(sample, parts=[replace(part, depth=depth)])
    raise ValueError(f"{name}: found no place between anchors at depth {depth} of {length} tokens")


def _ids_sample(rng: np.random.Generator, length: int, depth: float, settings: Settings) -> Sample:
    count = settings.kv_lookups
    depths = [(depth + i / count) % 1.0 if count > 1 else depth for i in range(count)]
    found = make_lookups(
        rng, settings.ordinary, length - VALUE_TOKENS, depths, settings.kv_key_tokens, settings.kv_distractors
    )
    parts = [
        Part(depth=place, reference=value, rows=rows)
        for place, value, rows in zip(found.depths, found.values, [*found.rows, None], strict=True)
    ]
    return Sample(ids=found.ids, answer_tokens=VALUE_TOKENS, parts=parts)


def ordinary_tokens(tokenizer: Tokenizer | None, vocabulary: int) -> np.ndarray:
    """The ids below `vocabulary`, int64 `[n]`, without those that the tokenizer gives a special meaning."""
    if tokenizer is None:
        return np.arange(vocabulary)
    known = range(min(vocabulary, tokenizer.vocab_size))
    return np.array([i for i in known if tokenizer.token_bytes(i) and not tokenizer.is_special(i)])
