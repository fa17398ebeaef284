"""Episodes whose methods are not async: each runs in a thread of its own, so it may block."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from .episode import Action, End, Observation
from .own_thread import OwnThread


def is_blocking(kind: type) -> bool:
    """True if a class has `start` and `step`, and neither is async."""
    made = [inspect.getattr_static(kind, name, None) for name in ("start", "step")]
    return all(inspect.isfunction(one) and not inspect.iscoroutinefunction(one) for one in made)


class BlockingEpisode:
    """An episode of a class with ordinary methods. It is made, and plays, in its own thread.

    A call that hangs blocks only this thread. Its time limit ends the episode.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._episode: Any = None
        self._thread = OwnThread()

    async def start(self) -> Observation:
        self._episode = await self._thread.call(self._make)
        return await self._thread.call(self._episode.start)

    async def step(self, action: Action) -> Observation | End:
        return await self._thread.call(self._episode.step, action)

    async def close(self) -> None:
        """Call `close` if the class has it, after a call that still runs."""
        try:
            if hasattr(type(self._episode), "close"):
                await self._thread.call(self._episode.close)
        finally:
            self._thread.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockingEpisode:
        """Copy for a branch, which goes on in a thread of its own."""
        copied = BlockingEpisode(self._make)
        copied._episode = copy.deepcopy(self._episode, memo)
        return copied
