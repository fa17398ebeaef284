"""Handling of Ctrl-C and SIGTERM.

The first signal stops the run at a point where nothing is lost. The second stops it immediately.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from ..ranks import ALONE, Ranks


class Interrupted(KeyboardInterrupt):
    """A signal arrived where the run can stop at once.

    It is a KeyboardInterrupt, so no `except Exception` treats it as a failure.
    """


class Interrupts:
    """Context manager around a run that handles signals.

    A signal raises Interrupted at once. Inside `finishing`, the work in progress is finished first.

    With several ranks, a signal is only recorded, because it reaches the ranks at different
    moments. They stop together at the end of a step.

    Args:
        say: prints a line.
        ranks: the ranks of the run.

    Attributes:
        exit_code: 0 until a signal arrives, then 128 + its number (130 for Ctrl-C, 143 for
            SIGTERM).
    """

    def __init__(self, say: Callable[[str], None], ranks: Ranks = ALONE) -> None:
        self.exit_code = 0
        self._ranks = ranks
        self._finishing = ranks.size > 1
        self._say = say
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if (
            threading.current_thread() is not threading.main_thread()
        ):  # Python allows handlers in the main thread only
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def finish_first(self, finish: bool) -> None:
        """Set whether the current work must be finished before the run stops.

        Raises:
            Interrupted: if a signal has arrived and the current work need not be finished.
        """
        if self._ranks.size > 1:
            return
        self._finishing = finish
        if self.exit_code and not finish:
            raise Interrupted

    def stop_here(self) -> None:
        """Stop if a signal has arrived at any rank. All ranks must call this at the same place.

        With one rank, later signals stop the run at once.

        Raises:
            Interrupted: if a signal has arrived.
        """
        self.finish_first(False)
        if self.stopping():
            raise Interrupted

    def stopping(self) -> bool:
        """True if a signal has arrived at any rank. All ranks must call this at the same place.

        All ranks get the same result. A signal that arrives during the call counts in the next one.
        """
        code = max(self._ranks.gather(self.exit_code))
        if code:
            self.exit_code = code
        return code != 0

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Delay signals inside this block.

        The caller checks `exit_code`, or continues until `finish_first(False)` raises.
        """
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
            # The exception may fall between the creation of a coroutine and its await.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            raise Interrupted
        self._say(
            "stopping after this step and saving a checkpoint (a second signal stops immediately)"
        )
