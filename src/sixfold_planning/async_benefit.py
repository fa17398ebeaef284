"""Whether asynchronous training is worth its staleness."""

from __future__ import annotations

from dataclasses import dataclass

CLEAR_RATIO = 2.0
"""Sampling counts as much longer than training from this ratio of their times on. The number is
Sixfold's own: no source gives one.
"""


@dataclass(frozen=True)
class AsyncBenefit:
    """Verdict on asynchronous training.

    Attributes:
        verdict: "yes", "marginal" or "no".
        low: smallest usual speed-up over a synchronous step.
        high: largest usual speed-up. None: no usual limit.
    """

    verdict: str
    low: float
    high: float | None
    reason: str


def async_benefit(*, rollout_seconds: float, trainer_seconds: float, nodes: int) -> AsyncBenefit:
    """Decide by the first row that applies.

    | case | verdict | speed-up |
    |---|---|---|
    | one node | no | within 10 % |
    | rollout at least twice as long as training | yes | 2 or more |
    | comparable times | marginal | 1.2 to 1.5 |
    | training at least twice as long as rollout | no | within 10 % |

    The threshold of two and the last row are ours; usual tables leave them open.

    Args:
        rollout_seconds: seconds of sampling per step.
        trainer_seconds: seconds of training per step.
        nodes: machines of the run.
    """
    ratio = rollout_seconds / trainer_seconds
    if nodes == 1:
        return AsyncBenefit("no", 1.0, 1.1, "On one node, both phases share the same devices.")
    if ratio >= CLEAR_RATIO:
        return AsyncBenefit("yes", 2.0, None, "Sampling is much longer than training.")
    if ratio > 1 / CLEAR_RATIO:
        return AsyncBenefit("marginal", 1.2, 1.5, "Sampling and training take about as long.")
    return AsyncBenefit("no", 1.0, 1.1, "Training is the limit: sampling already hides behind it.")
