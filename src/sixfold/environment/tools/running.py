"""Run a tool's function within a time limit, without blocking the event loop.

A function that is not async runs in a thread. A thread cannot be stopped from outside, so a
function that ignores its time limit keeps its slot until it returns. The number of slots is
bounded. Results become text, and errors a message, in a thread too: both run code of the user.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from ...errors import is_fault, one_line
from ...user_code import calling
from .observation import ToolError, ToolsFailed, result_text
from .tool import Tool

_Outcome = tuple[str, ToolError | ToolsFailed | None]
"""Result of a call as text, and how the call failed."""


class Slots:
    """Bound on concurrent calls, over all episodes and event loops that share the object.

    Args:
        count: maximum number of calls that run at the same time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._used = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def take(self, limit: float) -> None:
        """Wait for a slot.

        Raises:
            ToolError: no slot is free within `limit` seconds.
        """
        with self._lock:
            if self._used < self._count:
                self._used += 1
                return
            loop = asyncio.get_running_loop()
            free = loop.create_future()
            self._waiting.append((loop, free))
        try:
            await asyncio.wait((free,), timeout=limit)
        except asyncio.CancelledError:
            self._leave(free)
            raise
        if not free.done():
            self._leave(free)
            problem = f"all {self._count} calls that may run at once are still running"
            raise ToolError(problem, "busy")

    def give(self) -> None:
        """Release a slot. The oldest waiting call takes it over. Thread-safe."""
        with self._lock:
            while self._waiting:
                loop, free = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(_hand_over, free, self)
                except RuntimeError:  # its event loop has been closed
                    continue
                return
            self._used -= 1

    def _leave(self, free: asyncio.Future[None]) -> None:
        """Stop waiting. If the slot has been handed over already, release it."""
        if not free.cancel():
            self.give()
            return
        with self._lock:
            self._waiting = deque(one for one in self._waiting if one[1] is not free)


def _hand_over(free: asyncio.Future[None], slots: Slots) -> None:
    """Give a slot to a waiting call, or to the next one if that call has stopped waiting."""
    if free.done():
        slots.give()
    else:
        free.set_result(None)


class Call:
    """One call of a tool.

    Args:
        slots: bound on concurrent calls.

    Attributes:
        runs: True from the start of the function until it returns.
    """

    def __init__(self, tool: Tool, values: Mapping[str, Any], slots: Slots) -> None:
        self._tool = tool
        self._values = values
        self._slots = slots
        self.runs = False

    async def result(self, limit: float) -> str:
        """Result of the function as text (`result_text`).

        Args:
            limit: seconds, including the wait for a slot.

        Raises:
            ToolError: the time limit has passed, the function raised an error, or its result has
                no text form.
            ToolsFailed: the function raised it.
        """
        begun = time.monotonic()
        await self._slots.take(limit)
        self.runs = True
        running = self._task() if self._tool.is_async else self._thread()
        left = max(0.0, limit - (time.monotonic() - begun))
        try:
            done, _ = await asyncio.wait((running,), timeout=left)
        finally:
            running.cancel()  # stops an async function; a thread continues
        if not done:
            raise ToolError(f"the tool took longer than {limit:g} s", "timeout")
        if running.cancelled():
            raise ToolError("the tool cancelled itself")
        result, error = running.result()
        if error is not None:
            raise error
        return result

    def _end(self) -> None:
        self.runs = False
        self._slots.give()

    def _task(self) -> asyncio.Future[_Outcome]:
        task = asyncio.ensure_future(_awaited(self._tool.function, self._values))
        task.add_done_callback(lambda _: self._end())
        return task

    def _thread(self) -> asyncio.Future[_Outcome]:
        return _in_thread(partial(self._tool.function, **self._values), self._end)


def _in_thread(
    call: Callable[[], Any], ended: Callable[[], None] = lambda: None
) -> asyncio.Future[_Outcome]:
    """Make a call and convert its result in a new thread.

    Args:
        call: returns the result, or raises.
        ended: called in the thread after that.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Outcome] = loop.create_future()

    def work() -> None:
        outcome = _outcome(call)
        ended()
        with suppress(RuntimeError):  # the loop has been closed: the run has ended
            loop.call_soon_threadsafe(_settle, done, outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return done


def _outcome(call: Callable[[], Any]) -> _Outcome:
    try:
        with calling():
            return result_text(call()), None
    except (ToolError, ToolsFailed) as error:
        return "", error
    except BaseException as error:  # noqa: BLE001  boundary: it belongs to the call
        return "", ToolError(one_line(error))


async def _awaited(function: Callable[..., Any], values: Mapping[str, Any]) -> _Outcome:
    """Outcome of an async function. A `sys.exit` in it must not end the event loop."""
    try:
        given = await function(**values)
    except BaseException as error:  # boundary: it belongs to the call
        if not is_fault(error):
            raise
        return await _in_thread(partial(_raised, error))
    return await _in_thread(lambda: given)


def _raised(error: BaseException) -> NoReturn:
    raise error


def _settle(done: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not done.done():
        done.set_result(outcome)
