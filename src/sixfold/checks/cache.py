"""Reuse of outcomes: the same completion of the same task is checked once per run."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ..environment.grade import Grade
from ..types import Task
from .check import Outcome

ENTRIES = 1 << 15
"""Maximum number of outcomes that are kept."""
TASKS = 4096
"""Maximum number of tasks whose digests are kept."""
UNSTEADY = ("timeout", "out_of_memory", "infrastructure_error")
"""Verdicts that depend on the load of the machine. They are not kept."""


class OutcomeCache:
    """Outcomes by completion, task and version of the reward.

    Equal checks that arrive together share one run. If it fails, each of the others runs itself.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._running: dict[bytes, asyncio.Event] = {}
        self._tasks: OrderedDict[int, tuple[Task, bytes]] = OrderedDict()

    async def outcome(
        self, version: str, task: Task, completion: str, run: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        """The known outcome, with a duration of 0, or that of a run.

        Args:
            version: name and version of the reward.
            run: checks the completion.
        """
        key = self._key(version, task, completion)
        if not key:
            return await run()
        if key not in self._known and key in self._running:
            await self._running[key].wait()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key in self._running:  # the other run has failed, and another one has begun
            return await run()
        ended = self._running[key] = asyncio.Event()
        try:
            outcome = await run()
        finally:
            del self._running[key]
            ended.set()
        if not outcome.error and not any(map(_is_unsteady, outcome.values)):
            self._known[key] = outcome._replace(seconds=0.0, cached=True)
            while len(self._known) > ENTRIES:
                self._known.popitem(last=False)
        return outcome

    def _key(self, version: str, task: Task, completion: str) -> bytes:
        """Key of a check. Empty if the task has no JSON form."""
        digest = self._digest(task)
        text = completion.encode("utf-8", "surrogatepass")
        parts = (hashlib.sha256(version.encode()).digest(), digest, text)
        return hashlib.sha256(b"".join(parts)).digest() if digest else b""

    def _digest(self, task: Task) -> bytes:
        """Digest of everything in the task: a change of its tests gives another one."""
        known = self._tasks.get(id(task))
        if known is None or known[0] is not task:
            content = (task.id, task.source, task.prompt, task.answer, dict(task.columns))
            try:
                known = task, hashlib.sha256(json.dumps(content).encode()).digest()
            except (TypeError, ValueError):  # a column that JSON does not have
                known = task, b""
            self._tasks[id(task)] = known
            while len(self._tasks) > TASKS:
                self._tasks.popitem(last=False)
        return known[1]


def _is_unsteady(value: float | Grade | None) -> bool:
    return isinstance(value, Grade) and value.verdict in UNSTEADY
