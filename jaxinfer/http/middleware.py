"""What happens to every request before an endpoint sees it: its name, and the API key."""

import hmac
import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.protocol import ApiError

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN_PATHS = ("/health", "/ready", "/metrics")


def error_response(error: ApiError) -> JSONResponse:
    """The error as an HTTP response."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


class RequestName:
    """Gives every HTTP request a name: the client's `X-Request-Id`, or a new one. The response carries it back.

    The endpoints find it in `scope["state"]["request_name"]`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id")
        valid = asked is None or _NAME.fullmatch(asked) is not None
        name = asked if asked is not None and valid else uuid.uuid4().hex
        scope.setdefault("state", {})["request_name"] = name
        named_send = _with_header(send, name)
        if valid:
            await self._app(scope, receive, named_send)
            return
        message = "X-Request-Id: expected 1 to 128 letters, digits, dots, colons, underscores or hyphens"
        response = error_response(ApiError(400, message, param="X-Request-Id"))
        await response(scope, receive, named_send)


def _with_header(send: Send, name: str) -> Callable[[Message], Awaitable[None]]:
    async def named_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Request-Id"] = name
        await send(message)

    return named_send


class ApiKey:
    """Asks for `Authorization: Bearer KEY` on all paths but those that monitoring needs."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), self._expected):
                message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
                response = error_response(ApiError(401, message, code="invalid_api_key"))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
