"""Reading of JSON bodies: every field is taken once with its type checked, and what is left over is an error."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields

from jaxinfer.engine.request import SamplingParams
from jaxinfer.protocol.errors import bad_request

MAX_SAMPLES = 128
"""Largest `n`: OpenAI's limit. Each sample is a sequence of its own in the engine."""

MAX_STOP_STRINGS = 64


def load_json(data: bytes) -> object:
    """Decodes a JSON text (UTF-8). Raises ApiError (400) for anything that RFC 8259 does not allow, NaN included."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise bad_request("the body is not usable JSON: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def describe(value: object) -> str:
    """A short account of a value for an error message: its JSON type, and the value itself where that is short."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {value}" if abs(value) < 1e18 else "a very large number"
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else f"a string of {len(value)} characters"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} keys"
    return f"an array of {len(value)} elements" if isinstance(value, Sequence) else type(value).__name__


def check_text(name: str, value: object) -> str:
    """`value` as text. A lone surrogate, which JSON can spell and UTF-8 cannot, is refused here."""
    if not isinstance(value, str):
        raise bad_request(f"{name}: expected a string, got {describe(value)}", param=name)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_request(f"{name}: the text is not valid Unicode: {error.reason}", param=name) from None
    return value


def is_integer(value: object) -> bool:
    """Whether `value` is a JSON integer (`true` and `false` are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """The fields of one JSON object. A field that is absent or null has its default."""

    def __init__(self, body: object, where: str = "") -> None:
        """`where` is the path of the object inside the body, for messages: "" or such as "messages[2]"."""
        if not isinstance(body, dict):
            raise bad_request(
                f"{where or 'the body'}: expected a JSON object, got {describe(body)}", param=where or None
            )
        self._left: dict[str, object] = dict(body)
        self._prefix = f"{where}." if where else ""

    def path(self, name: str) -> str:
        """The field's name as seen from the top of the body."""
        return self._prefix + name

    def take(self, name: str) -> object:
        """The value as it is; None when absent."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        return None if value is None else check_text(self.path(name), value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """An integer in [low, high]."""
        value = self.take(name)
        if value is None:
            return None
        expected = (
            "an integer" + (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
        )
        # 1.0 is an integer in JSON Schema's sense, and some clients write it so.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, expected, value)
        if (low is not None and value < low) or (high is not None and value > high):
            raise self._wrong(name, expected, value)
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e18 or math.isnan(value):
            raise self._wrong(name, "a number", value)
        return float(value)

    def strings(self, name: str, limit: int) -> tuple[str, ...]:
        """A string or an array of at most `limit` strings; none of them empty."""
        value = self.take(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if len(items) > limit:
            raise self._wrong(name, f"at most {limit} strings", value)
        texts = tuple(check_text(self.path(name), item) for item in items)
        if "" in texts:
            raise bad_request(f"{self.path(name)}: an empty string is not allowed", param=self.path(name))
        return texts

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An array of integers."""
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(is_integer(item) for item in value):
            raise self._wrong(name, "an array of token ids", value)
        return tuple(value)

    def mapping(self, name: str) -> "Fields | None":
        """A nested object."""
        value = self.take(name)
        return None if value is None else Fields(value, self.path(name))

    def fixed(self, name: str, *allowed: object, why: str) -> None:
        """A field of the API that this server has no use for: only null and the `allowed` values pass."""
        value = self.take(name)
        if value is None or any(type(value) is type(item) and value == item for item in allowed):
            return
        raise bad_request(
            f"{self.path(name)}: {why}; got {describe(value)}", param=self.path(name), code="unsupported_value"
        )

    def end(self) -> None:
        """Raises ApiError (400) naming every field that nothing has taken."""
        if self._left:
            names = ", ".join(sorted(self.path(name) for name in self._left))
            plural = "s" if len(self._left) > 1 else ""
            first = self.path(min(self._left))
            raise bad_request(f"unknown field{plural}: {names}", param=first, code="unknown_field")

    def _wrong(self, name: str, expected: str, value: object) -> Exception:
        path = self.path(name)
        return bad_request(f"{path}: expected {expected}, got {describe(value)}", param=path, code="invalid_type")


def take_sampling(
    fields: Fields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Takes the sampling fields that both endpoints share (vLLM's extra ones included).

    `max_tokens`, `logprobs` and `prompt_logprobs` differ between the endpoints, and so come from the caller.
    Raises ApiError (400) with the field and the reason.
    """
    numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    given: dict[str, object] = {name: fields.number(name) for name in numbers}
    given |= {
        "n": fields.integer("n", 1, MAX_SAMPLES),
        "top_k": fields.integer("top_k"),
        "min_tokens": fields.integer("min_tokens"),
        "seed": fields.integer("seed"),
        "stop": fields.strings("stop", MAX_STOP_STRINGS),
        "stop_token_ids": fields.token_ids("stop_token_ids"),
        "ignore_eos": fields.boolean("ignore_eos"),
        "logit_bias": _take_logit_bias(fields),
    }
    # Those of vLLM's fields that cannot be had: clients send their defaults, which are what happens here.
    fields.fixed("skip_special_tokens", True, why="special tokens are never shown in the text")
    fields.fixed("spaces_between_special_tokens", True, why="special tokens are never shown in the text")
    fields.fixed("include_stop_str_in_output", False, why="the text ends before the stop string")
    fields.fixed("truncate_prompt_tokens", why="prompts are never truncated")
    fields.fixed("use_beam_search", False, why="beam search is not supported")
    fields.fixed("length_penalty", 1, 1.0, why="beam search is not supported")
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        param = next((f.name for f in dataclass_fields(SamplingParams) if f"expected {f.name}" in str(error)), None)
        raise bad_request(str(error), param=param) from None


def _take_logit_bias(fields: Fields) -> dict[int, float] | None:
    """`{"token id": bias in [-100, 100]}`; JSON spells the ids as strings."""
    value = fields.take("logit_bias")
    if value is None:
        return None
    path = fields.path("logit_bias")
    if not isinstance(value, dict):
        raise bad_request(f"{path}: expected an object from token ids to numbers, got {describe(value)}", param=path)
    bias: dict[int, float] = {}
    for key, item in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise bad_request(f"{path}: expected token ids as keys, got {describe(key)}", param=path)
        if isinstance(item, bool) or not isinstance(item, int | float) or not -100 <= item <= 100:
            raise bad_request(f"{path}[{key}]: expected a number from -100 to 100, got {describe(item)}", param=path)
        bias[int(key)] = float(item)
    return bias or None


def take_stream_options(fields: Fields, stream: bool) -> bool:
    """Takes `stream_options`; returns whether the usage is wanted in a last chunk."""
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not stream:
        raise bad_request("stream_options: only allowed with stream=true", param="stream_options")
    include_usage = options.boolean("include_usage")
    # Padding against traffic analysis; what it asks for when false is what this server does.
    options.fixed("include_obfuscation", False, why="obfuscation of streams is not supported")
    options.fixed("continuous_usage_stats", False, why="the usage comes once, in the last chunk")
    options.end()
    return include_usage


def take_ignored(fields: Fields) -> None:
    """Takes the fields of OpenAI's API that serve its accounting only and carry no wish for the answer."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.text(name)
