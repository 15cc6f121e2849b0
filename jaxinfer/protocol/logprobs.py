"""Log-probabilities in the three forms that clients know: chat, completions, and vLLM's `prompt_logprobs`."""

import codecs
from collections.abc import Sequence

from jaxinfer.engine.request import Logprob, TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot spell (OpenAI's own convention)."""


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LOWEST)


def _key(token: Logprob) -> str:
    """A text that tells the token from others: its own, its bytes if it is a part of a character (OpenAI's spelling),
    its id for a model without tokenizer (vLLM's)."""
    if not token.token_bytes:
        return f"token_id:{token.token_id}"
    try:
        return token.token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _chat_entry(token: Logprob) -> dict[str, object]:
    return {"token": token.text, "logprob": _value(token), "bytes": list(token.token_bytes)}


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """The `logprobs` object of a chat choice."""
    content = [_chat_entry(t.chosen) | {"top_logprobs": [_chat_entry(top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds the `logprobs` objects of a completion choice; offsets go on from one chunk of a stream to the next."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, tokens: Sequence[TokenLogprobs | Logprob], text: str) -> dict[str, object]:
        """The object for the next tokens, which come with this text. A bare `Logprob` stands for the first token of an
        echoed prompt, which nothing has scored; it may be a bos token, which is not in the text.

        `text_offset` is in characters of the choice's text. `top_logprobs` holds the sampled token too, so it may have
        one entry more than was asked for.
        """
        offsets: list[int] = []
        chosen = [token if isinstance(token, Logprob) else token.chosen for token in tokens]
        for token in chosen:
            offsets.append(self._offset)
            if token is not tokens[0] or text.startswith(token.text):
                self._offset += len(self._utf8.decode(token.token_bytes))
        scored = [None if isinstance(token, Logprob) else token for token in tokens]
        return {
            "tokens": [_key(token) for token in chosen],
            "token_logprobs": [None if t is None else _value(t.chosen) for t in scored],
            "top_logprobs": [None if t is None else {_key(x): _value(x) for x in [*t.top, t.chosen]} for t in scored],
            "text_offset": offsets,
        }


def prompt_logprobs(tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: per prompt token an object from ids to log-probabilities; null for the first."""
    return [
        None if token is None else {str(x.token_id): _ranked(x) for x in [*token.top, token.chosen]} for token in tokens
    ]


def _ranked(token: Logprob) -> dict[str, object]:
    return {"logprob": _value(token), "rank": token.rank, "decoded_token": _key(token)}
