"""What the roles of a run do, and when: busy seconds, and spans for a trace.

All times are those of `time.perf_counter()`. On Linux and macOS it is the monotonic clock of the
machine, so times of its processes can be compared.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Busy:
    """Seconds in which at least one of several activities is open. Threads may share it.

    Example: `with busy: ...`
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = self._seconds = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                self._since = time.perf_counter()
            self._open += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._seconds += time.perf_counter() - self._since

    def seconds(self, now: float) -> float:
        """Busy seconds until `now`, which is the current time."""
        with self._lock:
            return self._seconds + (max(0.0, now - self._since) if self._open else 0.0)


@dataclass(frozen=True)
class Span:
    """Something that has ended.

    Attributes:
        track: who did it: "steps", "trainer", "groups", "environment" or "sampler N". Spans of a
            track may overlap.
        name: what it was.
        began: its start, in seconds.
        ended: its end, in seconds.
        tokens: tokens that it sampled. None: it samples none.
    """

    track: str
    name: str
    began: float
    ended: float
    tokens: int | None = None


class Timeline:
    """Keeps the spans that ended in the newest steps. Threads may share it.

    Args:
        steps: number of steps. 0: nothing is kept.

    Attributes:
        environment: open checks and calls of environments.
    """

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.environment = Busy()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._ends: deque[float] = deque()
        self._phase = ""
        self._since = 0.0

    @property
    def spans(self) -> list[Span]:
        """The spans of the newest steps, in the order of their ends."""
        with self._lock:
            return [*self._spans]

    def begin(self) -> None:
        """Start to keep spans: the first step begins."""
        if self.steps:
            self._phase = ""
            self._ends.append(time.perf_counter())

    def add(
        self, track: str, name: str, began: float, ended: float = 0.0, tokens: int | None = None
    ) -> None:
        """Keep a span. Attributes as in `Span`. An end of 0 is the current time."""
        if self._ends:
            span = Span(track, name, began, ended or time.perf_counter(), tokens)
            with self._lock:
                self._spans.append(span)

    def phase(self, name: str) -> None:
        """The trainer's process begins a phase, which ends the one before."""
        now = time.perf_counter()
        if self._phase:
            self.add("trainer", self._phase, self._since, now)
        self._phase, self._since = name, now

    def end_step(self, step: int) -> None:
        """A step has ended. Spans that ended before the kept steps are dropped."""
        if not self._ends:
            return
        now = time.perf_counter()
        self.phase(self._phase)
        self.add("steps", f"step {step}", self._ends[-1], now)
        with self._lock:
            self._ends.append(now)
            if len(self._ends) > self.steps + 1:
                self._ends.popleft()
                self._spans = [span for span in self._spans if span.ended > self._ends[0]]

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """A check, or a call of an environment."""
        began = time.perf_counter()
        with self.environment:
            yield
        self.add("environment", name, began)
