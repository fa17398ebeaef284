"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): replace groups whose rewards are equal.

A group whose rewards are all equal gives no gradient. `Refill` is a rollout role that combines a
rollout and an environment. After each round, every slot with such a group gets another task, until
all groups are mixed or the rounds are used up.

The extra tasks depend only on the tasks of the step, its seed and the weights. No state is saved,
and a resumed run draws the same tasks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ..environment.base import EnvironmentRole
from ..rollout.base import Rollout
from ..types import Group, Task
from .mixture import weighted_order
from .stream import step_seed

_MEAN_OVER = {
    "rollout/reused_frac": "rollout/prompt_tokens",
    "rollout/kept_mean": "rollout/tokens",
    "rollout/kept_mass_frac": "rollout/tokens",
}
"""Means whose denominator is a number of tokens, not the number of trajectories."""


@dataclass(frozen=True)
class _Round:
    """One call of the inner rollout.

    Attributes:
        groups: scored groups.
        stats: metrics of the inner rollout for this call.
        sample_s: seconds spent on sampling.
        check_s: seconds spent on scoring.
    """

    groups: list[Group]
    stats: dict[str, float]
    sample_s: float
    check_s: float

    @property
    def trajectories(self) -> int:
        return sum(len(g.trajectories) for g in self.groups)


class Refill:
    """Rollout that returns scored groups with unequal rewards, if `max_rounds` rounds suffice.

    Round 1 samples the tasks of the step with the seed of the step. Each later round has its own
    seed and samples one new task per open slot, never one already sampled in this step. A slot that
    is never filled keeps its original group, so a step always has as many groups as tasks.

    Args:
        inner: rollout that samples.
        environment: scores the samples.
        tasks: all tasks of the run, from which new ones are drawn.
        max_rounds: maximum calls of `inner` per step. 1: nothing is replaced.
        weights: source name to weight, as in `MixtureStream`. Empty: all tasks have the same
            chance.

    Raises:
        ValueError: if `max_rounds` is less than 1.
    """

    def __init__(
        self,
        inner: Rollout,
        environment: EnvironmentRole,
        tasks: Sequence[Task],
        max_rounds: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, got {max_rounds}")
        self._inner = inner
        self._environment = environment
        self._tasks = tasks
        self._max_rounds = max_rounds
        self._weights = weights or {}
        self._stats: dict[str, float] = {}

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """One scored group per slot.

        Slot i holds the group of `tasks[i]`, or the mixed group that replaced it. The first mixed
        group of a round goes to the first open slot.
        """
        rounds = [self._round([], tasks, seed)]
        slots = list(rounds[0].groups)
        open_slots = deque(i for i, group in enumerate(slots) if not mixed(group))
        further = self._further(tasks, seed)
        while (
            open_slots
            and len(rounds) < self._max_rounds
            and (chosen := list(islice(further, len(open_slots))))
        ):
            rounds.append(self._round(rounds, chosen, step_seed(seed, len(rounds) + 1)))
            for group in filter(mixed, rounds[-1].groups):
                slots[open_slots.popleft()] = group
        self._stats = _rollout_stats(rounds) | _dynamic_stats(rounds, slots)
        return slots

    def stats(self) -> dict[str, float]:
        """Metrics of the last call.

        They are the inner rollout's metrics over all rounds, and the cost of refilling.
        """
        return self._stats

    def _round(self, before: Sequence[_Round], tasks: Sequence[Task], seed: int) -> _Round:
        began = time.perf_counter()
        groups = self._inner.generate(tasks, seed)
        sampled = time.perf_counter()
        # Score together with earlier rounds: otherwise one or two failed checks of a small late
        # round would exceed the error budget.
        self._environment.score([*_all_groups(before), *groups])
        return _Round(groups, self._inner.stats(), sampled - began, time.perf_counter() - sampled)

    def _further(self, tasks: Sequence[Task], seed: int) -> Iterator[Task]:
        """Tasks outside the step, in an order drawn from its seed.

        Yields at most as many as the rounds can use.
        """
        taken = {task.id for task in tasks}
        count = min(len(self._tasks), len(tasks) * (self._max_rounds - 1) + len(taken))
        for i in weighted_order(self._tasks, count, f"{seed}/refill", self._weights):
            if self._tasks[i].id not in taken:
                yield self._tasks[i]


def mixed(group: Group) -> bool:
    """True if two known rewards of the group differ. Failed checks have no reward."""
    return (
        len(
            {
                (t.reward.value, t.step_rewards)
                for t in group.trajectories
                if t.reward and t.reward.value is not None
            }
        )
        > 1
    )


def _all_groups(rounds: Sequence[_Round]) -> list[Group]:
    return [group for r in rounds for group in r.groups]


def _tokens(groups: Sequence[Group]) -> float:
    return float(sum(t.sampled_length for g in groups for t in g.trajectories))


def _rollout_stats(rounds: Sequence[_Round]) -> dict[str, float]:
    """Merge the inner metrics of the rounds of a step.

    Counts are added, peaks are maxima, and shares and means are weighted averages.
    """
    merged: dict[str, float] = {}
    for key in rounds[0].stats:
        values = [r.stats[key] for r in rounds]
        if key in (
            "rollout/tokens",
            "rollout/prompt_tokens",
            "rollout/preemptions",
            "rollout/recomputed_tokens",
            "rollout/swapped_bytes",
        ):
            merged[key] = sum(values)
        elif key in ("rollout/length_max", "rollout/kv_peak_frac", "rollout/queue_peak"):
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


def _dynamic_stats(rounds: Sequence[_Round], kept: Sequence[Group]) -> dict[str, float]:
    groups = _all_groups(rounds)
    kept_trajectories = sum(len(g.trajectories) for g in kept)
    begun = sum(r.trajectories / r.stats.get("rollout/kept_frac", 1.0) for r in rounds)
    dropped = (
        _tokens(groups)
        - _tokens(kept)
        + sum(r.stats.get("rollout/dropped_tokens", 0.0) for r in rounds)
    )
    stats = {
        "rollout/kept_frac": kept_trajectories / begun,
        "rollout/dropped_tokens": dropped,
        "dynamic/rounds": float(len(rounds)),
        "dynamic/extra_frac": sum(r.trajectories for r in rounds) / kept_trajectories - 1,
        "dynamic/kept_frac": sum(map(mixed, groups)) / len(groups),
        "dynamic/unfilled": float(sum(not mixed(g) for g in kept)),
        "dynamic/check_s": sum(r.check_s for r in rounds),
    }
    known = [value for g in groups for value in g.rewards if value is not None]
    judged = [
        t.reward.solved
        for g in groups
        for t in g.trajectories
        if t.reward and t.reward.solved is not None
    ]
    stats |= {"dynamic/reward_mean": sum(known) / len(known)} if known else {}
    return stats | ({"dynamic/solved_frac": sum(judged) / len(judged)} if judged else {})
