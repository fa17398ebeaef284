"""Deadlines of waits: the longest silence of each part of a run, and the error that names it.

Contract of every wait in a run:

- It has a deadline and names who must answer: the engine, the reference process, a server, ...
- A deadline counts silence, not work: every sign of life (a step of the engine, a message) restarts
  it. Clocks are monotonic, so a change of the machine's time ends nothing.
- A missed deadline raises `NoAnswer`. The run then ends as after any failure: the last step is
  saved if possible, processes are ended, and the exit code is not 0.
- Nothing waits again for a part that has missed its deadline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import NoAnswer


@dataclass(frozen=True)
class Deadline:
    """Longest silence of one part of a run.

    Attributes:
        who: who must answer, as the subject of a sentence: "the engine".
        seconds: longest silence.
        remedy: what the user can do, as a sentence without a full stop.
    """

    who: str
    seconds: float
    remedy: str = "If it needs that long, raise run.silence_s"

    def missed(self) -> NoAnswer:
        return NoAnswer(f"{self.who} gave no sign of life for {self.seconds:g} s. {self.remedy}")


class Pulse:
    """Time of the last sign of life of a thread. Any thread may read it.

    Time counts only between `begin` and `end`, while the thread has work.
    """

    def __init__(self) -> None:
        self._last: float | None = None

    def begin(self) -> None:
        """Start to count time, because there is work. Does nothing if time counts already."""
        if self._last is None:
            self._last = time.monotonic()

    def beat(self) -> None:
        """Record a sign of life: a part of the work is done."""
        self._last = time.monotonic()

    def end(self) -> None:
        """Stop counting time, because there is no work."""
        self._last = None

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life. 0 while there is no work."""
        last = self._last
        return 0.0 if last is None else time.monotonic() - last
