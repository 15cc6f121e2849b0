"""Generated tasks: masks, determinism, positions, and that joined pieces are the tokens of the text."""

import json
import lzma
import re
from collections import Counter

import numpy as np
import pytest

from launch.bundled_model import counting, data, needles, tasks, wordings
from launch.bundled_model.prepare_corpus import SPECIAL, clean, split, train_tokenizer
from launch.bundled_model.vocabulary import ASSISTANT, BOS, END, Vocabulary, _is_held_out

SENTENCE = (
    "The {a} {n} near the {b} {m} said: what is it, {k}? It is {k} of 3 magic things.\nAnother line ({k}) here.\n"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus made of invented words, in the form of prepare_corpus.py."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(5)
    words = sorted({"".join(rng.choice(list("aeioulnrstmdp"), rng.integers(4, 8))) for _ in range(900)})
    lines = []
    for i in range(6000):
        a, n, b, m = rng.choice(words, 4)
        lines.append(SENTENCE.format(a=a, n=n, b=b, m=m, k=i * 7919 % 100000))
    documents = ["".join(lines[i : i + 40]) for i in range(0, len(lines), 40)]
    for part in data.PARTS:
        (folder / f"train-{part}.xz").write_bytes(lzma.compress("\0".join(documents).encode(), preset=0))
        (folder / f"held-{part}.xz").write_bytes(lzma.compress("\0".join(documents[:20]).encode(), preset=0))
    train_tokenizer(documents).save(str(folder / "tokenizer.json"))
    lists = {"adjectives": words[::2], "nouns": words[1::2]}
    (folder / "words.json").write_text(json.dumps(lists))
    data.prepare(folder, folder / "tokens", 0)
    return data.load(folder, folder / "tokens")


@pytest.mark.parametrize("source", data.SOURCES)
@pytest.mark.parametrize("length", [770, 2050])
def test_sequences(corpus, source, length):
    for seed in range(6):
        made = [data.make_sequence(np.random.default_rng(seed), corpus, source, length) for _ in range(2)]
        for one, two in zip(*made, strict=True):
            np.testing.assert_array_equal(one, two)  # the same seed, the same sequence
        tokens, answer, positions = made[0]
        assert len(tokens) == len(answer) == len(positions) == length
        assert tokens[0] == BOS and answer[0] == 0 and positions[0] == 0
        assert (answer > 0).any()
        assert tokens.max() < corpus.vocabulary.size
        assert (np.diff(positions) >= 1).all() and positions[-1] < data.MAX_POSITION


def _answers(sample: tasks.Sample, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """What stands before each answer, and the answer."""
    found = []
    for number in range(1, int(sample.answer.max()) + 1):
        at = np.flatnonzero(sample.answer == number)
        if len(at):
            texts = (sample.tokens[: at[0]], sample.tokens[at[0] : at[-1] + 1])
            found.append(tuple(vocabulary.backend.decode(t.tolist(), skip_special_tokens=False) for t in texts))
    return found


def test_answers_of_needles_are_in_the_text(corpus):
    vocabulary, text, asked = corpus.vocabulary, corpus.streams["prose"], 0
    for seed in range(40):
        sample = needles.needles(np.random.default_rng(seed), 2050, vocabulary, text)
        for before, answer in _answers(sample, vocabulary):
            values = re.findall(r"\d{5,7}|[0-9a-f]{8}-[0-9a-f-]{27}|[a-z]+-[a-z]+", answer.rpartition(" is")[2])
            assert values, answer
            for value in values:
                assert value in before, (answer, before[-300:])
            asked += 1
    assert asked > 200


def test_answers_of_lists_are_those_of_the_asked_key(corpus):
    vocabulary, text, asked = corpus.vocabulary, corpus.streams["prose"], 0
    for seed in range(20):
        sample = tasks.key_values(np.random.default_rng(seed), 1030, vocabulary, text)
        for before, answer in _answers(sample, vocabulary):
            match = re.search(r'What is the value of "([^"]*)"\?$', before)
            if match is None or "\n" not in answer:
                continue
            block = before[before.rfind("\n\n") :]
            pairs = re.findall(rf'(?:^|[#"\n]){re.escape(match[1])}(?:"? is|"?:| =| ->| \|) ([^,.\n]+)', block)
            expected = pairs[0] if pairs else "none"
            assert answer.strip() == expected, (before[-300:], answer)
            asked += 1
    assert asked > 100


def test_chains_of_variables(corpus):
    vocabulary, asked = corpus.vocabulary, 0
    for seed in range(12):
        sample = counting.variable_tracking(np.random.default_rng(seed), 4000, vocabulary, corpus.streams["prose"])
        for before, answer in _answers(sample, vocabulary):
            count, value = re.findall(r"(\d+) variables are assigned the value (\d+), they are:$", before)[0]
            names = re.findall(rf"VAR ([A-Z]{{5}}) = {value}\b", before)
            while more := re.findall(rf"VAR ([A-Z]{{5}}) = VAR {names[-1]}\b", before):
                names += more
            assert answer.split() == names and len(names) == int(count)
            asked += 1
    assert asked > 30


@pytest.mark.parametrize("length", [770, 2050, 8194])
def test_most_common_words(corpus, length):
    vocabulary = corpus.vocabulary
    for seed in range(3):
        sample = counting.common_words(np.random.default_rng(seed), length, vocabulary, corpus.streams["prose"])
        ((before, answer),) = _answers(sample, vocabulary)
        counts = Counter(re.findall(r"\d+\. ([a-z]+)", before))
        asked = re.findall(r"\d+\. ([a-z]+)", answer)
        ranked = counts.most_common()
        assert sorted(asked) == sorted(word for word, _ in ranked[:10]) and ranked[9][1] > ranked[10][1]
        assert asked == sorted(asked, key=[*counts].index)
        assert np.flatnonzero(sample.answer)[-1] > 0.4 * length, "most of the sample is the list"


@pytest.mark.parametrize("length", [770, 2050, 8194])
def test_most_frequent_coded_words(corpus, length):
    vocabulary = corpus.vocabulary
    for seed in range(3):
        sample = counting.frequent_words(np.random.default_rng(seed), length, vocabulary, corpus.streams["prose"])
        ((before, answer),) = _answers(sample, vocabulary)
        coded = before.split("coded words.\n")[1].split("\nQuestion")[0]
        ranked = Counter(word for word in coded.split() if word != "....").most_common(4)
        assert re.findall("[a-z]{6}", answer) == [word for word, _ in ranked[:3]]
        assert ranked[0][1] >= ranked[1][1] >= ranked[2][1] > ranked[3][1]


def test_paraphrases_are_answered_by_their_facts(corpus):
    """Each answer is stated together with what the question names, before it."""
    vocabulary, text, asked = corpus.vocabulary, corpus.streams["prose"], 0
    for seed in range(40):
        sample = needles.paraphrases(np.random.default_rng(seed), 2050, vocabulary, text, False)
        for before, answer in _answers(sample, vocabulary):
            value = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}|\d{3,}|[a-z]+-[a-z]+", answer)[-1]
            assert value in before, (answer, before[-200:])
            asked += 1
    assert asked > 200


def test_the_asked_attribute_decides(corpus):
    """The value stands close to the name and the attribute that the question has, and no other fact has both."""
    vocabulary, text, asked = corpus.vocabulary, corpus.streams["prose"], 0
    for seed in range(60):
        sample = needles.paraphrases(np.random.default_rng(seed), 2050, vocabulary, text, False)
        for before, answer in _answers(sample, vocabulary):
            found = re.search(r"What is the ([\w ]+) (?:of|for) ([a-z]+-[a-z]+)\?[^?.]*$", before)
            if found is None:
                continue
            value = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}|\d{3,}|[a-z]+-[a-z]+", answer)[-1]
            facts = [before[max(m.start() - 90, 0) : m.end() + 90] for m in re.finditer(rf"\b{value}\b", before)]
            assert any(found[1] in fact and found[2] in fact for fact in facts), (found[0], answer)
            asked += 1
    assert asked > 20


@pytest.mark.parametrize("held_out", [False, True])
def test_every_question_asks(corpus, held_out):
    """Wordings without a form for several keys or values are not used for them."""
    vocabulary, text = corpus.vocabulary, corpus.streams["prose"]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        if held_out:
            sample = needles.paraphrases(rng, 2050, vocabulary, text, True)
        else:
            sample = needles.needles(rng, 2050, vocabulary, text)
        for before, _ in _answers(sample, vocabulary):
            line = before.removesuffix("<|end|><|assistant|>").rsplit("\n", 1)[-1].rsplit("<|user|>", 1)[-1]
            assert re.search(r"\w[?.]", line), before[-200:]


def test_wordings_held_out_are_not_made_by_the_paraphrases():
    forms = " ".join((*wordings.FACTS, *wordings.QUESTIONS, *wordings.BARE_FACTS, *wordings.BARE_QUESTIONS))
    for word in ("belongs", "winning"):
        assert word not in forms
    trained = " ".join(wording.fact + wording.question for wording in (*wordings.WORDINGS, *wordings.RULER))
    for word in (*wordings.HELD_OUT_ATTRIBUTES, "belongs", "winning"):
        assert not any(word in attribute for attribute in wordings.ATTRIBUTES)
        assert any(word in (held.fact + held.question).lower() for held in wordings.HELD_OUT)
        assert word not in trained


def test_copies_repeat_what_stood_before(corpus):
    sample = tasks.repeat_copy(np.random.default_rng(2), 2050, corpus.vocabulary, corpus.streams["prose"])
    for number in range(1, int(sample.answer.max()) + 1):
        at = np.flatnonzero(sample.answer == number)
        if not len(at):
            continue
        span = sample.tokens[at[0] - 2 : at[-1] + 1]
        windows = np.lib.stride_tricks.sliding_window_view(sample.tokens[: at[0] - 2], len(span))
        assert (windows == span).all(axis=1).any()


def test_pieces_are_the_tokens_of_the_text(corpus):
    """What a served model is given, the tokens of the whole text, are the tokens it was trained on."""
    vocabulary = corpus.vocabulary
    for seed in range(10):
        sample = needles.needles(np.random.default_rng(seed), 1030, vocabulary, corpus.streams["prose"])
        last = np.flatnonzero(sample.answer)[-1]
        text = vocabulary.backend.decode(sample.tokens[: last + 1].tolist(), skip_special_tokens=False)
        again = vocabulary.backend.encode(text, add_special_tokens=False).ids
        # The haystack may begin in the middle of a word; compare from the first answer's question on.
        tail = 24
        assert again[-tail:] == sample.tokens[last + 1 - tail : last + 1].tolist()


def test_chat_turns(corpus):
    vocabulary = corpus.vocabulary
    for seed in range(60):
        sample = needles.needles(np.random.default_rng(seed), 1030, vocabulary, corpus.streams["prose"])
        if ASSISTANT in sample.tokens:
            turns = np.flatnonzero(sample.tokens == ASSISTANT)
            assert (sample.answer[turns] == 0).all() and (sample.answer[turns + 1] > 0).all()
            ends = np.flatnonzero((sample.tokens == END) & (sample.answer > 0))
            assert len(ends) >= len(turns) - 1
            return
    raise AssertionError("expected a chat among sixty samples")


def test_positions_skip_only_where_nothing_is_to_be_found(corpus):
    skipped = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        positions = data.skipping_positions(rng, 100, np.array([20, 50, 80]))
        jumps = np.flatnonzero(np.diff(positions) > 1) + 1
        assert set(jumps) <= {20, 50, 80}
        skipped += bool(len(jumps))
    assert 5 < skipped < 25


def test_mixture_of_a_batch(corpus):
    batch = data.make_batch(corpus, 0, 512, 64, 3)
    counts = np.bincount(batch.source, minlength=len(data.SOURCES))
    np.testing.assert_allclose(counts / 64, data.SHARES[2048], atol=0.04)
    again = data.make_batch(corpus, 0, 512, 64, 3)
    other = data.make_batch(corpus, 0, 512, 64, 4)
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    assert (batch.tokens != other.tokens).any()


def test_loader_continues_where_it_was(corpus, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "corpus0"
    loader = data.Loader(folder, folder / "tokens", 0, workers=1, ahead=3)
    try:
        stream = loader.stream(256, 4, 0)
        first = [stream.next() for _ in range(5)]
        later = loader.stream(256, 4, 3)
        for expected in first[3:]:
            np.testing.assert_array_equal(later.next().tokens, expected.tokens)
    finally:
        loader.close()
    np.testing.assert_array_equal(first[4].tokens, data.make_batch(corpus, 0, 256, 4, 4).tokens)


def test_words_of_the_evaluation_are_never_trained_on(corpus):
    vocabulary = corpus.vocabulary
    assert not any(_is_held_out(word) for word in vocabulary.adjectives + vocabulary.nouns)


def test_tokenizer_round_trip(corpus):
    backend = corpus.vocabulary.backend
    for text in ("Numbers: 1234567, 90.", "ünï — 你好 \t  tabs\n\n", "def f(x):\n    return x + 1\n"):
        ids = backend.encode(text).ids
        assert ids[0] == BOS
        assert backend.decode(ids[1:], skip_special_tokens=False) == text
    assert [backend.token_to_id(name) for name in SPECIAL] == list(range(7))
    assert len(backend.encode("1234567", add_special_tokens=False).ids) == 7


def test_documents_are_cleaned_and_held_out_by_content():
    assert clean("short") is None
    assert clean("x" * 300 + "\r\n\n\n\n  \n" + "y") == "x" * 300 + "\n\ny"
    texts = [f"document number {i} " * 20 for i in range(2000)]
    train, held = split(texts, 0)
    assert 20 <= len(held) <= 60
    assert sorted(train + held) == sorted(texts)
    assert split(texts[::-1], 0)[1] == held[::-1]
