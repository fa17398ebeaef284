"""Marks of completions in the report and on screen: solved, partly right, wrong, not checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["good", "part", "bad", "unknown"]

DOTS: dict[Mark, str] = {"good": "●", "part": "◐", "bad": "○", "unknown": "?"}
TICKS: dict[Mark, str] = {"good": "✓", "part": "~", "bad": "✗", "unknown": "·"}

LEGEND = "✓ solved, ~ partly right, ✗ wrong, · not checked"
"""What `TICKS` mean."""


def mark(reward: float | None, solved: bool | None) -> Mark:
    """Mark of one completion. Partial credit is not "good".

    Args:
        reward: its reward. None if the check failed.
        solved: whether it counts as solved (`environment.solved`). None in files of earlier
            releases, where a reward of 1 decides.
    """
    if reward is None:
        return "unknown"
    if solved if solved is not None else reward >= 1:
        return "good"
    return "part" if reward > 0 else "bad"


@dataclass(frozen=True)
class Dot:
    """Mark of a completion in the report.

    Attributes:
        symbol: the character that shows it.
    """

    mark: Mark
    symbol: str
    reward: str


def dot(reward: float | None, solved: bool | None, verdict: str | None = None) -> Dot:
    """Dot of one completion.

    Args:
        reward: as for `mark`.
        solved: as for `mark`.
        verdict: verdict of its check, which is shown after the reward.
    """
    found = mark(reward, solved)
    text = "no reward" if reward is None else f"reward {reward:.3g}"
    return Dot(found, DOTS[found], f"{text}, {verdict}" if verdict else text)
