"""Runs agents that are Python functions, in a process of their own.

In the process of the run they would compete with the engine for Python's global lock: each of the
engine's operations would wait for the agents' threads.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from itertools import count

from sixfold.errors import UserError
from sixfold.processes.child import Child, ChildEnded, ChildError
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold.types import Task

from .command import without_proxy
from .function import AGENTS

START_TIMEOUT_S = 120.0
"""Time in which the process must load the function. It may import a large framework."""

MAX_REPLY_BYTES = 1 << 24

_TICKETS = count(1)


class FunctionRunner:
    """Calls a function once per episode. All calls share one process, each has its own thread.

    If the process dies, the episodes that it plays fail, and the next one starts a new process.

    Args:
        name: the function, `path/to/file.py:function` or `module:function`.

    Raises:
        UserError: if it cannot be loaded, or called with a task and a base URL.
    """

    def __init__(self, name: str) -> None:
        self._name = AGENTS.absolute(name)
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: Child | None = self._start()
        try:
            loaded = json.loads(self._child.receive(START_TIMEOUT_S))
            if not isinstance(loaded, dict):
                raise ChildEnded("sent a malformed reply")
        except (ChildError, ValueError, RecursionError) as error:
            self._child.close(0.0)
            raise UserError(
                f"the process of environment.agent.command = {name!r} {error}"
            ) from error
        if "fatal" in loaded:
            self._child.close()
            raise UserError(str(loaded["fatal"]))

    async def run(self, task: Task, address: str) -> object:
        """Call the function for one episode, see `Runner.run`."""
        child = self._watched(asyncio.get_running_loop())
        ticket, ended = next(_TICKETS), asyncio.get_running_loop().create_future()
        self._post(child, ("run", ticket, task, address), 1)
        self._pending[ticket] = ended
        try:
            return await ended
        except asyncio.CancelledError:
            if child is self._child:
                self._post(child, ("cancel", ticket), 0)
            raise

    async def close(self) -> None:
        """End the process, and with it all calls."""
        if (child := self._release()) is not None:
            await asyncio.to_thread(child.close)

    def _start(self) -> Child:
        child = Child(
            "sixfold_serving.agents.function_worker",
            environment=without_proxy(),
            reply_limit=MAX_REPLY_BYTES,
        )
        child.post(json.dumps({"function": self._name}).encode())
        return child

    def _watched(self, loop: asyncio.AbstractEventLoop) -> Child:
        """The process, whose messages arrive in this event loop. Starts it if it has died."""
        if self._child is None:
            self._child, self._loop = self._start(), None
        if loop is not self._loop:
            self._unwatch(self._child)
            self._loop = loop
            loop.add_reader(self._child.replies, self._arrived)
        return self._child

    def _unwatch(self, child: Child) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(child.replies)
            self._loop.remove_writer(child.requests)
        self._loop = None

    def _post(self, child: Child, request: tuple[object, ...], answers: int) -> None:
        """Send a request. What does not fit into the pipe is sent when the process reads."""
        loop = asyncio.get_running_loop()
        if child.post(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL), answers):
            return

        def write() -> None:
            if child.flush():
                loop.remove_writer(child.requests)

        loop.add_writer(child.requests, write)

    def _arrived(self) -> None:
        """Deliver what the process has sent."""
        assert self._child is not None
        try:
            for message in self._child.arrived():
                self._deliver(json.loads(message.body))
        except (ValueError, RecursionError):
            self._fail("the process of the function sent a malformed reply")
        except ChildError as error:
            self._fail(f"the process of the function {error}")

    def _deliver(self, answer: object) -> None:
        """Deliver one reply."""
        match answer:
            case {"fatal": str(text)}:  # of a process that replaces a dead one
                self._fail(text)
            case {"run": int(ticket), "error": str(text)}:
                self._finish(ticket, EnvironmentFault(text, by_agent=True))
            case {"run": int(ticket), "value": None | str() | float() as value}:
                self._finish(ticket, value)
            case dict() if not answer:  # it is ready
                pass
            case _:
                raise ValueError("malformed")

    def _finish(self, ticket: int, result: object) -> None:
        ended = self._pending.pop(ticket, None)
        if ended is None or ended.done():
            return
        if isinstance(result, EnvironmentFault):
            ended.set_exception(result)
        else:
            ended.set_result(result)

    def _fail(self, problem: str) -> None:
        """End the process. The episodes that it plays fail."""
        pending, self._pending = self._pending, {}
        if (child := self._release()) is not None:
            child.close(0.0)
        for ended in pending.values():
            if not ended.done():
                ended.set_exception(EnvironmentFault(problem))

    def _release(self) -> Child | None:
        child, self._child = self._child, None
        if child is not None:
            self._unwatch(child)
        return child
