"""Branches: samples of a task that share the first turns of one episode.

Of B samples that share a trunk, one plays the episode from its start. At the branch, the others get
copies of the episode and continue from there, each with its own sampling noise. If the episode ends
before the branch, the next sample plays from the start. So a task always has K samples.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Branching:
    """Where the samples of a task branch.

    Attributes:
        count: samples that share a trunk (B). 1: every sample plays from the start.
        turn: number of replies before the branch. 0: the environment chooses the branch with
            `Observation.branch`.
    """

    count: int = 1
    turn: int = 1


class Trunk(Generic[T]):
    """Samples that share one episode up to its branch. All must run in the same event loop.

    Args:
        turn: as in `Branching`.
    """

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._play_to_end = False
        self._waiting: deque[tuple[int, asyncio.Future[T | None]]] = deque()

    def parts(self, turns: int, asked: bool) -> bool:
        """True if the episode has reached its branch and other samples wait for it.

        Args:
            turns: number of replies so far.
            asked: True if the environment chooses this observation as the branch.
        """
        return bool(self._waiting) and (turns == self._turn if self._turn else asked)

    async def join(self, sample: int) -> T | None:
        """Wait for the branch, unless this sample is the first.

        Args:
            sample: index of the sample.

        Returns:
            A copy of the episode at the branch, or None if the sample must play from the start.
        """
        if not self._play_to_end:
            self._play_to_end = True
            return None
        copy: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, copy))
        try:
            return await copy
        except asyncio.CancelledError:
            if copy.done() and not copy.cancelled():  # it was chosen to play from the start
                self.leave()
            raise

    def split(self, copied: Callable[[int], T]) -> None:
        """Give every waiting sample a copy of the episode.

        Args:
            copied: makes the copy for a sample, from its index.
        """
        copies = [(copy, copied(sample)) for sample, copy in self._waiting if not copy.done()]
        self._waiting.clear()
        for copy, state in copies:
            copy.set_result(state)

    def leave(self) -> None:
        """End the playing sample. If it has not branched, the next sample plays from the start."""
        while self._waiting:
            _, copy = self._waiting.popleft()
            if not copy.done():
                copy.set_result(None)
                return
