"""JSON requests to a server that samples, for many callers in one event loop.

A cancelled request closes its connection. That tells the server that no caller waits for the answer
any more.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from ..http_client import HttpClient, Reply
from ..rollout.generator import EngineLost, GeneratorClosed, wait_for

SHORT_S = 30.0
LONG_S = 1800.0
"""Time limits: SHORT_S for a status request, LONG_S for a completion or a weight sync."""

BEAT_S, ALIVE_S = 30.0, 120.0
"""A server with an open request of LONG_S is asked every BEAT_S whether it is alive, and counts as
lost if it does not say so within ALIVE_S: it may be stopped, or its machine may be gone.
"""

CONNECTIONS = 128
"""Maximum number of concurrent completions. Others wait, in the order of their priorities."""

REACH_S = 1.0
"""Time between two attempts to reach a lost server."""

_SAID = 500  # characters of the server's answer in an error message


class Refused(Exception):
    """The server answered with an error status.

    Attributes:
        status: HTTP status.
        said: the beginning of the answer.
    """

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said


class JsonServer:
    """Client of the server at `url`.

    Args:
        name: name of the program, for messages.
        url: address of the server.
        start: command that starts the server, for messages.
        headers: headers of every request.
    """

    def __init__(
        self, name: str, url: str, start: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._url = url
        self._start = start
        self._headers = dict(headers or {})
        self._client = HttpClient()
        self._slots = Slots(CONNECTIONS)
        self._asked: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout_s: float | None = None,
        priority: int | None = None,
    ) -> Any:
        """Send a request and return the parsed JSON answer, or None if the answer is empty.

        Args:
            method: HTTP method.
            path: path of the request, starting with a slash.
            body: sent as JSON; None for no body.
            timeout_s: longest wait for the answer, in seconds. None: SHORT_S.
            priority: larger values are sent first. None: sent at once, as new weights and
                the probe are.

        Raises:
            EngineLost: the server cannot be reached, or does not answer with JSON in time.
            Refused: the server answers with an error status.
            GeneratorClosed: `close` was called.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._ask(method, path, body, timeout_s or SHORT_S, priority))
        self._asked.add((loop, work))
        try:
            return await work
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            self._asked.discard((loop, work))

    def close(self) -> None:
        """End all requests. They raise GeneratorClosed, and so do later ones."""
        self._closed = True
        for loop, work in list(self._asked):
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(work.cancel)

    def _check_open(self) -> None:
        if self._closed:
            raise GeneratorClosed(f"the connection to {self._name} at {self._url} is closed")

    async def _ask(
        self, method: str, path: str, body: object, timeout_s: float, priority: int | None
    ) -> Any:
        what = f"{method} {path}"
        async with nullcontext() if priority is None else self._slots.slot(priority):
            try:
                async with asyncio.timeout(timeout_s):
                    request = self._client.request(
                        method,
                        f"{self._url}{path}",
                        b"" if body is None else json.dumps(body).encode(),
                        {**self._headers, "Content-Type": "application/json"},
                    )
                    long = timeout_s >= LONG_S
                    status, _, answer = await (self._watched(request) if long else request)
                value = json.loads(answer) if answer and status < 400 else None
            except TimeoutError as error:
                raise EngineLost(
                    f"{self._name} at {self._url} did not answer {what} within {timeout_s:g} s"
                ) from error
            except OSError as error:
                raise EngineLost(
                    f"no {self._name} server at {self._url} ({error}). Start one with {self._start}"
                ) from error
            except ValueError as error:
                raise EngineLost(
                    f"the server at {self._url} did not answer {what} with JSON, so it is not"
                    f" {self._name}: {error}"
                ) from error
        if status >= 400:
            said = answer[:_SAID].decode(errors="replace")
            raise Refused(
                f"{self._name} at {self._url} answered {what} with {status}: {said}", status, said
            )
        return value

    async def _watched(self, request: Coroutine[Any, Any, Reply]) -> Reply:
        """Wait for the answer to a request, as long as the server is alive."""
        work = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait([work], timeout=BEAT_S))[0]:
                with suppress(Refused):  # a sign of life too
                    await self.ask("GET", "/health", timeout_s=ALIVE_S)
            return work.result()
        finally:
            work.cancel()
            await asyncio.wait([work])


def reach(check: Callable[[], Coroutine[Any, Any, None]], patience_s: float) -> None:
    """Wait until a server answers.

    Args:
        check: asks it.
        patience_s: longest wait, in seconds.

    Raises:
        EngineLost: it does not answer.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            return wait_for(check())
        except EngineLost:
            if time.monotonic() >= until:
                raise
        time.sleep(REACH_S)


class Slots:
    """Slots for callers in one event loop at a time.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._asked = 0

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Hold a slot in this block. A caller with a larger priority gets the next free slot."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, priority: int) -> None:
        if self._free:
            self._free -= 1
            return
        self._asked += 1
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, self._asked, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled after the slot was handed over
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
