"""The event loop of a run, in which episodes, reward checks and requests to an engine wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

CLEAN_UP_S = 10.0
"""Most seconds that tasks get to end after they are cancelled. An environment may ignore it."""


class EventLoop:
    """An asyncio event loop that runs one coroutine at a time and stays open between them.

    Coroutines run in the calling thread. If an event loop runs there already, as in a notebook,
    they run in a helper thread while the caller waits.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Result of the coroutine.

        If a signal interrupts the call, all tasks are cancelled and have ended before the exception
        leaves.
        """
        if not _inside_loop():
            return self._run(coroutine)
        with ThreadPoolExecutor(1, "event-loop") as thread:
            done = thread.submit(self._run, coroutine)
            try:
                return done.result()
            except KeyboardInterrupt:
                self._loop.call_soon_threadsafe(self._cancel_all)
                raise

    def close(self) -> None:
        """Cancel what is left and close the loop. A second call does nothing."""
        if self._loop.is_closed():
            return
        if not _inside_loop():
            self._end()
            return
        with ThreadPoolExecutor(1, "event-loop") as thread:
            thread.submit(self._end).result()

    def _end(self) -> None:
        self._clean_up()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run_until_complete(coroutine)
        except (KeyboardInterrupt, SystemExit):
            # A signal handler raised inside the loop: the tasks were not told.
            self._clean_up()
            raise

    def _clean_up(self) -> None:
        """Cancel all tasks and wait for them.

        The wait has a limit: the signal may have hit the loop while it was waking a task, which
        then never ends.
        """
        if tasks := self._cancel_all():
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLEAN_UP_S))

    def _cancel_all(self) -> set[asyncio.Task[Any]]:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            if not task.cancelling():  # a second time would interrupt what it frees
                task.cancel()
        return tasks


def _inside_loop() -> bool:
    """True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
