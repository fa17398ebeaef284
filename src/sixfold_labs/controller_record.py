"""The task of the lab `controller`, and what a step of the loop did with it."""

from __future__ import annotations

from dataclasses import dataclass

from .verifier import last_integer

PROMPT, ANSWER = "<3+4+5>", "12"
OLD_LOGP, REF_LOGP = (-2.3, -2.1, -1.9), -2.0
"""Log-probs of whole responses."""


@dataclass(frozen=True)
class StepRecord:
    """What one step of the loop did.

    Attributes:
        phases: names of the phases, in order.
        batch: rows and columns of the batch.
    """

    phases: tuple[str, ...]
    rewards: list[float]
    advantages: list[float]
    batch: tuple[int, int]


def reward(response: str) -> float:
    """1 if the last integer of the response is the answer, otherwise 0."""
    return float(last_integer(response) == ANSWER)
