"""Scores the trajectories of one step as they end: checks, verdicts and the error budget."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UserError
from ..types import Group, Reward, Task, Trajectory
from .base import Tally
from .reward_set import RewardSet
from .rewards import MAX_REWARD
from .sampled import Sampled
from .solved import SolvedRule

NOT_APPLICABLE = "no reward function applies"
"""Error of a trajectory to which no reward function applies. No check failed."""


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
            shown = " | ".join(line for _, line in self.failures[:3])
            raise RewardBudgetExceeded(
                f"{self.failed} of {self.checks} reward checks failed, more than"
                f" environment.error_budget = {self.share:g} allows: {shown}"
            )


@dataclass
class _Verdict:
    """Results of one trajectory so far: (value, error, seconds) by index of the reward."""

    trajectory: Trajectory
    results: dict[int, tuple[float | None, str | None, float]] = field(default_factory=dict)

    def reward(self, rewards: RewardSet, rule: SolvedRule) -> Reward:
        """Sum of weight x reward. Rewards are added in a fixed order: a float sum depends on it."""
        parts: dict[str, float] = {}
        errors: list[str] = []
        total = seconds = 0.0
        for index in rewards.order:
            value, error, lasted = self.results[index]
            seconds += lasted
            if error is not None:
                errors.append(f"{rewards.labels[index]}: {error}")
            elif value is not None:
                parts[rewards.labels[index]] = value
                total += rewards.weights[index] * value
        if errors or not parts:
            return Reward(None, parts, "; ".join(errors) or NOT_APPLICABLE, seconds)
        if not math.isfinite(total) or abs(total) > MAX_REWARD:
            line = f"the weighted sum {total:g} is beyond {MAX_REWARD:g}"
            return Reward(None, parts, line, seconds)
        score = rule.score(total, parts)
        solved = None if score is None else rule.solves(score)
        return Reward(total, parts, None, seconds, score=score, solved=solved)


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
        self._verdicts: dict[int, _Verdict] = {}
        self._single: list[int] = []
        self._over_groups: list[int] = []
        self._known = False

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        """Run the rewards that score single completions (`base.Scorer.add`)."""
        if trajectory.reward is not None:
            self._judge(trajectory, trajectory.reward)
            return
        if id(trajectory) in self._verdicts:
            return
        self._count()
        self._verdicts[id(trajectory)] = _Verdict(trajectory)
        try:
            if not self._known:
                await self._learn()
            await self._check(self._single, task, [trajectory])
        except BaseException:
            self._verdicts.pop(id(trajectory), None)
            raise
        if not self._over_groups:
            self._settle(trajectory)

    async def finish(self, group: Group) -> None:
        """Run the rewards that score whole groups (`base.Scorer.finish`)."""
        new = [
            self.add(group.task, trajectory)
            for trajectory in group.trajectories
            if trajectory.reward is None and id(trajectory) not in self._verdicts
        ]
        await together(new)
        waiting = [trajectory for trajectory in group.trajectories if trajectory.reward is None]
        if not waiting:
            return
        if any(len(self._verdicts[id(t)].results) < len(self._single) for t in waiting):
            raise RuntimeError(f"task {group.task.id}: finish was called before add had returned")
        await self._check(self._over_groups, group.task, waiting)
        for trajectory in waiting:
            self._settle(trajectory)

    def fail(self, trajectory: Trajectory, line: str) -> None:
        """Record that a trajectory cannot be scored (`base.Scorer.fail`)."""
        self._count()
        trajectory.reward = Reward(None, error=line)
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
        texts = [trajectory.graded_text for trajectory in trajectories]
        sampled = self._sampled(task, trajectories)
        runs = [self._run(index, task, trajectories, texts, sampled) for index in rewards]
        # A single check gets no task of its own: a step may have thousands of them.
        await (runs[0] if len(runs) == 1 else together(runs))

    async def _run(
        self,
        index: int,
        task: Task,
        trajectories: Sequence[Trajectory],
        texts: list[str],
        sampled: Sampled,
    ) -> None:
        """Run one check, and record its outcome for its trajectories."""
        outcome = await self._rewards.check(index, task, texts, sampled)
        values = outcome.values or [None] * len(trajectories)
        seconds = outcome.seconds / len(trajectories)
        for trajectory, value in zip(trajectories, values, strict=True):
            verdict = self._verdicts[id(trajectory)]
            verdict.results[index] = (value, outcome.error, seconds)
        if outcome.error is not None:
            line = f"{self._rewards.labels[index]}: {outcome.error}"
            self._budget.spend(len(trajectories), line)

    def _settle(self, trajectory: Trajectory) -> None:
        trajectory.reward = self._verdicts.pop(id(trajectory)).reward(self._rewards, self._rule)

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
