"""Deadline of the calls that wait for the engine's thread.

One timer per event loop looks at the engine's signs of life while calls wait. A step that never
ends, such as one on a hung device, then fails every call instead of blocking the run for ever.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, TypeVar

from ..processes.deadline import Deadline, Pulse
from .generator import GeneratorClosed

T = TypeVar("T")


class EngineGuard:
    """Fails the calls of a silent engine.

    Args:
        pulse: signs of life of the engine's thread.
        deadline: longest silence. None: calls wait for ever.
    """

    def __init__(self, pulse: Pulse, deadline: Deadline | None) -> None:
        self._pulse = pulse
        self._deadline = deadline
        self._waiting: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float | None:
        """Seconds until the engine misses its deadline if it stays silent. None: no deadline."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline.seconds - self._pulse.silence)

    async def answer(self, result: asyncio.Future[T]) -> T:
        """Wait for a future of this event loop. It fails if the engine is silent for too long.

        Raises:
            NoAnswer: if the engine misses its deadline.
        """
        if self._deadline is None:
            return await result
        self._waiting.add(result)
        loop = result.get_loop()
        if self._timer is None or self._timer.cancelled() or len(self._waiting) == 1:
            self._set(loop)
        try:
            return await result
        finally:
            self._waiting.discard(result)

    async def outcome(self, future: Future[T]) -> T:
        """Wait as `answer` does, for a future that the engine's thread sets."""
        wrapped = asyncio.wrap_future(future)
        result: asyncio.Future[T] = wrapped.get_loop().create_future()
        wrapped.add_done_callback(lambda done: _copy(done, result))
        try:
            return await self.answer(result)
        finally:
            if not wrapped.done():
                wrapped.cancel()

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer to the moment at which the engine misses its deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(self.left or 0.0, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        # Calls that an earlier event loop left behind cannot be failed from this one.
        waiting = [call for call in self._waiting if call.get_loop() is loop and not call.done()]
        if self._deadline is None or not waiting:
            return
        if self.left:
            self._set(loop)
            return
        for call in waiting:
            call.set_exception(self._deadline.missed())


def _copy(done: asyncio.Future[T], result: asyncio.Future[T]) -> None:
    """Copy the outcome of one future to another, unless the caller has stopped waiting."""
    if result.done():
        if not done.cancelled():
            done.exception()  # otherwise asyncio reports an exception that was never retrieved
    elif done.cancelled():
        result.cancel()
    elif error := done.exception():
        result.set_exception(error)
    else:
        result.set_result(done.result())


def ended(done: Future[None]) -> None:
    """Set the result, unless the caller has stopped waiting."""
    if done.set_running_or_notify_cancel():
        done.set_result(None)


def fail(done: Future[T], error: GeneratorClosed) -> None:
    """Set the error, unless the caller has stopped waiting."""
    if not done.done() and done.set_running_or_notify_cancel():
        done.set_exception(error)
