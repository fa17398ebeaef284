"""Held-out evaluation: completions of tasks that training never saw, scored by the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ..checks.environment import Environment
from ..environment.base import EnvironmentRole
from ..errors import UserError
from ..event_loop import EventLoop
from ..report.verdicts import verdict_counts
from ..rollout.base import Rollout, groups_in_order
from ..types import Group, Reward, Task
from .statistics import Interval, pass_at_k, task_interval

SOURCE_TASKS = 16
"""Minimum tasks of a source in an evaluation. With fewer, its figure would be noise and is
omitted.
"""


@dataclass(frozen=True)
class Evaluation:
    """Scored groups of held-out tasks.

    Attributes:
        strict: the same groups, scored by the verifier `eval.strict`. Empty: there is none.
    """

    groups: list[Group]
    strict: list[Group] = field(default_factory=list)

    @property
    def version(self) -> int:
        """Version of the weights that were measured, as stamped on the sampled tokens.

        Raises:
            UserError: if nothing was sampled, because every environment failed at its start.
            RuntimeError: if tokens were sampled from different versions.
        """
        found = {
            v
            for g in self.groups
            for t in g.trajectories
            for v, m in zip(t.version, t.mask, strict=True)
            if m
        }
        if not found:
            errors = (r.error for rewards in self._rewards() for r in rewards if r.error)
            raise UserError(
                "nothing was sampled in an evaluation, because every environment failed at its"
                f" start: {next(errors, 'no error was recorded')}. Correct environment.episode"
            )
        if len(found) != 1:
            raise RuntimeError(
                f"an evaluation must sample from one version of the weights, found {sorted(found)}"
            )
        return found.pop()

    @property
    def values(self) -> list[list[float]]:
        """Per task: 1 for each solved sample, 0 for every other sample, failed checks included."""
        return _solved_by_task(self.groups)

    @property
    def by_source(self) -> dict[str, float]:
        """Share solved per `Task.source` with at least `SOURCE_TASKS` tasks.

        Empty for one source.
        """
        found: dict[str, list[float]] = {}
        for group, values in zip(self.groups, self.values, strict=True):
            found.setdefault(group.task.source, []).append(fmean(values))
        shares = {name: fmean(of) for name, of in sorted(found.items()) if len(of) >= SOURCE_TASKS}
        return shares if len(found) > 1 else {}

    @property
    def interval(self) -> Interval:
        """Share solved (mean over tasks of each task's share) with its 95 % interval."""
        return task_interval(self.values)

    @property
    def score(self) -> Interval | None:
        """Mean of the metric (`eval.metric`) with its 95 % interval. None if nothing was scored."""
        return _interval(
            [[r.score for r in rewards if r.score is not None] for rewards in self._rewards()]
        )

    @property
    def reward(self) -> Interval | None:
        """Mean of the reward that is trained on, with its 95 % interval.

        None if nothing was scored.
        """
        return _interval([[value for value in g.rewards if value is not None] for g in self.groups])

    @property
    def parts(self) -> dict[str, float]:
        """Mean of each reward by name, before its weight, over the samples that have it."""
        rewards = [r for of_task in self._rewards() for r in of_task]
        names = sorted({name for r in rewards for name in r.parts})
        return {name: fmean([r.parts[name] for r in rewards if name in r.parts]) for name in names}

    @property
    def errors(self) -> int:
        """Samples whose check failed."""
        missing = sum(r is None for group in self.groups for r in group.rewards)
        return missing - self.not_applicable

    @property
    def not_applicable(self) -> int:
        """Samples to which no reward applies. They count as not solved."""
        return sum(r.not_applicable for of_task in self._rewards() for r in of_task)

    @property
    def verdicts(self) -> dict[str, int]:
        """Number of samples with each verdict. Empty if the rewards give plain numbers."""
        return verdict_counts(t.reward for g in self.groups for t in g.trajectories)

    @property
    def strict_share(self) -> float | None:
        """Share that the strict verifier counts as solved, over the samples that it could check.

        None if there is no strict verifier.
        """
        return self._both()[1]

    @property
    def strict_gap(self) -> float | None:
        """Share solved minus that of the strict verifier, over the samples that both checked."""
        usual, strict = self._both()
        return None if usual is None or strict is None else usual - strict

    def pass_at(self, k: int) -> float:
        """pass@k: unbiased probability that at least one of k samples solves a task, mean over
        tasks.
        """
        return self.pass_interval(k).mean

    def pass_interval(self, k: int) -> Interval:
        """pass@k with its 95 % interval over tasks."""
        return task_interval([[pass_at_k(len(v), int(sum(v)), k)] for v in self.values])

    def metrics(self) -> dict[str, float]:
        accuracy, score = self.interval, self.score
        found = {
            "heldout/accuracy": accuracy.mean,
            "heldout/low": accuracy.low,
            "heldout/high": accuracy.high,
        }
        found |= {"heldout/score": score.mean} if score else {}
        if self.strict_share is not None and self.strict_gap is not None:
            found |= {"heldout/strict": self.strict_share, "heldout/strict_gap": self.strict_gap}
        found |= {f"heldout/source/{name}": share for name, share in self.by_source.items()}
        samples = sum(len(group.trajectories) for group in self.groups)
        found |= {f"heldout/verdict/{name}": n / samples for name, n in self.verdicts.items()}
        return found | {"heldout/version": float(self.version)}

    def _both(self) -> tuple[float | None, float | None]:
        """Shares solved by the usual and by the strict verifier, over samples that both checked."""
        pairs = [
            (float(bool(usual.reward.solved)), float(bool(strict.reward.solved)))
            for mine, theirs in zip(self.groups, self.strict, strict=False)
            for usual, strict in zip(mine.trajectories, theirs.trajectories, strict=True)
            if usual.reward and strict.reward and strict.reward.value is not None
            if usual.reward.value is not None
        ]
        if not pairs:
            return None, None
        return fmean([usual for usual, _ in pairs]), fmean([strict for _, strict in pairs])

    def _rewards(self) -> list[list[Reward]]:
        return [[t.reward for t in g.trajectories if t.reward] for g in self.groups]


def evaluate(
    rollout: Rollout,
    environment: EnvironmentRole,
    tasks: Sequence[Task],
    seed: int,
    loop: EventLoop,
    strict: Environment | None = None,
) -> Evaluation:
    """Sample and score held-out tasks.

    Args:
        rollout: plays episodes; it decides samples per task and temperature.
        strict: scores the finished trajectories once more, by a verifier that training never uses.
    """
    scorer = environment.scorer(len(tasks) * rollout.samples)
    groups = loop.run(groups_in_order(rollout.play(tasks, seed, scorer), tasks))
    if strict is None:
        return Evaluation(groups)
    unscored = [
        replace(group, trajectories=[replace(t, reward=None) for t in group.trajectories])
        for group in groups
    ]
    strict.score(unscored)
    return Evaluation(groups, unscored)


def _solved_by_task(groups: Sequence[Group]) -> list[list[float]]:
    return [[float(bool(t.reward and t.reward.solved)) for t in g.trajectories] for g in groups]


def _interval(samples: Sequence[Sequence[float]]) -> Interval | None:
    known = [task for task in samples if task]
    return task_interval(known) if known else None
