"""Scores the trajectories of one step as they end: checks, results and the error budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UserError
from ..types import Group, Reward, Task, Trajectory
from .base import Tally
from .checks import Check
from .combine import Result, combined
from .grade import Grade
from .group_form import Standing
from .reward_set import RewardSet
from .sampled import Sampled
from .solved import SolvedRule


class RewardBudgetExceeded(UserError):
    """More checks failed than the error budget allows: the rewards of this step are meaningless."""


@dataclass
class ErrorBudget:
    """Failed checks of one step.

    It raises as soon as the budget is exceeded: a reward that always hangs then costs seconds, not
    hours.

    Attributes:
        share: share of the checks that may fail.
        checks: number of checks of the step.
        failed: number of failed checks.
        failures: number of failed checks and the error of each failure.
    """

    share: float
    checks: int
    failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def spend(self, count: int, line: str) -> None:
        """Count failed checks.

        Raises:
            RewardBudgetExceeded: if too many checks have failed.
        """
        self.failed += count
        self.failures.append((count, line))
        if self.failed > self.share * self.checks:
            counts: Counter[str] = Counter()
            for number, reason in self.failures:
                counts[reason] += number
            shown = " | ".join(f"{number} x {reason}" for reason, number in counts.most_common(3))
            raise RewardBudgetExceeded(
                f"{self.failed} of {self.checks} reward checks failed (verdict"
                " infrastructure_error), more than environment.error_budget ="
                f" {self.share:g} allows: {shown}. Correct the rewards, or raise the budget."
            )


@dataclass
class _Open:
    """A trajectory whose checks run, and its results so far by index of the reward."""

    trajectory: Trajectory
    results: dict[int, Result] = field(default_factory=dict)


class StepScorer:
    """Scorer of one step (`base.Scorer`).

    Args:
        rewards: the rewards.
        rule: when a completion counts as solved.
        expected: number of trajectories of the step.
        share: share of the checks that may fail.
        shown: converts token ids to text, for rewards that ask for the rendered prompt. None: they
            get the prompt's own text.
    """

    def __init__(
        self,
        rewards: RewardSet,
        rule: SolvedRule,
        *,
        expected: int,
        share: float,
        shown: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._rewards = rewards
        self._rule = rule
        self._budget = ErrorBudget(share, expected * len(rewards.weights))
        self._added = 0
        self._told = (0, 0)
        self._shown = shown
        self._rendered: dict[tuple[int, ...], str] = {}
        self._open: dict[int, _Open] = {}
        self._single: list[int] = []
        self._over_groups: list[int] = []
        self._known = False

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        """Run the rewards that score single completions (`base.Scorer.add`)."""
        if trajectory.reward is not None:
            self._judge(trajectory, trajectory.reward)
            return
        if id(trajectory) in self._open:
            return
        self._count()
        self._open[id(trajectory)] = _Open(trajectory)
        try:
            if not self._known:
                await self._learn()
            await self._check(self._single, task, [trajectory])
        except BaseException:
            self._open.pop(id(trajectory), None)
            raise
        if not self._over_groups:
            self._settle(trajectory)

    async def finish(self, group: Group) -> None:
        """Run the rewards that score whole groups (`base.Scorer.finish`)."""
        new = [
            self.add(group.task, trajectory)
            for trajectory in group.trajectories
            if trajectory.reward is None and id(trajectory) not in self._open
        ]
        await together(new)
        waiting = [trajectory for trajectory in group.trajectories if trajectory.reward is None]
        if not waiting:
            return
        if any(len(self._open[id(t)].results) < len(self._single) for t in waiting):
            raise RuntimeError(f"task {group.task.id}: finish was called before add had returned")
        await self._check(self._over_groups, group.task, waiting)
        for trajectory in waiting:
            self._settle(trajectory)

    def fail(self, trajectory: Trajectory, line: str) -> None:
        """Record that a trajectory cannot be scored (`base.Scorer.fail`)."""
        self._count()
        trajectory.reward = Reward.failed(line)
        # None of its checks can run.
        self._budget.spend(len(self._rewards.weights), line)

    def tally(self) -> Tally:
        """Counts of this scorer since the last call (`base.Scorer.tally`)."""
        added, failures = self._told
        self._told = self._added, len(self._budget.failures)
        return Tally(self._added - added, tuple(self._budget.failures[failures:]))

    def count(self, others: Sequence[Tally]) -> None:
        """Add the counts of other ranks (`base.Scorer.count`)."""
        for tally in others:
            self._count(tally.trajectories)
        for tally in others:
            for count, line in tally.failed:
                self._budget.spend(count, line)
        self._told = self._added, len(self._budget.failures)

    def _judge(self, trajectory: Trajectory, given: Reward) -> None:
        """Fill in the score of a reward that the environment gave."""
        total = trajectory.total_reward
        if total is None or given.score is not None:
            return
        score = self._rule.score(total, given.parts)
        solved = None if score is None else self._rule.solves(score)
        trajectory.reward = replace(given, score=score, solved=solved)

    def _count(self, trajectories: int = 1) -> None:
        self._added += trajectories
        self._budget.checks = max(self._budget.checks, self._added * len(self._rewards.weights))

    async def _learn(self) -> None:
        """Sort the rewards: those of single completions, and those over groups."""
        over_groups = await self._rewards.over_groups()
        self._single = [i for i in self._rewards.starts if not over_groups[i]]
        self._over_groups = [i for i in self._rewards.starts if over_groups[i]]
        self._known = True

    async def _check(
        self, rewards: Sequence[int], task: Task, trajectories: Sequence[Trajectory]
    ) -> None:
        """Run one check per reward, and record the outcomes."""
        if not rewards:
            return
        check = Check(
            0,
            task,
            [trajectory.graded_text for trajectory in trajectories],
            self._sampled(task, trajectories),
            tuple(map(self._standing, trajectories)) if rewards is self._over_groups else (),
        )
        runs = [self._run(index, check, trajectories) for index in rewards]
        # A single check gets no task of its own: a step may have thousands of them.
        await (runs[0] if len(runs) == 1 else together(runs))

    async def _run(self, index: int, check: Check, trajectories: Sequence[Trajectory]) -> None:
        """Run one check, and record its outcome for its trajectories."""
        name = self._rewards.labels[index]
        outcome, reruns = await self._rewards.checked(index, check)
        values = outcome.values or [None] * len(trajectories)
        seconds = outcome.seconds / len(trajectories)
        failed: Counter[str] = Counter()
        for trajectory, value in zip(trajectories, values, strict=True):
            error = outcome.error
            if isinstance(value, Grade) and value.failed:
                error = value.detail or value.verdict
            result = Result(value, error, seconds, reruns, outcome.cached)
            self._open[id(trajectory)].results[index] = result
            if error is not None:
                failed[f"{name}: {error}"] += 1
        for line, count in failed.items():
            self._budget.spend(count, line)

    def _settle(self, trajectory: Trajectory) -> None:
        trajectory.reward = self._so_far(trajectory)
        del self._open[id(trajectory)]

    def _standing(self, trajectory: Trajectory) -> Standing:
        """Results of the rewards for single completions, for rewards over groups."""
        reward = self._so_far(trajectory)
        return Standing(reward.parts, reward.solved, reward.verdict)

    def _so_far(self, trajectory: Trajectory) -> Reward:
        """The reward of a trajectory, from the results that are known."""
        rewards, results = self._rewards, self._open[id(trajectory)].results
        known = [index for index in rewards.order if index in results]
        every = [(rewards.labels[i], rewards.weights[i], results[i]) for i in known]
        return combined(every, self._rule)

    def _sampled(self, task: Task, trajectories: Sequence[Trajectory]) -> Sampled:
        starts = [trajectory.prompt_length for trajectory in trajectories]
        prompt = trajectories[0].tokens[: starts[0]]
        rendered = task.prompt_text
        if self._shown:
            key = tuple(prompt)
            if key not in self._rendered:  # the samples of a task share their prompt
                self._rendered[key] = self._shown(prompt)
            rendered = self._rendered[key]
        return Sampled(
            [trajectory.finish_reason for trajectory in trajectories],
            [t.tokens[start:] for t, start in zip(trajectories, starts, strict=True)],
            prompt,
            rendered,
        )


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
