"""The event loop of a run, in which episodes, reward checks and requests to an engine wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

CLEAN_UP_S = 10.0
"""Most seconds that the tasks of an interrupted call get to end."""


class EventLoop:
    """An asyncio event loop that runs one coroutine at a time and stays open between them.

    Coroutines run in the calling thread. If an event loop runs there already, as in a notebook,
    they run in a helper thread while the caller waits.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Result of the coroutine.

        If a signal interrupts the call, all of its tasks are cancelled and end before the exception
        leaves.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._run(coroutine)
        with ThreadPoolExecutor(1, "event-loop") as thread:
            done = thread.submit(self._run, coroutine)
            try:
                return done.result()
            except KeyboardInterrupt:
                self._runner.get_loop().call_soon_threadsafe(self._cancel_all)
                raise

    def close(self) -> None:
        """Cancel what is left and close the loop. A second call does nothing."""
        self._runner.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(coroutine)
        except (KeyboardInterrupt, SystemExit):
            # A signal handler raised inside the loop: the tasks were not told.
            if tasks := self._cancel_all():
                # With a limit: the signal may have hit the loop while it was waking a task, which
                # then never ends.
                loop = self._runner.get_loop()
                loop.run_until_complete(asyncio.wait(tasks, timeout=CLEAN_UP_S))
            raise

    def _cancel_all(self) -> set[asyncio.Task[Any]]:
        tasks = asyncio.all_tasks(self._runner.get_loop())
        for task in tasks:
            task.cancel()
        return tasks
