"""Errors in OpenAI's format: status, message, type, param, code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """Error answer to a client.

    Args:
        message: text for the user.
        param: field of the request that is wrong, if any.
        code: machine-readable name of the error.
        headers: further HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON in OpenAI's format."""
        kind = (
            "rate_limit_error"
            if self.status == 429
            else "server_error"
            if self.status >= 500
            else "invalid_request_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error with status 400. The arguments are those of `ApiError`."""
    return ApiError(400, message, param=param, code=code)
