"""A thread for the blocking calls of one environment."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import one_line
from ..user_code import calling

T = TypeVar("T")

_SLOTS = threading.BoundedSemaphore(8)
"""Bound on concurrent calls.

Hundreds of running threads would slow down the engine's thread and the event loop. A call that has
waited `SLOT_S` runs without a slot, so that slow and hanging calls do not block others.
"""

SLOT_S = 0.1
"""Seconds that a call waits for a slot."""


class OwnThread:
    """A thread that runs the blocking calls of one environment, one after the other.

    The event loop is not blocked. All calls run in the same thread, because some environments hold
    connections or windows that belong to a thread. A call that hangs blocks only this thread. The
    thread is a daemon, so it does not delay the end of the process.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Result of `function(*arguments)`, called in the thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            has_slot = _SLOTS.acquire(timeout=SLOT_S)
            try:
                with calling():
                    result = function(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                _tell(loop, _fail, future, error)
            else:
                _tell(loop, _succeed, future, result)
            finally:
                if has_slot:
                    _SLOTS.release()

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
            self._thread.start()
        self._calls.put(work)
        return await future

    def end(self) -> None:
        """End the thread after its queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
        loop.call_soon_threadsafe(function, *arguments)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        # A future does not accept the first. The others would end the event loop and the run:
        # a thread never sees Ctrl-C, so the environment has raised them.
        error = RuntimeError(one_line(error))
    future.set_exception(error)
