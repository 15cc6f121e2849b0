"""Text to token ids and back: `tokenizer.json` through the tokenizers library, chat templates through jinja2."""

import codecs
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: with byte fallback, as many tokens."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_BYTE_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role not in ("system", "user", "assistant") -%}
    {{- raise_exception("expected the role system, user or assistant, got " ~ message.role) -}}
  {%- endif -%}
  {{- "<|" ~ message.role ~ "|>" ~ message.content ~ "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}"""


def _byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table).

    Bytes that are printable in Latin-1 stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


class Tokenizer:
    """A tokenizer with its chat template.

    `eos_ids` are the ids that end a text (several, where a chat turn has an end of its own); `bos_id` begins one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        add_bos: bool = False,
        eos_ids: Iterable[int] = (),
    ):
        """`special_tokens` maps names as "bos_token" to their text; `add_bos` puts the bos token before every text that
        does not begin with it, whether or not the backend does so; `eos_ids` are added to the id of "eos_token".
        Raises ValueError for a special token that is not in the vocabulary or a template that does not parse."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._add_bos = add_bos
        self.bos_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_ids]))
        if add_bos and self.bos_id is None:
            raise ValueError("expected a bos_token, as the tokenizer puts it before every text; got none")
        self.chat_template = chat_template
        self._template = None if chat_template is None else _compile(chat_template)
        added = backend.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face folder: `tokenizer.json` with, where present, `tokenizer_config.json`,
        `chat_template.jinja` and the eos ids of `generation_config.json`.  None if there is no `tokenizer.json`.
        Raises ValueError naming the file that cannot be read."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"expected a tokenizer of the tokenizers library in {path}: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        return cls(
            backend,
            special_tokens=special,
            chat_template=_find_template(folder, config),
            add_bos=bool(config.get("add_bos_token", False)),
            eos_ids=[] if eos is None else [eos] if isinstance(eos, int) else eos,
        )

    def save(self, folder: str | Path) -> None:
        """Writes the files that `load` reads into an existing folder."""
        folder = Path(folder)
        self._backend.save(str(folder / "tokenizer.json"))
        config = {**self.special_tokens, "add_bos_token": self._add_bos, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_ids)}))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token = None if text is None else self._backend.token_to_id(text)
        if text is not None and token is None:
            raise ValueError(f"expected the {name} {text!r} to be in the vocabulary, and it is not")
        return token

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of the whole text, never truncated.

        Special tokens written out in the text become their ids.  With `add_special_tokens` the text gets what the
        tokenizer adds to a text (a bos token), unless it begins with the bos token already.
        """
        begun = self.bos_id is not None and text.startswith(self.special_tokens["bos_token"])
        add = add_special_tokens and not begun
        # Unlike `encode`, the form for batches works outside of Python's lock: a long text holds no other thread up.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=add)[0].ids
        if add and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kw: Any) -> str:
        """The text of a chat, special tokens written out: encode it with `add_special_tokens=False`.

        `kw` goes to the template (`tools`, `documents`, ...).
        Raises ValueError if there is no template or the template refuses, with its message."""
        if self._template is None:
            raise ValueError("expected a tokenizer with a chat template, got one without: send a completion instead")
        names = {"tools": None, "documents": None, **self.special_tokens, **kw}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD.  Ids without a token give no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def byte_level(self) -> bool:
        """Whether a text is the plain concatenation of its tokens' bytes (a byte-level decoder and no other)."""
        decoder = json.loads(self._backend.to_str(pretty=False)).get("decoder")
        while decoder and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return bool(decoder) and decoder["type"] == "ByteLevel"

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return {character: byte for byte, character in _byte_alphabet().items()}

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, special tokens written out; b"" for an id without a token."""
        text = self._added.get(token)
        if text is not None:
            return text.encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            try:
                return bytes(self._byte_of[character] for character in piece)
            except KeyError:  # as the library: a piece with a character outside the alphabet stands for itself
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()

    def is_special(self, token: int) -> bool:
        """Whether `decode` skips the token."""
        return token in self._special_ids

    def incremental_decoder(self) -> "IncrementalDecoder":
        """A decoder for one growing output."""
        return IncrementalDecoder(self)


class IncrementalDecoder:
    """Decodes a growing output: `push` gives the text that each token adds, whole characters only.

    With a byte-level tokenizer the bytes go through an incremental UTF-8 decoder, which is exact.  Otherwise a window
    of the last tokens is decoded with and without the new one, so that the context a decoder looks at (the space
    before a word) is there.  Either way the cost of a token does not grow with the output.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.byte_level else None
        self._window: list[int] = []
        self._shown = 0
        """Tokens of the window whose text is out."""

    def push(self, token: int) -> str:
        """The text added by `token`; empty while a character is incomplete."""
        if self._tokenizer.is_special(token) or not self._tokenizer.token_bytes(token):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token))
        before = self._tokenizer.decode(self._window[: self._shown])
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        # An ending U+FFFD may yet become a character, but not after more tokens than a character has bytes.
        pending = len(self._window) - self._shown
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and pending <= _LONGEST_CHARACTER):
            return ""
        new = text[len(before) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return new


def byte_tokenizer() -> Tokenizer:
    """The tokenizer of the built-in model: ids 0 to 255 are bytes, then come the special tokens.

    <|bos|> 256, <|eos|> 257, <|user|> 258, <|assistant|> 259, <|system|> 260, <|end|> 261 (ends a turn).
    """
    vocabulary = {character: byte for byte, character in _byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    names = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        chat_template=_BYTE_CHAT_TEMPLATE,
        add_bos=True,
        eos_ids=[261],
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object in {path}, got {type(value).__name__}")
    return value


def _token_text(value: Any) -> str:
    """A token of `tokenizer_config.json`: plain text, or an object with its text in "content"."""
    return value["content"] if isinstance(value, dict) else value


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or in the configuration (one, or several by name: "default")."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f'expected a chat template named "default" in {folder}, got {sorted(named)}')
        return named["default"]
    return template


def _compile(template: str) -> jinja2.Template:
    """The template in a sandbox, with the functions that templates of Hugging Face models expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"expected a chat template in jinja2's language: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, **kw: Any) -> str:
    """JSON as it is, unlike jinja2's own filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **kw)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
