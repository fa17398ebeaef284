"""The async checks of a process: they run concurrently in the event loop of async rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from .checks import Check, Outcome, run_async_check
from .rewards import RewardFunction
from .values import reward_loop

ALIVE_S = 0.25


class AsyncChecks:
    """Runs async checks and answers each as soon as it is done. Every check gets one answer.

    Args:
        timeout_s: maximum seconds per check.
        answer: called with a ticket and the outcome, in the thread of the event loop.
        unused: called in that thread when no check is running, before the last answer.
        alive: called in that thread at short intervals while checks run that time themselves: they
            may wait longer than `timeout_s`.
    """

    def __init__(
        self,
        timeout_s: float,
        answer: Callable[[int, Outcome], None],
        unused: Callable[[], None],
        alive: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._answer = answer
        self._unused = unused
        self._alive = alive
        self._waiting: set[int] = set()  # tickets of checks that time themselves
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, ticket: int, function: RewardFunction, check: Check) -> None:
        """Start a check. Any thread may call this."""
        reward_loop().call_soon_threadsafe(self._start, ticket, function, check)

    def cancel(self, ticket: int) -> None:
        """Cancel a check if it is still running. It is answered with an error."""
        reward_loop().call_soon_threadsafe(self._cancel, ticket)

    def _start(self, ticket: int, function: RewardFunction, check: Check) -> None:
        self._tasks[ticket] = asyncio.ensure_future(self._run(ticket, function, check))
        if function.times_itself:
            self._waiting.add(ticket)
            if self._timer is None:
                self._show_life()

    def _show_life(self) -> None:
        self._timer = None
        if self._waiting:
            with suppress(BrokenPipeError):  # the parent is gone
                self._alive()
            self._timer = asyncio.get_running_loop().call_later(ALIVE_S, self._show_life)

    def _cancel(self, ticket: int) -> None:
        if ticket in self._tasks:
            self._tasks[ticket].cancel()

    async def _run(self, ticket: int, function: RewardFunction, check: Check) -> None:
        try:
            outcome = await run_async_check(function, check, self._timeout_s)
        except asyncio.CancelledError:
            outcome = Outcome([], "cancelled", 0.0, "raised")
        del self._tasks[ticket]
        self._waiting.discard(ticket)
        if not self._tasks:
            self._unused()
        with suppress(BrokenPipeError):  # the parent is gone
            self._answer(ticket, outcome)
