"""Settings of weight sync: how new weights reach the engine."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob


class SharedSyncConfig(Section):
    """Engine and trainer share one module, so nothing is copied."""

    kind: Literal["shared"] = "shared"

    @property
    def quantised(self) -> bool:
        """False: the engine samples from the trainer's own weights."""
        return False

    @property
    def every(self) -> int:
        """1: the engine has new weights after every step."""
        return 1


class CopySyncConfig(Section):
    """The engine has its own weights: a copy of the trainer's, exact or quantised."""

    kind: Literal["copy", "int8", "fp8"] = "copy"
    every: int = knob(
        1, "steps between weight syncs; above 1, samples come from older weights", ge=1
    )

    @property
    def quantised(self) -> bool:
        """True if the engine's weights are quantised, so that they differ from the trainer's."""
        return self.kind != "copy"


SyncConfig = SharedSyncConfig | CopySyncConfig
