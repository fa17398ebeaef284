"""Measure seconds and bytes of the stages of a weight sync.

A sync reads weights lazily: one tensor is gathered, cast and copied before the next one is read. So
stages are nested. The time of an inner stage does not count for the outer one.

On a GPU, work counts for the stage in which the host waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["gather", "cast", "broadcast", "reshard", "invalidate", "verify"]


@dataclass
class StageRecord:
    """Measurements of one sync.

    Attributes:
        seconds: time of each stage, without stages inside it.
        sizes: bytes that each stage made or moved.
    """

    seconds: dict[Stage, float] = field(default_factory=dict)
    sizes: dict[Stage, int] = field(default_factory=dict)
    _open: list[Stage] = field(default_factory=list)
    _since: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics of the stages that ran: `time/sync_STAGE_s` and `sync/STAGE_bytes`."""
        times = {f"time/sync_{stage}_s": value for stage, value in self.seconds.items()}
        return times | {f"sync/{stage}_bytes": float(n) for stage, n in self.sizes.items() if n}

    def enter(self, stage: Stage) -> None:
        """Start a stage. The stage around it, if there is one, pauses."""
        self._credit()
        self._open.append(stage)

    def leave(self) -> None:
        self._credit()
        self._open.pop()

    def count(self, stage: Stage, size: int) -> None:
        self.sizes[stage] = self.sizes.get(stage, 0) + size

    def _credit(self) -> None:
        """Add the time since the last change to the innermost stage."""
        now = time.perf_counter()
        if self._open:
            stage = self._open[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


_RECORD: ContextVar[StageRecord | None] = ContextVar("record", default=None)


@contextmanager
def record_stages() -> Iterator[StageRecord]:
    record = StageRecord()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


@contextmanager
def stage(name: Stage, size: int = 0) -> Iterator[None]:
    """Context of one stage. It is measured if it runs inside `record_stages`.

    Args:
        size: bytes that the stage makes or moves, if they are known before. Otherwise call
            `count_bytes` later.
    """
    record = _RECORD.get()
    if record is None:
        yield
        return
    record.enter(name)
    try:
        yield
        record.count(name, size)
    finally:
        record.leave()


def count_bytes(name: Stage, size: int) -> None:
    """Add bytes that a stage has made or moved, if stages are recorded."""
    if record := _RECORD.get():
        record.count(name, size)
