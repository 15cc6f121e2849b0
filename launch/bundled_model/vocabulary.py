"""The tokenizer of the recipe, text in token form, and what the generated tasks draw from.  No jax here."""

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

BOS, EOS, USER, ASSISTANT, SYSTEM, END = range(6)
"""Ids of the special tokens, as `prepare_corpus.SPECIAL` orders them."""
Ids = tuple[int, ...]


class Vocabulary:
    """Encoded pieces of text, word lists, and for each token what it looks like.

    Pieces are encoded one by one and joined; that gives the tokens of the whole text wherever pieces meet at a border
    of words, as the pre-tokenizer cuts there anyway.
    """

    def __init__(self, folder: Path, held_out: bool):
        """`folder` holds `tokenizer.json` and `words.json`; `held_out` chooses the fifth of the words that training
        never sees as keys."""
        self.backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self.backend.get_vocab_size()
        lists = json.loads((folder / "words.json").read_text())
        self.adjectives = [word for word in lists["adjectives"] if _is_held_out(word) == held_out]
        self.nouns = [word for word in lists["nouns"] if _is_held_out(word) == held_out]
        pieces = [self.backend.id_to_token(token) for token in range(self.size)]
        self.starts = [i for i, piece in enumerate(pieces) if re.fullmatch("[a-z]{2,9}", piece)]
        """Tokens of lower-case letters, without a space before."""
        self.spaced = [i for i, piece in enumerate(pieces) if re.fullmatch("Ġ[a-z]{2,9}", piece)]
        """The same behind a space."""
        self.ordinary = np.array([i for i in range(self.size) if i > 6], np.uint16)
        self.ends_sentence = np.array([bool(re.search(r"([.!?]|Ċ)$", piece)) for piece in pieces])
        self.is_line_end = np.array([piece.endswith("Ċ") for piece in pieces])

    @lru_cache(maxsize=200_000)  # noqa: B019 -- one vocabulary lives as long as its process
    def ids(self, text: str) -> Ids:
        """The tokens of a piece of text."""
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)


def _is_held_out(word: str) -> bool:
    return hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 5 == 0


def tokenise(documents: list[str], backend: tokenizers.Tokenizer, seed: int) -> np.ndarray:
    """Documents in a random order, each as bos, text, eos; uint16."""
    order = np.random.default_rng(seed).permutation(len(documents))
    encoded = backend.encode_batch([documents[i] for i in order], add_special_tokens=False)
    return np.concatenate([np.array([BOS, *item.ids, EOS], np.uint16) for item in encoded])
