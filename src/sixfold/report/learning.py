"""Alarms for a run that does not learn as it should.

There are three, from the training rewards and the held-out evaluations:

- the reward rises while the share of solved tasks does not: partial credit is being exploited;
- held-out accuracy falls below the start, beyond the first evaluation's interval;
- nothing has been learned after `PATIENCE` steps.

Training figures vary between steps, so means over `WINDOW` steps are compared. A difference counts
only if it is several times its standard error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from .metric import Value
from .numbers import percent, percent_range

WINDOW = 20
"""Steps per mean."""
PATIENCE = 50
"""Steps after which the run should have learned something."""
MEMORY = 100
"""Steps of history. Only these are compared, so solved tasks that stopped rising 500 steps ago are
also noticed."""
CLEAR = 4.0
"""Standard errors above which the reward has clearly risen."""
SLIGHT = 2.0
"""Standard errors below which a rise (of solved tasks, or of the reward) does not count."""
LEAST_RISE = 0.02
"""Minimum rise of the reward for an alarm."""
NEARLY_ALL = 0.95
"""Share of solved tasks above which there is little left to learn."""

PARTIAL_CREDIT = (
    "Try a reward that is 0 unless the answer is right, a smaller weight for the parts that rise,"
    " or more warm-up (sft.steps). Read the samples in the report."
)
FELL = (
    "Try a smaller trainer.learning_rate, algorithm.beta > 0 to stay near the starting policy, or"
    " an earlier checkpoint. Check the reward."
)
NOT_LEARNING = (
    "Try a larger trainer.learning_rate, more rollout.samples_per_prompt, tasks that are solved"
    " 10% to 80% of the time, or more warm-up (sft.steps)."
)


@dataclass
class Learning:
    """Checks each step's metrics, in step order.

    Args:
        first: the held-out evaluation before RL as (accuracy, low, high). None: use the first
            evaluation seen.
    """

    first: tuple[float, float, float] | None = None
    _rewards: list[float] = field(default_factory=list)
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _ringing: set[str] = field(default_factory=set)
    _quiet_until: dict[str, int] = field(default_factory=dict)
    _best: float = -1.0

    def observe(self, metrics: Mapping[str, Value]) -> list[str]:
        """Lines of the alarms that start with this step. Each repeats only after it has cleared."""
        reward = _number(metrics, "dynamic/reward_mean", "reward/mean")
        solved = _number(metrics, "dynamic/solved_frac", "reward/solved_frac")
        if reward is not None:
            self._rewards.append(reward)
            self._recent.append((reward, solved if solved is not None else math.nan))
        said = [
            self._ring("partial", self._partial_credit()),
            self._ring("fell", self._fell(metrics)),
            self._ring("still", self._standing_still()),
        ]
        return [line for line in said if line]

    def replay(self, records: Sequence[Mapping[str, Value]]) -> None:
        """Process the metrics of steps before a resume, so that their alarms are not repeated."""
        for record in records:
            self.observe(record)

    def _partial_credit(self) -> str | None:
        """Alarm if the reward has clearly risen, but the share of solved tasks has not."""
        if len(self._recent) < 2 * WINDOW:
            return None
        earlier, last = list(self._recent)[:WINDOW], list(self._recent)[-WINDOW:]
        before, now = ([solved for _, solved in steps] for steps in (earlier, last))
        if any(map(math.isnan, [*before, *now])) or fmean(now) >= NEARLY_ALL:
            return None
        rewards = [reward for reward, _ in earlier], [reward for reward, _ in last]
        rise, error = _rise(*rewards)
        more_solved, solved_error = _rise(before, now)
        if rise <= max(CLEAR * error, LEAST_RISE) or more_solved > SLIGHT * solved_error:
            return None
        return (
            f"the mean reward rose from {fmean(rewards[0]):.3g} to {fmean(rewards[1]):.3g}, but the"
            f" share of solved tasks did not ({percent_range(fmean(before), fmean(now))}): the"
            f" policy collects partial credit. {PARTIAL_CREDIT}"
        )

    def _fell(self, metrics: Mapping[str, Value]) -> str | None:
        """Alarm if held-out accuracy has fallen below its start.

        This evaluation must be below the first one's interval, and the first value above this
        interval.
        """
        accuracy, low, high = (
            _number(metrics, f"heldout/{end}") for end in ("accuracy", "low", "high")
        )
        if accuracy is None or low is None or high is None:
            return KEEP if "fell" in self._ringing else None
        self.first = self.first or (accuracy, low, high)
        self._best = max(self._best, accuracy)
        began, began_low, began_high = self.first
        if accuracy >= began_low or high >= began:
            return None
        return (
            f"held-out accuracy fell from {percent(began)} ({percent_range(began_low, began_high)})"
            f" at the start to {percent(accuracy)} ({percent_range(low, high)}): training makes the"
            f" model worse. {FELL}"
        )

    def _standing_still(self) -> str | None:
        """Alarm if neither the reward nor any evaluation is above its start."""
        if len(self._rewards) < PATIENCE:
            return None
        first, last = self._rewards[:WINDOW], self._rewards[-WINDOW:]
        rise, error = _rise(first, last)
        solved = [share for _, share in list(self._recent)[-WINDOW:] if not math.isnan(share)]
        if (
            rise > SLIGHT * error
            or (solved and fmean(solved) >= NEARLY_ALL)
            or (self.first and self._best > self.first[2])
        ):
            return None
        return (
            f"no clear gain in {len(self._rewards)} steps: the mean reward was {fmean(first):.3g}"
            f" at the start and is {fmean(last):.3g} now. {NOT_LEARNING}"
        )

    def _ring(self, name: str, line: str | None) -> str | None:
        """The line if the alarm is new.

        It is new if it is not active and was not raised in the last MEMORY steps with a reward.
        """
        new = (
            line is not None
            and name not in self._ringing
            and len(self._rewards) >= self._quiet_until.get(name, 0)
        )
        if line is None:
            self._ringing.discard(name)
        else:
            self._ringing.add(name)
        if new and name != "fell":  # evaluations are too few to flicker
            self._quiet_until[name] = len(self._rewards) + MEMORY
        return line if new else None


KEEP = "still so"
"""Placeholder that keeps an alarm active in a step without an evaluation."""


def _rise(before: Sequence[float], now: Sequence[float]) -> tuple[float, float]:
    """Difference of the means, and its standard error."""
    return fmean(now) - fmean(before), math.sqrt(
        variance(before) / len(before) + variance(now) / len(now)
    )


def _number(metrics: Mapping[str, Value], *keys: str) -> float | None:
    """Value of the first of the keys that holds a finite number."""
    values = (metrics.get(key) for key in keys)
    return next((float(v) for v in values if isinstance(v, float | int) and math.isfinite(v)), None)
