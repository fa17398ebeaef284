"""ASGI middleware: checks the Host header and the API key, and counts answers."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Set

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_error import ApiError
from .hosts import AllowedHosts


class Gate:
    """Refuses requests with a foreign Host header or a wrong API key, and counts all answers.

    Args:
        paths: the application's paths. Other paths are counted together: otherwise each would be a
            separate time series in the metrics.
        key: the API key, or "" for none.
        hosts: allowed names in the Host header, or None to allow all.
        answers: (path, status) -> number of answers. It is updated.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Set[str],
        key: str,
        hosts: AllowedHosts | None,
        answers: Counter[tuple[str, int]],
    ) -> None:
        self._app = app
        self._paths = paths
        self._key = key.encode()
        self._hosts = hosts
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the start and end of the server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[path, message["status"]] += 1
            await send(message)

        error = self._refusal(scope)
        app: ASGIApp = self._app if error is None else as_response(error)
        await app(scope, receive, count)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._hosts is not None and not self._hosts.admits(scope["headers"]):
            message = (
                "the Host header names another machine. Use 127.0.0.1 or localhost, or start the"
                " server with --allow-host NAME"
            )
            return ApiError(403, message, code="host_not_allowed")
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        known = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)
        if self._key and scope["path"] != "/health" and not known:
            return ApiError(401, "wrong or missing API key", code="invalid_api_key")
        return None


def as_response(error: ApiError) -> Response:
    """The HTTP response for an error."""
    return JSONResponse(error.body, status_code=error.status, headers=dict(error.headers or {}))
