"""Ctrl-C and SIGTERM: the first asks the run to stop at the next safe point, the second stops it where it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupts:
    """Context manager around a run. `exit_code` is 0 until a signal came, then 128 + its number (130 for Ctrl-C, 143 for SIGTERM)."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.exit_code = 0
        self._say = say
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code:
            raise KeyboardInterrupt
        self.exit_code = 128 + number
        self._say("stopping after this step, with a checkpoint (once more: at once)")
