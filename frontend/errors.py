"""What goes wrong with a request, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

_TYPES = {
    429: "rate_limit_error",
    503: "service_unavailable",
    500: "server_error",
    501: "server_error",
    502: "server_error",
}


class ApiError(Exception):
    """An answer that is an error. `param` is the field that is wrong, `retry_after` whole seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after)} if self.retry_after else {}


def wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)
