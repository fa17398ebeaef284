"""Kind `rl`: sample completions and learn from their rewards."""

from __future__ import annotations

from ..run.rl import RlWork
from ..run.work import Work
from .kind import StageKind


class RlKind(StageKind):
    """Samples completions and learns from their rewards."""

    def work(self) -> Work:
        return RlWork(self.recipe)
