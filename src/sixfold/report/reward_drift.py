"""Alarm for a learned reward that drifts: its mean moves although nothing else says why.

A reward model is a function that was learned on other replies, so its scale may move as the policy
does. Beside a verifier under one baseline, such a drift decides the sign of the verifier's
advantages. A rise may also be what training is for. So a movement upwards counts only if a verifier
is trained beside the reward model and its mean does not rise; one downwards always counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from .metric import Value

PART, STD = "reward/part/", "reward/part_std/"
LEARNED = ("reward_model", "judge_", "prm")
"""Starts of the names of rewards that a model gives."""
SPAN = 100
"""Steps whose means are fitted by a line."""
DRIFT = 0.1
"""Standard deviations of the reward per 1,000 steps above which its mean drifts."""
CLEAR = 5.0
"""Standard errors by which a slope differs from 0 for an alarm."""
SLIGHT = 2.0
"""Standard errors by which the slope of a verifier shows that the policy has learned."""


class Slope(NamedTuple):
    """Least-squares slope of a series, and its standard error, per step."""

    slope: float
    error: float


def fitted_slope(values: Sequence[float]) -> Slope:
    """Slope of the line through at least 3 values with equal distances."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values)) / spread
    rest = sum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    return Slope(slope, math.sqrt(rest / (len(values) - 2) / spread))


@dataclass
class RewardDrift:
    """Checks the parts of the reward, step by step. A resume replays the metrics file."""

    _means: dict[str, deque[float]] = field(default_factory=dict)
    _stds: dict[str, deque[float]] = field(default_factory=dict)
    _ringing: set[str] = field(default_factory=set)

    def observe(self, metrics: Mapping[str, Value]) -> list[str]:
        """Lines of the alarms that start with this step. Each repeats only after it has cleared."""
        for prefix, kept in ((PART, self._means), (STD, self._stds)):
            for key, value in metrics.items():
                if not key.startswith(prefix) or not isinstance(value, int | float):
                    continue
                name = key.removeprefix(prefix)
                if math.isfinite(value):
                    kept.setdefault(name, deque(maxlen=SPAN)).append(float(value))
        found = {
            name: drift for name in self._rewards() if (drift := self._drift(name)) is not None
        }
        new = [name for name in found if name not in self._ringing]
        self._ringing = set(found)
        return [
            f"the mean of the learned reward '{name}' drifts by {found[name]:+.2g} standard"
            f" deviations per 1,000 steps (last {SPAN} steps), and no verifier rises with it. Keep"
            " its scale apart: algorithm.whiten = 'source', environment.reward_model.limit, or"
            " data.whole_steps; or train the reward model again on replies of this policy"
            for name in new
        ]

    def replay(self, records: Sequence[Mapping[str, Value]]) -> None:
        """Process the metrics of steps before a resume, so that their alarms are not repeated."""
        for record in records:
            self.observe(record)

    def _rewards(self) -> list[str]:
        """Names of the rewards, without figures beside a reward such as `prm.steps`."""
        names = self._means.keys()
        return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]

    def _drift(self, name: str) -> float | None:
        """Drift in standard deviations per 1,000 steps. None: not learned, not clear, or small."""
        means, stds = self._means[name], self._stds.get(name, ())
        if not name.startswith(LEARNED) or len(means) < SPAN or not any(stds):
            return None
        slope, error = fitted_slope(means)
        drift = 1000 * slope / fmean(stds)
        if abs(drift) <= DRIFT or abs(slope) <= CLEAR * error:
            return None
        return drift if slope < 0 or self._verifiers_stand_still() else None

    def _verifiers_stand_still(self) -> bool:
        """True if there are verifiers, and none of them rises."""
        slopes = [
            fitted_slope(self._means[name])
            for name in self._rewards()
            if not name.startswith(LEARNED) and len(self._means[name]) == SPAN
        ]
        return bool(slopes) and all(slope <= SLIGHT * error for slope, error in slopes)
