"""Connections: the listening socket, and a time limit for the headers of a request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

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


class BoundedHeaders(H11Protocol):
    """Closes connections whose headers do not arrive in time. uvicorn would wait forever.

    uvicorn already limits the size of the headers (16 KiB) and the wait between two requests.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
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
