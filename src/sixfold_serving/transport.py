"""HTTP parts that all servers share: request bodies, disconnects, stream events, error answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .api_error import ApiError
from .bounds import BodyReader, parse_body, shortened
from .gate import as_response

T = TypeVar("T")

BODY_SECONDS = 30.0
"""Time limit for the arrival of a body."""
CLIENT_GONE = 499
"""Status in the metrics for a request whose client disconnected. It is never sent."""


class Bodies:
    """Reads and parses the bodies of requests.

    Attributes:
        limiter: at most two threads parse at the same time.
    """

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(2)
        self._reader = BodyReader()

    async def json(self, request: Request) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            ApiError: the body is not a JSON object, is too large, or arrives too slowly.
        """
        # This is also a security check: a web page that the user visits can post text to a loopback
        # server without the user's permission, but not JSON.
        if (
            request.headers.get("content-type", "").partition(";")[0].strip().lower()
            != "application/json"
        ):
            raise ApiError(
                415,
                "the body must be JSON: send the header 'content-type: application/json'",
                code="unsupported_media_type",
            )
        try:
            async with asyncio.timeout(BODY_SECONDS):
                raw = await self._reader.read(request)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not arrive within {BODY_SECONDS:g} s. Send the request again"
            ) from error
        # In another thread: parsing on the event loop would pause every stream.
        return await run_sync(parse_body, raw, limiter=self.limiter)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for the result of `work`. Raises ClientDisconnect if the client disconnects first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def server_sent(data: Mapping[str, Any]) -> str:
    """Format a server-sent event. Its name is the data's "type", if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, allow_nan=False, ensure_ascii=False)}\n\n"


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return as_response(error)


async def _http_refusal(request: Request, error: Exception) -> Response:
    """Answer for Starlette's own errors: unknown path or wrong method."""
    assert isinstance(error, HTTPException)
    path = shortened(request.url.path)
    message = (
        f"path not found: {request.method} {path}{_hint(path, request.app.routes)}"
        if error.status_code == 404
        else f"{request.method} is not allowed on {path}"
    )
    return as_response(ApiError(error.status_code, message, headers=error.headers))


def _hint(path: str, routes: Sequence[Route]) -> str:
    """Hint for the likeliest mistakes: a wrong base URL, or a reward model taken for a policy."""
    known = ("/chat/completions", "/completions", "/models", "/responses")
    end = next((name for name in known if path.rstrip("/").endswith(name)), None)
    if not end:
        return ""
    if any(route.path.endswith(f"/v1{end}") for route in routes):
        return f". Did you mean /v1{end}? The base URL of this server ends with /v1"
    return f". This server has {', '.join(route.path for route in routes)}"


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _bug(request: Request, error: Exception) -> Response:
    return as_response(ApiError(500, "internal error: see the server's log"))


ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _refusal,
    HTTPException: _http_refusal,
    ClientDisconnect: _gone,
    Exception: _bug,
}
"""Error class -> the function that answers it."""
