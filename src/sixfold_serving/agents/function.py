"""Calls of agents that are Python functions, with a task and a base URL.

`function_worker.py` makes them in a process beside the run.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from sixfold.environment.named import Named
from sixfold.errors import UserError, one_line
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold.types import Task

AGENTS = Named("agent", "function", {})

MAX_LEFT = 64
"""Maximum number of calls that still run after their episode has ended."""

_FORM = "a function (task, base_url), possibly async, that returns None, a reward or a text"


class FunctionCalls:
    """Calls a function once per episode, each time in a new thread, so the function may block.

    An async function gets a new event loop in its thread.

    Args:
        function: called with the task and the base URL.
        name: value of the setting, for messages.

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
        """Call the function for one episode, see `Runner.run`."""
        self._left = {thread for thread in self._left if thread.is_alive()}
        if len(self._left) >= MAX_LEFT:
            raise EnvironmentFault(
                f"{MAX_LEFT} calls of the function still run although their episodes have ended."
                " Let the function end when its requests are refused"
            )
        call = _Call(self._function, task, f"{address}/v1")
        call.thread.start()
        try:
            return await asyncio.wrap_future(call.result)
        except asyncio.CancelledError:
            call.cancel()
            self._left.add(call.thread)
            raise
        except Exception as error:  # boundary: a failed agent is data
            raise EnvironmentFault(one_line(error), by_agent=True) from error


class _Call:
    """One call of the function in a thread.

    Attributes:
        result: return value or exception of the function.
        thread: runs the call. It is a daemon, so it does not delay the end of the process.
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
        """Cancel an async function. Other functions continue until their requests are refused."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(task.cancel)

    def _run(self) -> None:
        function, task, base_url = self._work
        returned: object = None
        error: BaseException | None = None
        try:
            returned = function(task, base_url)
            if inspect.isawaitable(returned):
                returned = asyncio.run(self._awaited(returned))
        except BaseException as problem:  # noqa: BLE001  the caller raises it
            error = problem
            if isinstance(problem, StopIteration) or not isinstance(problem, Exception):
                # asyncio would not deliver these as failures of the agent.
                error = RuntimeError(f"the function raised {one_line(problem)}")
        with suppress(InvalidStateError):  # the caller was cancelled
            if error is None:
                self.result.set_result(returned)
            else:
                self.result.set_exception(error)

    async def _awaited(self, returned: Awaitable[object]) -> object:
        """Await the result of an async function, as a task that `cancel` can find."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await returned
