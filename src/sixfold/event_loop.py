"""The event loop of a run, in which episodes, reward checks and requests to an engine wait."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("sixfold.event_loop")

CLEAN_UP_S = 10.0
"""Longest wait for cancelled tasks to end, in seconds. An environment may ignore a cancellation."""

BLOCKED_S = 10.0
"""Seconds for which code may block the event loop before a warning names it."""


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

    def stop(self) -> None:
        """Let no task run between calls of `run` from now on."""

    def close(self) -> None:
        """Cancel all remaining tasks and close the loop. A second call does nothing."""
        if self._loop.is_closed():
            return
        if not _inside_loop():
            self._end()
            return
        with ThreadPoolExecutor(1, "event-loop") as thread:
            thread.submit(self._end).result()

    def _end(self) -> None:
        self._clean_up()
        with suppress(TimeoutError):
            self._loop.run_until_complete(
                asyncio.wait_for(self._loop.shutdown_asyncgens(), CLEAN_UP_S)
            )
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            with _watch(self._loop):
                return self._loop.run_until_complete(coroutine)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            # A signal handler raised inside the loop: the tasks were not told.
            self._clean_up(interrupt)
            raise

    def _clean_up(self, interrupt: BaseException | None = None) -> None:
        """Cancel all tasks and wait for them.

        The wait has a limit: the signal may have hit the loop while it was waking a task, which
        then never ends.

        Args:
            interrupt: what a signal handler raised. Tasks that wait for the one in which it was
                raised raise it again, which does not end the wait.
        """
        if not (tasks := self._cancel_all()):
            return
        waiting = self._loop.create_task(asyncio.wait(tasks, timeout=CLEAN_UP_S))
        while not waiting.done():
            try:
                self._loop.run_until_complete(waiting)
            except (KeyboardInterrupt, SystemExit) as raised:
                if raised is not interrupt:
                    raise
        for task in tasks:
            if interrupt and task.done() and not task.cancelled():
                task.exception()  # asyncio reports an exception that nobody has read

    def _cancel_all(self) -> set[asyncio.Task[Any]]:
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in tasks:
            if not task.cancelling():  # a second time would interrupt what it frees
                task.cancel()
        return tasks


class BackgroundLoop(EventLoop):
    """An event loop in a thread of its own, so tasks go on while the caller does other work.

    If a signal interrupts `run`, all tasks are cancelled, as in `EventLoop.run`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._serve, name="event-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            return super().run(coroutine)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except KeyboardInterrupt:
            asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result()
            raise

    def stop(self) -> None:
        """Cancel all tasks and end the thread. Later coroutines run as in an `EventLoop`."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def close(self) -> None:
        """Cancel all remaining tasks and close the loop. A second call does nothing."""
        self.stop()
        super().close()

    async def _end_tasks(self) -> None:
        if tasks := self._cancel_all():
            await asyncio.wait(tasks, timeout=CLEAN_UP_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        with _watch(self._loop):
            self._loop.run_forever()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine, which runs in an event loop of its own in this thread.

    It also works inside a running event loop, such as that of a notebook. That loop stands still
    meanwhile.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        # With a factory, the runner does not change the thread's current event loop.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    finally:
        asyncio._set_running_loop(outer)


@contextmanager
def _watch(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Context in which a thread watches an event loop, and reports code that blocks it.

    Args:
        loop: the event loop. It must run in the thread that enters the context.
    """
    ended, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not ended.wait(BLOCKED_S / 10):
            answered, asked, told = threading.Event(), time.monotonic(), False
            loop.call_soon_threadsafe(answered.set)
            while not (answered.wait(BLOCKED_S / 100) or ended.is_set()):
                if not told and time.monotonic() - asked > BLOCKED_S:
                    told = True
                    _report(sys._current_frames().get(thread))

    watcher = threading.Thread(target=watch, name="event-loop-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _report(frame: FrameType | None) -> None:
    """Log a warning that names the code which blocks the event loop."""
    log.warning(
        "%s has blocked all episodes for %g s: nothing else can go on meanwhile. In an environment,"
        " await asyncio.sleep or asyncio.to_thread(function); name a slow reward as"
        " module:function",
        _place(frame),
        BLOCKED_S,
    )


def _place(frame: FrameType | None) -> str:
    """File, line and function of the innermost frame that is not in the standard library."""
    library, innermost = sysconfig.get_path("stdlib"), frame
    while frame is not None and frame.f_code.co_filename.startswith((library, "<")):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "a function"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _inside_loop() -> bool:
    """True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
