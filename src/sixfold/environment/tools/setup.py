"""What the tool episodes of a run share: extra tools, limits, and the recorded results."""

from __future__ import annotations

from dataclasses import dataclass, field

from .replay import Recorder
from .running import Slots
from .tool import Tool


@dataclass(frozen=True)
class ToolSetup:
    """Tools and limits of a run.

    Attributes:
        tools: tools that every episode has, besides its own.
        timeout_s: seconds that a call may take, unless its tool has a limit.
        longest_s: most seconds of any call. The step of the episode must end before its own limit.
        max_calls: most calls of one reply that are run.
        max_result: most characters of a result. The rest is cut.
        slots: bound on the calls that run at once.
        recorder: records or replays results. None: neither.
    """

    tools: tuple[Tool, ...] = ()
    timeout_s: float = 4.0
    longest_s: float = float("inf")
    max_calls: int = 16
    max_result: int = 8192
    slots: Slots = field(default_factory=lambda: Slots(64))
    recorder: Recorder | None = None

    def limit(self, tool: Tool) -> float:
        """Seconds that a call of the tool may take."""
        return min(self.timeout_s if tool.timeout_s is None else tool.timeout_s, self.longest_s)


DEFAULT = ToolSetup()
"""Setup of an episode that no run has given one."""
