"""Tokenizers: whole texts, growing outputs, chat templates."""

import json
import random
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxinfer.tokenizer import Tokenizer, byte_tokenizer

TEXTS = [
    "plain words, and more  words",
    "Grüße, naïve café — “quoted”",
    "漢字かな交じり文 한국어 текст",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 done",
    " leading and trailing \n\n\ttabs ",
    "",
    "a\x00b\x7f",
]
CORPUS = [*TEXTS, "the cat sat on the mat " * 20, "naïve naïve café café Grüße Grüße " * 10, "漢字漢字 " * 10]


def trained_byte_level() -> Tokenizer:
    """Byte-level BPE with merges that end inside characters, as DeepSeek's tokenizer has."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<｜begin｜>", special=True), AddedToken("<｜end｜>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(backend, special_tokens={"bos_token": "<｜begin｜>", "eos_token": "<｜end｜>"}, add_bos=True)


def sentencepiece_like() -> Tokenizer:
    """Pieces with ▁ for a space, bytes for what has no piece, a decoder that strips the first space (as Llama's)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [
        f"{space}{word}" for word in ("hello", "world", "a", "b", "Gr", "ü", "ße", ",", ".") for space in ("▁", "")
    ]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def grow(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.incremental_decoder()
    return "".join(decoder.push(token) for token in ids)


@pytest.mark.parametrize("make", [byte_tokenizer, trained_byte_level])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id and ids[1:] == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert grow(tokenizer, ids) == text
    assert b"".join(tokenizer.token_bytes(token) for token in ids[1:]).decode() == text


@pytest.mark.parametrize("make", [byte_tokenizer, trained_byte_level])
def test_random_bytes_grow_to_the_decoded_text(make):
    tokenizer = make()
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 40) for _ in range(rng.randrange(1, 40))]
        ids += tokenizer.encode(".", add_special_tokens=False)  # so that no character is left open at the end
        assert grow(tokenizer, ids) == tokenizer.decode(ids)


def test_characters_are_whole():
    tokenizer = byte_tokenizer()
    decoder = tokenizer.incremental_decoder()
    assert [decoder.push(byte) for byte in "é👍x".encode()] == ["", "é", "", "", "", "👍", "x"]
    # A character that is cut off is shown as U+FFFD once it cannot be completed, and not before.
    decoder = tokenizer.incremental_decoder()
    assert [decoder.push(token) for token in (0xF0, 0x9F, 257, 0x41)] == ["", "", "", "\ufffdA"]


def test_special_tokens_do_not_show_and_do_not_cut_characters():
    tokenizer = trained_byte_level()
    begin, think = tokenizer.encode("<｜begin｜>", False), tokenizer.encode("<think>", False)
    assert begin == [tokenizer.bos_id] and len(think) == 1
    ids = [*begin, *tokenizer.encode("a ", False), *think, *tokenizer.encode(" b", False), *tokenizer.eos_ids]
    assert grow(tokenizer, ids) == tokenizer.decode(ids) == "a <think> b"
    assert tokenizer.token_bytes(tokenizer.eos_ids[0]).decode() == "<｜end｜>"


def test_sentencepiece_like():
    tokenizer = sentencepiece_like()
    for text in ("hello world", "hello, world. a b", " hello  world", "Grüße hello", "漢 world 👍👍 a", "👍"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.incremental_decoder()
        parts = [decoder.push(token) for token in ids]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_sentencepiece_like_with_invalid_bytes_goes_on():
    tokenizer = sentencepiece_like()
    decoder = tokenizer.incremental_decoder()
    invalid = [3 + 0x80] * 50  # continuation bytes without a beginning
    text = "".join(decoder.push(token) for token in [*invalid, *tokenizer.encode("hello")])
    assert text.strip("\ufffd") == " hello"
    assert len(decoder._window) < 12


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_like])
def test_cost_does_not_grow(make):
    tokenizer = make()
    rng = random.Random(1)
    ids = [rng.randrange(260) for _ in range(20_000)]
    decoder = tokenizer.incremental_decoder()
    times = []
    for begin in range(0, len(ids), 1000):
        start = time.process_time()
        for token in ids[begin : begin + 1000]:
            decoder.push(token)
        times.append(time.process_time() - start)
    assert sorted(times[-5:])[2] < 5 * sorted(times[:5])[2] + 0.01


def test_long_text_is_not_truncated():
    tokenizer = byte_tokenizer()
    text = "0123456789 漢字\n" * 20_000
    assert len(tokenizer.encode(text)) == 1 + len(text.encode())


def test_bos_is_not_doubled():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("<|bos|>a") == [256, 97]
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat)
    assert text == "<|bos|><|user|>hi<|end|><|assistant|>"
    assert tokenizer.encode(text, False) == tokenizer.encode(text) == [256, 258, 104, 105, 261, 259]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=False) == "<|bos|><|user|>hi<|end|>"
    assert tokenizer.eos_ids == (257, 261) and tokenizer.bos_id == 256 and tokenizer.vocab_size == 262


def test_template_errors_are_value_errors():
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="expected the role system, user or assistant, got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match="without"):
        sentencepiece_like().apply_chat_template([{"role": "user", "content": "x"}])


def test_template_is_sandboxed_and_has_what_templates_expect(tmp_path: Path):
    template = (
        "{{ messages | tojson }}{{ strftime_now('%Y') }}{% for m in messages %}{% break %}{% endfor %}{{ eos_token }}"
    )
    write(tmp_path, byte_tokenizer(), chat_template=template)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    text = tokenizer.apply_chat_template([{"role": "user", "content": "<é>"}])
    assert text.startswith('[{"role": "user", "content": "<é>"}]20') and text.endswith("<|eos|>")
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"):
        write(tmp_path, byte_tokenizer(), chat_template=attack)
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        with pytest.raises(ValueError, match="refused"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def write(folder: Path, tokenizer: Tokenizer, **changes) -> None:
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_load(tmp_path: Path):
    assert Tokenizer.load(tmp_path) is None
    byte_tokenizer().save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    assert (loaded.bos_id, loaded.eos_ids, loaded.vocab_size) == (256, (257, 261), 262)
    assert loaded.encode("hé") == byte_tokenizer().encode("hé")
    assert loaded.chat_template == byte_tokenizer().chat_template


def test_load_released_forms(tmp_path: Path):
    write(
        tmp_path,
        byte_tokenizer(),
        bos_token={"__type": "AddedToken", "content": "<|bos|>", "special": True},
        pad_token=None,
        chat_template=[{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}x"}],
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 257}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([]) == "<|bos|>x" and tokenizer.eos_ids == (257,)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None and tokenizer.apply_chat_template([]) == "from the file"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str):
    byte_tokenizer().save(tmp_path)
    (tmp_path / name).write_text("{broken")
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(tmp_path)


def test_broken_template_and_unknown_special_token(tmp_path: Path):
    write(tmp_path, byte_tokenizer(), chat_template="{% for %}")
    with pytest.raises(ValueError, match="jinja2"):
        Tokenizer.load(tmp_path)
    write(tmp_path, byte_tokenizer(), eos_token="<nothing>")
    with pytest.raises(ValueError, match="eos_token '<nothing>'"):
        Tokenizer.load(tmp_path)
