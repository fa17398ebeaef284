"""A thread for the blocking calls of one environment."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_SLOTS = threading.BoundedSemaphore(8)
"""Calls that run at once. Hundreds of running threads would take turns with the engine's, and with
the event loop. A call that has waited `SLOT_S` runs without a slot, so calls that wait, or hang, do
not hold up others.
"""

SLOT_S = 0.1


class OwnThread:
    """A thread that runs the calls of one environment, one after another.

    The event loop goes on meanwhile. All calls are in one thread because some environments keep
    connections or windows that belong to a thread. A call that hangs keeps only this thread. The
    thread is a daemon, so it does not hold up the end of the process.
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
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
        loop.call_soon_threadsafe(function, *arguments)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future refuses it
        error = RuntimeError(f"StopIteration: {error}")
    future.set_exception(error)
