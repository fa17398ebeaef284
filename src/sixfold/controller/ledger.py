"""Which groups of prompts may start, which may be trained, and which have been: the ledger.

The rules and the bound that follows from them are in `staleness.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..errors import UserError
from ..staleness import largest_age


class Ledger:
    """Numbers of the groups of a run that are open, trained or dropped.

    Args:
        per_step: groups per step (P).
        staleness: steps by which a group may be too old at its start (S).
        window: number of the oldest open groups of which a step takes finished ones (W).
        steps: steps of the run. No more groups start than they train, beside dropped ones.

    Attributes:
        admitted: numbers of the groups that are open, ascending.
    """

    def __init__(self, per_step: int, staleness: int, window: int, steps: int) -> None:
        self.per_step = per_step
        self.staleness = staleness
        self.window = window
        self.admitted: list[int] = []
        self._end = steps * per_step
        self._low = 0  # every group below is trained or dropped
        self._ahead: set[int] = set()  # trained and dropped groups above
        self._dropped = 0
        self._next = 0  # no group from here on has started
        self._state = self._settled()

    @property
    def trained(self) -> int:
        """Number of trained groups."""
        return self._low + len(self._ahead) - self._dropped

    @property
    def largest_age(self) -> int:
        """Bound of the age of a group when it is trained, in steps."""
        return largest_age(self.per_step, self.staleness, self.window)

    def admit(self) -> list[int]:
        """Numbers of the groups that may start now. They count as started."""
        new = []
        open_until = min(self._end, self.trained + (self.staleness + 1) * self.per_step)
        while self._next < open_until + self._dropped:
            if self._next not in self._ahead:
                new.append(self._next)
            self._next += 1
        self.admitted += new
        return new

    def choose(self, finished: Collection[int]) -> list[int] | None:
        """Numbers of the groups of the next step, ascending. None: too few have finished.

        Within the window, the oldest finished groups are taken. The window moves when its oldest
        group is taken.
        """
        chosen: list[int] = []
        oldest = None  # the first group that is not taken
        for number in self.admitted:
            if len(chosen) == self.per_step:
                break
            if oldest is not None and number >= oldest + self.window:
                break
            if number in finished:
                chosen.append(number)
            elif oldest is None:
                oldest = number
        return chosen if len(chosen) == self.per_step else None

    def train(self, numbers: Collection[int]) -> None:
        """Record that groups have been trained.

        Raises:
            ValueError: if one of them is not open: it would be trained twice.
        """
        self._close(numbers)
        self._state = self._settled()

    def drop(self, number: int) -> None:
        """Record that an open group will not be trained. A later group may start in its place.

        Raises:
            ValueError: if it is not open.
        """
        self._close([number])
        self._dropped += 1

    def _close(self, numbers: Collection[int]) -> None:
        if wrong := set(numbers) - set(self.admitted):
            raise ValueError(f"group {min(wrong)} is not open")
        self.admitted = [number for number in self.admitted if number not in numbers]
        self._ahead |= set(numbers)
        while self._low in self._ahead:
            self._ahead.remove(self._low)
            self._low += 1

    def state(self) -> dict[str, Any]:
        """The groups that were trained or dropped until the last `train`.

        The others start again after a resume, also those that were dropped since: their records are
        written with the next step.
        """
        return self._state

    def _settled(self) -> dict[str, Any]:
        return {
            "per_step": self.per_step,
            "low": self._low,
            "ahead": sorted(self._ahead),
            "dropped": self._dropped,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; no group is open then."""
        if state["per_step"] != self.per_step:
            raise UserError(
                f"the run has trained groups of steps of {state['per_step']} prompts, so their"
                f" number is not that of steps of {self.per_step}. With rollout.staleness > 0, a"
                " resume cannot change rollout.prompts_per_step"
            )
        low, ahead = state["low"], set(state["ahead"])
        self._low, self._ahead, self._next, self.admitted = low, ahead, low, []
        self._dropped, self._state = state["dropped"], state
