"""Agents that are Python functions of a task and a base URL."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from ..environment.named import Named
from ..errors import UserError, one_line
from ..rollout.environment_fault import EnvironmentFault
from ..types import Task

AGENTS = Named("agent", "function", {})

LEFT = 64
"""Most calls that may still run after their time limit."""

_FORM = "a function (task, base_url) that returns None, a reward or a text; it may be async"


class FunctionRunner:
    """Calls a function per episode, each in a thread of its own.

    An async function runs in an event loop of its own. So a function may block: it waits for the
    endpoint, which is in the event loop of the run.

    Args:
        function: called with the task and the base URL.
        name: how the user gave it, for messages.

    Raises:
        UserError: if it cannot be called with two arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            inspect.signature(function).bind(Task("", ""), "")
        except TypeError as error:
            raise UserError(
                f"environment.agent.command = {name!r} cannot be called with a task and a base URL"
                f" ({error}). Give {_FORM}"
            ) from error
        self._function = function
        self._left: set[threading.Thread] = set()

    async def run(self, task: Task, address: str) -> object:
        """Call the function for one episode. See `Runner.run`."""
        self._left = {thread for thread in self._left if thread.is_alive()}
        if len(self._left) >= LEFT:
            raise EnvironmentFault(
                f"{LEFT} calls of the function still run after their time limit. Make it end when"
                " its requests are refused"
            )
        call = _Call(self._function, task, f"{address}/v1")
        call.thread.start()
        try:
            return await asyncio.wrap_future(call.result)
        except asyncio.CancelledError:
            call.cancel()
            self._left.add(call.thread)
            raise
        except (Exception, SystemExit) as error:  # boundary: a failed agent is data
            raise EnvironmentFault(one_line(error)) from error

    async def close(self) -> None:
        """Nothing to do: threads that are left end with the process."""


class _Call:
    """One call in a thread.

    Attributes:
        result: what the function returns or raises.
        thread: runs the call. It does not delay the end of the process.
    """

    def __init__(self, function: Callable[..., Any], task: Task, base_url: str) -> None:
        self.result: Future[object] = Future()
        self._work = (function, task, base_url)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        context = copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._run,), name="agent", daemon=True
        )

    def cancel(self) -> None:
        """Cancel an async function. Another one goes on, until its requests are refused."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    def _run(self) -> None:
        function, task, base_url = self._work
        try:
            given = function(task, base_url)
            if inspect.isawaitable(given):
                given = asyncio.run(self._awaited(given))
            outcome, error = given, None
        except BaseException as problem:  # noqa: BLE001  the caller raises it
            outcome, error = None, problem
        with suppress(InvalidStateError):  # nobody waits for it any more
            if error is None:
                self.result.set_result(outcome)
            else:
                self.result.set_exception(error)

    async def _awaited(self, given: Any) -> object:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await given
