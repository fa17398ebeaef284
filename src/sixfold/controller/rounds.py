"""Rounds of sampling within a step, and metrics over several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..environment.base import Scorer
from ..rollout.base import Choose, Rollout, groups_in_order
from ..types import Group, Task

_MEAN_OVER = {
    "rollout/reused_frac": "rollout/prompt_tokens",
    "rollout/kept_mean": "rollout/tokens",
    "rollout/kept_mass_frac": "rollout/tokens",
}
"""Means whose denominator is a number of tokens, not the number of trajectories."""

_SUMS = {
    "rollout/tokens",
    "rollout/prompt_tokens",
    "rollout/preemptions",
    "rollout/recomputed_tokens",
    "rollout/swapped_bytes",
    "async/running",
    "async/buffered",
}
_PEAKS = {"rollout/length_max", "rollout/kv_peak_frac", "rollout/queue_peak", "async/age_max"}


class StaleGroup(RuntimeError):
    """A group was sampled from other weights than the step allows."""


@dataclass(frozen=True)
class Round:
    """One call of a rollout.

    Attributes:
        groups: scored groups, in the order of their tasks.
        stats: metrics of the rollout for this call.
        sample_s: seconds until the last token.
        check_s: seconds from then until the last check.
    """

    groups: list[Group]
    stats: dict[str, float]
    sample_s: float
    check_s: float

    @property
    def trajectories(self) -> int:
        return sum(len(g.trajectories) for g in self.groups)


class Rounds:
    """Rounds of one step. They share a scorer, and so one error budget.

    Args:
        scorer: scores every trajectory of the step.
        on_phase: called with "rollout" when a round starts, and with "environment" when its last
            token has been sampled.

    Attributes:
        done: the rounds so far.
    """

    def __init__(self, scorer: Scorer, on_phase: Callable[[str], None]) -> None:
        self._scorer = scorer
        self._on_phase = on_phase
        self.done: list[Round] = []

    async def play(
        self,
        rollout: Rollout,
        tasks: Sequence[Task],
        seed: int,
        choose: Choose | None = None,
        scorer: Scorer | None = None,
    ) -> Round:
        """Sample and score one round.

        Args:
            rollout: plays the episodes.
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.
            choose: ends groups early. None: groups have all samples.
            scorer: scores this round alone. None: that of the step.

        Raises:
            StaleGroup: a token was sampled from other weights than the sampler's current ones.
        """
        last_token: list[float] = []

        def on_sampled() -> None:
            last_token.append(time.perf_counter())
            self._on_phase("environment")

        began = time.perf_counter()
        self._on_phase("rollout")
        stream = rollout.play(tasks, seed, scorer or self._scorer, choose, on_sampled)
        groups = await groups_in_order(stream, tasks)
        for group in groups:
            _check_fresh(group, rollout.version)
        ended = time.perf_counter()
        sampled = last_token[0] if last_token else ended
        self.done.append(Round(groups, rollout.stats(), sampled - began, ended - sampled))
        return self.done[-1]

    @property
    def seconds(self) -> dict[str, float]:
        return {
            "time/rollout_s": sum(r.sample_s for r in self.done),
            "time/environment_s": sum(r.check_s for r in self.done),
        }


def joined(groups: list[Group], rounds: Sequence[Round]) -> Round:
    """Several rounds as one, of which only these groups are kept."""
    if len(rounds) == 1:
        return replace(rounds[0], groups=groups)
    sampling, checks = sum(r.sample_s for r in rounds), sum(r.check_s for r in rounds)
    return Round(groups, merged_stats(rounds), sampling, checks)


def _check_fresh(group: Group, version: int) -> None:
    """Raise StaleGroup unless all tokens of a group were sampled by this version of the weights."""
    found = {v for t in group.trajectories for v in t.version if v >= 0}
    if found - {version}:
        raise StaleGroup(
            f"task {group.task.id} was sampled from weights of version {sorted(found)}, but the"
            f" sampler has version {version}, and no staleness is allowed"
        )


def merged_stats(rounds: Sequence[Round]) -> dict[str, float]:
    """Metrics of several rounds of one rollout.

    Counts are added, peaks are maxima, and shares and means are weighted averages.
    """
    merged: dict[str, float] = {}
    for key in rounds[0].stats:
        values = [r.stats[key] for r in rounds]
        if key in _SUMS:
            merged[key] = sum(values)
        elif key in _PEAKS:
            merged[key] = max(values)
        elif key == "rollout/tok_s":
            merged[key] = sum(r.stats["rollout/tokens"] for r in rounds) / max(
                sum(r.sample_s for r in rounds), 1e-9
            )
        else:
            weights = [
                r.stats[_MEAN_OVER[key]] if key in _MEAN_OVER else r.trajectories for r in rounds
            ]
            merged[key] = sum(w * v for w, v in zip(weights, values, strict=True)) / max(
                sum(weights), 1
            )
    return merged
