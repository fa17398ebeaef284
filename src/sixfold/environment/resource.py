"""What a run starts for its rewards, such as a judge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..ranks import Ranks


class Started(Protocol):
    """Something that rewards are made from, for example a judge."""

    def start(self) -> None:
        """Start it early, without waiting."""

    def close(self) -> None:
        """End it, after all who ask it."""


class Resource(Started, Protocol):
    """What the rewards of a run are made from (entry points of "sixfold.resources").

    An entry point is a function of (recipe, number of ranks) that makes one.
    """

    def notes(self, model: str) -> list[str]:
        """Lines for the start of a run.

        Args:
            model: name or folder of the policy's model.
        """

    def keep(self, run: Path, rank: int) -> None:
        """Read what an earlier process of this run kept, and keep more there."""

    def reuse(self, run: Path) -> None:
        """Read what a run has kept, and keep nothing."""

    def metrics(self, ranks: Ranks) -> Mapping[str, float]:
        """Metrics of all ranks since the last call."""

    def summary(self, ranks: Ranks) -> dict[str, Any]:
        """Entries for summary.json, of all ranks."""
