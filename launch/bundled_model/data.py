"""Batches: which sequences a batch has, their positions, and worker processes that make them ahead.  No jax here.

A batch is a function of (seed, tokens a sequence, number of the batch) alone, so a run that continues needs to know
only how many batches of each length it has had.
"""

import lzma
import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch.bundled_model import counting, needles, tasks
from launch.bundled_model.vocabulary import BOS, EOS, Vocabulary, tokenise

PARTS = ("prose", "docs", "code")
SOURCES = (*PARTS, "copy", "kv", "needle", "paraphrase", "vt", "count")
SHARES = {
    2048: (0.30, 0.20, 0.12, 0.06, 0.08, 0.08, 0.08, 0.04, 0.04),
    8192: (0.24, 0.17, 0.09, 0.03, 0.11, 0.12, 0.12, 0.06, 0.06),
    32768: (0.20, 0.14, 0.08, 0.02, 0.12, 0.16, 0.15, 0.07, 0.06),
}
"""Share of the sequences of a batch that each of SOURCES has, by sequence length; a shorter length takes the first."""
MAX_POSITION = 131072
SKIPPING_SHARE = 0.5
"""Of the sequences: those whose positions skip (PoSE, arXiv 2309.10400)."""
LOOKAHEAD = 2
"""A sequence has this many tokens more than positions: the targets of the next token and the one after."""


class Batch(NamedTuple):
    """`B` sequences; `T` is the sequence length."""

    tokens: np.ndarray
    """uint16 `[B, T + 2]`."""
    answer: np.ndarray
    """uint16 `[B, T + 2]`: 0 where a token is no target, else the number of its answer; 1 for all of natural text."""
    positions: np.ndarray
    """int32 `[B, T + 2]`."""
    source: np.ndarray
    """int32 `[B]`, index in SOURCES."""


class Corpus(NamedTuple):
    """The natural text of each part as one stream of tokens, and the vocabulary."""

    streams: dict[str, np.ndarray]
    vocabulary: Vocabulary
    held_out: bool


def prepare(folder: Path, cache: Path, seed: int):
    """Tokenises the corpus into `cache`, once."""
    cache.mkdir(parents=True, exist_ok=True)
    if (cache / "complete").is_file():
        return
    vocabulary = Vocabulary(folder, False)
    for path in sorted(folder.glob("*.xz")):
        documents = lzma.decompress(path.read_bytes()).decode().split("\0")
        np.save(cache / f"{path.stem}.npy", tokenise(documents, vocabulary.backend, seed))
    (cache / "complete").touch()


def load(folder: Path, cache: Path, held_out: bool = False) -> Corpus:
    """The streams that `prepare` made: those to train on, or those held out."""
    kind = "held" if held_out else "train"
    streams = {part: np.load(cache / f"{kind}-{part}.npy", mmap_mode="r") for part in PARTS}
    return Corpus(streams, Vocabulary(folder, held_out), held_out)


def make_batch(corpus: Corpus, seed: int, length: int, rows: int, number: int) -> Batch:
    """Batch `number` of the sequences of this length."""
    made = []
    for row in range(rows):
        place = number * rows + row
        rng = np.random.default_rng((seed, length, place, corpus.held_out))
        # A sequence of low discrepancy: every batch has nearly the same mixture.
        source = int(np.searchsorted(np.cumsum(_shares(length)), (place * 0.6180339887498949) % 1.0, side="right"))
        source = min(source, len(SOURCES) - 1)
        made.append((*make_sequence(rng, corpus, SOURCES[source], length + LOOKAHEAD), source))
    tokens, answer, positions, source = zip(*made, strict=True)
    return Batch(np.stack(tokens), np.stack(answer), np.stack(positions), np.array(source, np.int32))


def make_sequence(
    rng: np.random.Generator, corpus: Corpus, source: str, tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, answers and positions of one sequence of a source."""
    if source in PARTS:
        stream = corpus.streams[source]
        start = rng.integers(len(stream) - tokens)
        piece = np.array(stream[start : start + tokens])
        piece[0] = BOS
        answer = (piece != BOS).astype(np.uint16)
        # Skips at borders of documents, or anywhere.
        sample = tasks.Sample(piece, answer, np.flatnonzero(piece == EOS) + 1)
        if len(sample.cuts) < 8:
            sample = sample._replace(cuts=np.arange(1, tokens))
    else:
        text = corpus.streams[PARTS[rng.choice(3, p=(0.6, 0.3, 0.1))]]
        vocabulary = corpus.vocabulary
        match source:
            case "copy":
                sample = tasks.repeat_copy(rng, tokens, vocabulary, text)
            case "kv":
                sample = tasks.key_values(rng, tokens, vocabulary, text)
            case "needle":
                sample = needles.needles(rng, tokens, vocabulary, text)
            case "paraphrase":
                sample = needles.paraphrases(rng, tokens, vocabulary, text, corpus.held_out)
            case "vt":
                sample = counting.variable_tracking(rng, tokens, vocabulary, text)
            case _:
                sample = counting.word_counts(rng, tokens, vocabulary, text)
    return sample.tokens, sample.answer, skipping_positions(rng, tokens, sample.cuts)


def skipping_positions(rng: np.random.Generator, tokens: int, cuts: np.ndarray) -> np.ndarray:
    """Positions of a sequence, int32: 0, 1, ... or, half of the time, with up to seven skips, up to MAX_POSITION."""
    positions = np.arange(tokens, dtype=np.int32)
    if rng.random() >= SKIPPING_SHARE or not len(cuts):
        return positions
    chosen = np.sort(rng.choice(cuts, min(int(rng.integers(1, 8)), len(cuts)), replace=False))
    room = int(np.exp(rng.uniform(np.log(tokens), np.log(MAX_POSITION)))) - tokens if tokens < MAX_POSITION else 0
    for cut, skip in zip(chosen, np.diff(np.sort(rng.integers(0, room + 1, len(chosen))), prepend=0), strict=True):
        positions[cut:] += np.int32(skip)
    return positions


def _shares(length: int) -> tuple[float, ...]:
    longest = max((known for known in SHARES if known <= length), default=min(SHARES))
    return SHARES[longest]


_corpus: list[Corpus] = []
"""In a worker process: the corpus, opened once when the process starts."""


def _start_worker(folder: Path, cache: Path):
    os.nice(5)
    _corpus.append(load(folder, cache))


def _make(seed: int, length: int, rows: int, number: int) -> Batch:
    return make_batch(_corpus[0], seed, length, rows, number)


class Stream:
    """Batches in order, some of them ahead."""

    def __init__(self, submit: Callable[[int], Future[Batch]], first: int, ahead: int):
        self._submit = submit
        self._number = first
        self._waiting = deque(submit(number) for number in range(first, first + ahead))

    def next(self) -> Batch:
        """The next batch, waited for if it is not made yet."""
        batch = self._waiting.popleft().result()
        self._waiting.append(self._submit(self._number + len(self._waiting) + 1))
        self._number += 1
        return batch


class Loader:
    """Makes batches ahead in worker processes."""

    def __init__(self, folder: Path, cache: Path, seed: int, workers: int, ahead: int):
        """`ahead` batches of the length in use are made in advance."""
        self._pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(folder, cache)
        )
        self._seed, self._ahead = seed, ahead

    def stream(self, length: int, rows: int, first: int) -> "Stream":
        """The batches of a length from number `first` on; the first of them are being made when this returns."""
        return Stream(lambda number: self._pool.submit(_make, self._seed, length, rows, number), first, self._ahead)

    def close(self):
        """Stops the worker processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def bytes_per_token(folder: Path, cache: Path) -> dict[str, float]:
    """Bytes of held-out text for each of its tokens, by part: turns nats a token into bits a byte."""
    sizes = {}
    for part in PARTS:
        size = len(lzma.decompress((folder / f"held-{part}.xz").read_bytes()))
        sizes[part] = size / len(np.load(cache / f"held-{part}.npy", mmap_mode="r"))
    return sizes
