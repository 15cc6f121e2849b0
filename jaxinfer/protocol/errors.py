"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that is answered with an error: HTTP `status`, what is wrong, the field at fault and a stable code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)
