"""Connections: the listening socket, a time limit for the headers of a request, and their log."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Time limit for the headers of a request, from the connection or from their first byte."""


def listener(host: str, port: int) -> socket.socket:
    """Make a listening socket with TCP_NODELAY.

    asyncio sets this option only on sockets with an explicit protocol number, which the sockets of
    `socket.create_server` lack. Without it, Nagle's algorithm would delay each answer by 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.create_server((host, port), family=family, backlog=2048)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return made


class _NotStopped(logging.Filter):
    """Drops the errors of requests that end because the server stops. They are no failures."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for the record of a request that was cancelled or interrupted by a signal."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, asyncio.CancelledError | KeyboardInterrupt)


_STOPPED = _NotStopped()


class BoundedHeaders(H11Protocol):
    """Closes connections whose headers do not arrive in time. uvicorn would wait forever.

    uvicorn already limits the size of the headers (16 KiB) and the wait between two requests.
    Unlike uvicorn, it logs no traceback for a request that ends because the server stops.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        level = self.logger.level  # uvicorn reads the level of the logger itself
        self.logger = self.logger.getChild("requests")
        self.logger.setLevel(level)
        self.logger.addFilter(_STOPPED)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the headers of the first request."""
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Stop the timer if a request is being answered, otherwise make sure that it runs.

        Other data are incomplete headers, or the rest of a refused body.
        """
        super().data_received(data)
        if self._answering:
            self._stop_clock()
        elif self._deadline is None:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_clock()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self._answering:
            self.transport.close()


class Interruptible:
    """ASGI middleware: a signal that arrives in a handler leaves the event loop.

    It is for a server that does not handle signals itself. uvicorn treats every exception of an
    application as a failed request, even KeyboardInterrupt, so the signal would be lost.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            await self._app(scope, receive, send)
        except (KeyboardInterrupt, SystemExit) as signal:
            # Also while the task is being cancelled: the end of a streamed reply does that too. If
            # the run is being stopped by this signal, `EventLoop` ignores it the second time.
            asyncio.get_running_loop().call_soon(_throw, signal)
            raise


def _throw(error: BaseException) -> None:
    """Raise an exception. A callback's KeyboardInterrupt leaves the event loop."""
    raise error
