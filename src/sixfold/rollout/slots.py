"""A limited number of slots, given to waiting callers in the order of their priorities."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """Slots for callers in one event loop at a time.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._asked = 0

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Hold a slot in this block. A caller with a larger priority gets the next free slot."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, priority: int) -> None:
        if self._free:
            self._free -= 1
            return
        self._asked += 1
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, self._asked, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled after the slot was handed over
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
