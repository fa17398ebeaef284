"""Settings that the tool episodes of a run share: tools, limits, and recorded results."""

from __future__ import annotations

from dataclasses import dataclass, field

from .replay import Recorder
from .running import Slots
from .tool import Tool


@dataclass(frozen=True)
class ToolSetup:
    """Tools and limits of a run.

    Attributes:
        tools: tools of every episode, besides its own.
        timeout_s: time limit of a call in seconds, unless its tool has its own limit.
        longest_s: upper bound on every time limit. It is below the time limit of a step, so that
            the step can still report a call that was too slow.
        max_calls: maximum number of calls of one reply that are run.
        max_result: maximum number of characters of a result. The rest is cut.
        slots: bound on concurrent calls.
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
        """Time limit of a call of the tool, in seconds."""
        return min(self.timeout_s if tool.timeout_s is None else tool.timeout_s, self.longest_s)


DEFAULT = ToolSetup()
"""Setup of an episode that is used without a run."""
