"""Ctrl-C and SIGTERM: the first stops the run where nothing is lost, the second stops it where it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupted(KeyboardInterrupt):
    """A signal came where the run can stop at once. No `except Exception` on the way takes it for a failure."""


class Interrupts:
    """Context manager around a run.

    A signal raises Interrupted at once, except inside `finishing`: what is begun there is finished first.

    Attributes:
        exit_code: 0 until a signal came, then 128 + its number (130 for Ctrl-C, 143 for SIGTERM).
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.exit_code = 0
        self._finishing = False
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

    def finish_first(self, finish: bool) -> None:
        """Whether what is being done now is to be finished. Raises Interrupted where a signal has come and it is not."""
        self._finishing = finish
        if self.exit_code and not finish:
            raise Interrupted

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Within it a signal waits: the caller asks `exit_code`, or goes on to where `finish_first(False)` raises."""
        before, self._finishing = self._finishing, True
        try:
            yield
        finally:
            self._finishing = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code:
            raise KeyboardInterrupt
        self.exit_code = 128 + number
        if not self._finishing:
            self._say("stopping")
            raise Interrupted
        self._say("stopping after this step, with a checkpoint (once more: at once)")
