"""OpenAI's request and response bodies, checked and built with the standard library alone.

`python -m jaxinfer.serve` and `python -m jaxinfer.batch` share it: `parse_call(url, body)` turns a decoded JSON body
into a `Call`; the call encodes its prompts, builds the response body, and makes the chunks of a streamed answer.
"""

from jaxinfer.protocol.call import Call, Prompt, Stream
from jaxinfer.protocol.chat import ChatCall
from jaxinfer.protocol.completions import CompletionCall
from jaxinfer.protocol.errors import ApiError
from jaxinfer.protocol.fields import load_json

ENDPOINTS: dict[str, type[Call]] = {"/v1/completions": CompletionCall, "/v1/chat/completions": ChatCall}


def parse_call(url: str, body: object) -> Call:
    """Checks a decoded JSON `body` sent to `url` (a key of `ENDPOINTS`). Raises ApiError (400) naming what is wrong."""
    return ENDPOINTS[url].parse(body)


__all__ = ["ENDPOINTS", "ApiError", "Call", "ChatCall", "CompletionCall", "Prompt", "Stream", "load_json", "parse_call"]
