"""Predicted and measured seconds of the phases of a step, and the alarm about their difference.

The prediction is that of `sixfold plan` for the lengths that the run has measured. So a deviation
means that a phase is slower or faster than planned, and not that completions have another length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from .numbers import number, percent
from .prediction import PHASES, STEP, Lengths, Prediction

LIMIT = 0.25
"""Relative deviation of a phase above which an alarm starts."""
NOTICEABLE = 0.005
"""Least deviation for an alarm, as a share of the predicted step."""
LEAST_CHECK_S = 0.1
"""Seconds from which checks are named beside lengths."""
LEAST_STEPS = 3
"""Least number of steps for an alarm."""

_ROLES = {
    "rollout": ("rollout",),
    "reference": ("reference", "scoring"),
    "trainer": ("trainer",),
    "sync": ("sync",),
    STEP: (
        *("rollout", "environment", "batch", "reference", "scoring", "algorithm", "trainer"),
        "sync",
    ),
}
"""Phase -> parts of a step whose durations are added. Logging and evaluation are left out."""

_SLOWER = {
    "rollout": (
        "look at rollout/queue_peak, rollout/preemptions and dynamic/rounds, and at other processes"
        " on the machine"
    ),
    "reference": "look at train/microbatches and at where the reference is (reference.placement)",
    "trainer": (
        "look at train/microbatches, trainer.activation_checkpointing and trainer.offload, and at"
        " other processes on the machine"
    ),
    "sync": "look at the parts time/sync_gather_s to time/sync_verify_s",
    STEP: (
        "look at the phases, and at time/environment_s: the prediction takes reward checks as"
        " hidden behind sampling"
    ),
}
_FASTER = "the figures of the hardware may be too low: measure again with sixfold plan --measure"


@dataclass(frozen=True)
class Phase:
    """One phase, in seconds per step.

    Attributes:
        name: name of the phase, or "step".
        predicted: predicted seconds.
        measured: median of the measured seconds. NaN if not measured.
        deviates: the difference is an alarm.
    """

    name: str
    predicted: float
    measured: float
    deviates: bool

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted. None if nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Comparison:
    """Phases of some steps, and the lengths for which they were predicted.

    Attributes:
        phases: rollout, reference, trainer, sync and the step.
        lengths: mean tokens of prompts, of completions and of the longest completion of a step.
            None: not measured. Then the assumed lengths were used.
        trained_share: share of the samples' tokens that the trainer computes.
    """

    phases: Sequence[Phase]
    lengths: Lengths | None
    trained_share: float


def step_figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a comparison needs of one step: seconds by phase, and lengths in tokens.

    Returns:
        The same keys for every step. A number is NaN if it was not logged, a phase if none of its
        parts was.
    """
    found = {phase: _sum(metrics, roles) for phase, roles in _ROLES.items()}
    if "time/reference_s" not in metrics and "time/scoring_s" not in metrics:
        found["reference"] = 0.0  # a run without them has no such phase
    mean, tokens = _number(metrics, "rollout/length_mean"), _number(metrics, "rollout/tokens")
    turns = _number(metrics, "rollout/turns_mean") if "rollout/turns_mean" in metrics else 1.0
    # Discarded samples count in both sums, so their quotient is the number of all completions.
    return {
        **found,
        # In a run ahead, replies count in the step in which they arrive. In some, none does.
        "replies": turns * tokens / mean if mean else math.nan,
        "prompts": _number(metrics, "rollout/prompt_tokens"),
        "mean": mean,
        "longest": _number(metrics, "rollout/length_max"),
        "check": _number(metrics, "time/check_p50_s"),
        "trained": _number(metrics, "train/tokens"),
    }


def compare(prediction: Prediction, steps: Sequence[Mapping[str, float]]) -> Comparison:
    """Compare a prediction with steps of the run.

    Args:
        steps: `step_figures` of at least one step.
    """
    means = {
        key: fmean(step[key] for step in steps) for key in ("prompts", "replies", "mean", "longest")
    }
    known = all(map(math.isfinite, means.values())) and means["replies"] > 0
    check = _middle(step["check"] for step in steps)
    check = check if math.isfinite(check) else 0.0
    lengths = None
    if known:
        prompt = means["prompts"] / means["replies"]
        lengths = Lengths(prompt, means["mean"], means["longest"], check)
    trained = _middle(step["trained"] for step in steps)
    share = trained / prediction.trained_tokens(lengths)
    share = share if known and math.isfinite(share) else 1.0
    predicted = prediction.seconds(lengths, share)
    whole = predicted[STEP]
    phases = []
    for name in (*PHASES, STEP):
        measured, expected = _middle(step[name] for step in steps), predicted[name]
        off = abs(measured - expected)  # NaN deviates from nothing
        phases.append(
            Phase(name, expected, measured, off > LIMIT * expected and off > NOTICEABLE * whole)
        )
    return Comparison(phases, lengths, share)


def alarm_line(phase: Phase, comparison: Comparison, steps: int) -> str:
    """The alarm about a phase that deviates: how much, for which lengths, and what to look at.

    Args:
        steps: number of steps that were compared.
    """
    remedy = _SLOWER[phase.name] if phase.measured > phase.predicted else _FASTER
    subject = "a step" if phase.name == STEP else phase.name
    share = "more than" if phase.ratio is None else f"{percent(phase.ratio, 0)} of"
    return (
        f"{subject} takes {share} the predicted time: {number(phase.measured)} s, predicted"
        f" {number(phase.predicted)} s (median of {steps} steps, {lengths_text(comparison)});"
        f" {remedy}"
    )


def lengths_text(comparison: Comparison) -> str:
    lengths = comparison.lengths
    if lengths is None:
        return "for the lengths assumed before the run"
    text = (
        f"for the measured lengths: prompts of {number(lengths.prompt)} tokens, completions of"
        f" {number(lengths.mean)}, the longest {number(lengths.longest)}"
    )
    if lengths.check >= LEAST_CHECK_S:
        text += f", checks of {number(lengths.check)} s"
    share = percent(comparison.trained_share, 0)
    return text if share == "100%" else f"{text}, {share} of the tokens trained on"


def _sum(metrics: Mapping[str, Any], roles: Sequence[str]) -> float:
    """Seconds of some parts of a step. NaN if none was logged."""
    keys = [f"time/{role}_s" for role in roles if f"time/{role}_s" in metrics]
    return sum(_number(metrics, key) for key in keys) if keys else math.nan


def _middle(values: Iterable[float]) -> float:
    """Median of the values that are known. NaN if none is."""
    known = [value for value in values if math.isfinite(value)]
    return median(known) if known else math.nan


def _number(metrics: Mapping[str, Any], key: str) -> float:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) else math.nan
