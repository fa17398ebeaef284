"""Scores the trajectories of one step as they end: checks of each reward, and their results."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..environment.base import Tally
from ..environment.callables import FOREIGN, Form, takes_groups
from ..environment.grade import MAX_REWARD, Grade, plain_value
from ..environment.group_form import OtherRewards
from ..environment.rewards import RewardFunction, reward_loop
from ..environment.sampled import Sampled, Shown
from ..environment.solved import SolvedRule
from ..types import NOT_APPLICABLE, Group, Reward, Task, Trajectory
from .budget import ErrorBudget
from .cache import OutcomeCache
from .check import Check, Outcome, RewardInfo
from .prints import Prints
from .queue import WorkerPool
from .step_ends import Decode, token_steps
from .worker import run_async_check, run_check


@dataclass(frozen=True)
class CheckedReward(ABC):
    """A reward of an environment, and where its checks run.

    Attributes:
        label: name by which it is logged.
        cache: outcomes of rewards that are marked with `cached`.
    """

    label: str
    weight: float
    cache: OutcomeCache

    @abstractmethod
    async def info(self) -> RewardInfo:
        """What the reward is, once it is loaded.

        Raises:
            UserError: if it cannot be loaded.
        """

    @abstractmethod
    async def run(self, check: Check) -> Outcome:
        """Run a check once."""

    @property
    def repeats_itself(self) -> bool:
        """True if a model elsewhere gives the reward. It repeats failed requests itself."""
        return False

    async def outcome(self, check: Check) -> tuple[Outcome, int]:
        """Outcome of one check, which runs once more if it fails.

        A check that took too long does not run again: it would probably take too long again. A
        reward with `cached` is not called again for the same completion of the same task.

        Returns:
            The outcome, and how often the check ran again.
        """
        reruns = 0

        async def run() -> Outcome:
            nonlocal reruns
            first = await self.run(check)
            if self.repeats_itself or not first.may_succeed_again:
                return first
            reruns = 1
            return (await self.run(check)).completed_by(first)

        if version := (await self.info()).version:
            key = f"{self.label} {version}"
            return await self.cache.outcome(key, check.task, check.completions[0], run), reruns
        return await run(), reruns


@dataclass(frozen=True)
class NamedReward(CheckedReward):
    """A reward whose checks run in the processes of a pool, as the one with this index."""

    pool: WorkerPool
    index: int

    async def info(self) -> RewardInfo:
        return (await self.pool.rewards())[self.index]

    async def run(self, check: Check) -> Outcome:
        return await self.pool.check(check._replace(reward=self.index))


@dataclass(frozen=True)
class LocalReward(CheckedReward):
    """A function that is called in this process.

    Attributes:
        timeout_s: seconds per check, if it is async.
        prints: gets what it prints. None: it goes to the terminal.
    """

    function: RewardFunction
    timeout_s: float
    prints: Prints | None

    @property
    def repeats_itself(self) -> bool:
        return self.function.repeats_itself

    async def info(self) -> RewardInfo:
        return RewardInfo.of(self.function)

    async def run(self, check: Check) -> Outcome:
        capturing = self.prints.capturing if self.prints else nullcontext
        if not self.function.runs_async:
            with capturing():
                return run_check(self.function, check)

        async def run_there() -> Outcome:
            with capturing():
                return await run_async_check(self.function, check, self.timeout_s)

        run = run_there()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run, reward_loop()))


@dataclass(frozen=True)
class Result:
    """Result of one reward for one trajectory.

    Attributes:
        given: number or grade. None if the reward does not apply, or if its check failed.
        error: how the check failed, on one line, or None.
        seconds: duration of the check.
        reruns: how often the check ran again after a failure.
        cached: whether it is the result of an earlier check.
        steps: rewards of steps, as `Reward.steps` has them.
    """

    given: float | Grade | None
    error: str | None
    seconds: float
    reruns: int = 0
    cached: bool = False
    steps: tuple[tuple[int, float], ...] = ()

    @property
    def grade(self) -> Grade | None:
        """The grade. None if the reward gave no verdict or does not apply."""
        if isinstance(self.given, Grade):
            return self.given if self.given.verdict else None
        return None if self.error is None else Grade(None, "infrastructure_error")


def combined(results: Sequence[tuple[str, float, Result]], rule: SolvedRule) -> Reward:
    """The reward of a trajectory: the sum of weight x value, with its parts and its verdict.

    Args:
        results: (name, weight, result) of each reward, in the order in which values are added. A
            float sum depends on it.
    """
    parts: dict[str, float] = {}
    weights: dict[str, float] = {}
    metrics: dict[str, float] = {}
    steps: list[tuple[int, float]] = []
    total = 0.0
    for name, weight, result in results:
        value = plain_value(result.given)
        if result.error is None and value is not None:
            parts[name], weights[name] = value, weight
            total += weight * value
            if weight:
                steps += [(at, weight * step) for at, step in result.steps]
            if isinstance(result.given, Grade):
                metrics |= {f"{name}.{key}": number for key, number in result.given.metrics.items()}
    decider = rule.decider(parts)
    grade = _deciding_grade(results, decider)
    reward = Reward(
        None,
        {**metrics, **parts},
        seconds=sum(result.seconds for _, _, result in results),
        verdict=grade.verdict if grade else None,
        detail=grade.detail if grade else "",
        isolation=grade.isolation if grade else "",
        weights={**dict.fromkeys(metrics, 0.0), **weights},
        decided_by=decider,
        latency={name: result.seconds for name, _, result in results},
        reruns=sum(result.reruns for _, _, result in results),
        cached=sum(result.cached for _, _, result in results),
    )
    errors = [f"{name}: {result.error}" for name, _, result in results if result.error is not None]
    if not errors and not parts:
        return replace(reward, error=NOT_APPLICABLE)
    if not errors and (not math.isfinite(total) or abs(total) > MAX_REWARD):
        errors = [f"the weighted sum {total:g} is beyond {MAX_REWARD:g}"]
    if not errors and any(abs(step) > MAX_REWARD for _, step in steps):
        errors = [f"the weighted reward of a step is beyond {MAX_REWARD:g}"]
    if errors:
        return replace(reward, error="; ".join(errors), verdict="infrastructure_error")
    score = rule.score(total, parts)
    solved = None if score is None else rule.solves(score, parts)
    return replace(reward, value=total, steps=tuple(steps), score=score, solved=solved)


def _deciding_grade(results: Sequence[tuple[str, float, Result]], decider: str) -> Grade | None:
    """The grade whose verdict a trajectory gets, see `Reward.verdict`.

    Args:
        results: as in `combined`.
        decider: name of the reward that decides whether the trajectory is solved. "": their sum.
    """
    every = [(name, result.grade) for name, _, result in results]
    given = [grade for _, grade in every if grade is not None]
    failed = [grade for grade in given if grade.failed]
    if decider and not failed:
        return next(grade for name, grade in every if name == decider)
    faulty = [grade for grade in given if grade.verdict != "passed"]
    return next(iter([*failed, *faulty, *given]), None)


@dataclass
class _Pending:
    """A trajectory whose checks run, and its results so far by index of the reward.

    It is held here because its `id` is the key.
    """

    trajectory: Trajectory
    results: dict[int, Result] = field(default_factory=dict)


class StepScorer:
    """Scorer of one step (`base.Scorer`).

    Args:
        expected: number of trajectories of the step.
        share: share of the checks that may fail.
        shown: converts token ids to text, for the rendered prompt and for rewards of other
            frameworks. None: they get the prompt's and the completion's own text.
        decode: text of sampled token ids, as rewards read it. None: steps of grades are ignored.
    """

    def __init__(
        self,
        rewards: Sequence[CheckedReward],
        rule: SolvedRule,
        *,
        expected: int,
        share: float,
        shown: Shown | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._decode = decode
        self._rewards = rewards
        self._local = [i for i, r in enumerate(rewards) if isinstance(r, LocalReward)]
        self._named = [i for i in range(len(rewards)) if i not in self._local]
        self._rule = rule
        self._budget = ErrorBudget(share, len(rewards), expected)
        self._shown = shown
        self._rendered: dict[tuple[int, ...], str] = {}
        self._pending: dict[int, _Pending] = {}
        self._forms: list[Form] = []
        self._single: list[int] = []
        self._over_groups: list[int] = []

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        if trajectory.reward is not None:
            self._fill_score(trajectory, trajectory.reward)
            return
        if id(trajectory) in self._pending:
            return
        self._budget.begin()
        self._pending[id(trajectory)] = _Pending(trajectory)
        try:
            if not self._forms:
                await self._load()
            await self._check(self._single, task, [trajectory])
        except BaseException:
            self._pending.pop(id(trajectory), None)
            raise
        if not self._over_groups:
            self._settle(trajectory)

    async def finish(self, group: Group) -> None:
        new = [
            self.add(group.task, trajectory)
            for trajectory in group.trajectories
            if trajectory.reward is None and id(trajectory) not in self._pending
        ]
        await together(new)
        waiting = [trajectory for trajectory in group.trajectories if trajectory.reward is None]
        if not waiting:
            return
        if any(len(self._pending[id(t)].results) < len(self._single) for t in waiting):
            raise RuntimeError(f"task {group.task.id}: finish was called before add had returned")
        await self._check(self._over_groups, group.task, waiting)
        for trajectory in waiting:
            self._settle(trajectory)

    def fail(self, trajectory: Trajectory, line: str) -> None:
        trajectory.reward = Reward.failed(line)
        self._budget.spend_all(line)

    def tally(self) -> Tally:
        return self._budget.tally()

    def count(self, others: Sequence[Tally]) -> None:
        self._budget.add(others)

    def _fill_score(self, trajectory: Trajectory, given: Reward) -> None:
        """Fill in the score of a reward that the environment gave."""
        total = trajectory.total_reward
        if total is None or given.score is not None:
            return
        score = self._rule.score(total, given.parts)
        solved = None if score is None else self._rule.solves(score, given.parts)
        trajectory.reward = replace(given, score=score, solved=solved)

    async def _load(self) -> None:
        """Wait for the rewards. Sort them: those of single completions, and those over groups."""
        forms = [(await reward.info()).form for reward in self._rewards]
        # Those in processes start first: they run while this process calls the others.
        starts = [*self._named, *self._local]
        self._single = [i for i in starts if not takes_groups(forms[i])]
        self._over_groups = [i for i in starts if takes_groups(forms[i])]
        self._forms = forms

    async def _check(
        self, rewards: Sequence[int], task: Task, trajectories: Sequence[Trajectory]
    ) -> None:
        if not rewards:
            return
        check = Check(
            0,
            task,
            [],
            self._sampled(task, trajectories),
            tuple(map(self._others, trajectories)) if rewards is self._over_groups else (),
        )
        runs = []
        for index in rewards:
            texts = [self._text(self._forms[index], trajectory) for trajectory in trajectories]
            runs.append(self._run(index, check._replace(completions=texts), trajectories))
        # A single check gets no task of its own: a step may have thousands of them.
        await (runs[0] if len(runs) == 1 else together(runs))

    async def _run(self, index: int, check: Check, trajectories: Sequence[Trajectory]) -> None:
        name = self._rewards[index].label
        outcome, reruns = await self._rewards[index].outcome(check)
        values = outcome.values or [None] * len(trajectories)
        seconds = outcome.seconds / len(trajectories)
        failed: Counter[str] = Counter()
        for trajectory, value in zip(trajectories, values, strict=True):
            error = outcome.error
            steps: tuple[tuple[int, float], ...] = ()
            if isinstance(value, Grade) and value.failed:
                error = value.detail or value.verdict
            elif isinstance(value, Grade) and value.steps:
                try:
                    steps = self._token_steps(value, self._forms[index], trajectory)
                except ValueError as problem:
                    error, value = str(problem), None
            result = Result(value, error, seconds, reruns, outcome.cached, steps)
            self._pending[id(trajectory)].results[index] = result
            if error is not None:
                failed[f"{name}: {error}"] += 1
        for line, count in failed.items():
            self._budget.spend(count, line)

    def _text(self, form: Form, trajectory: Trajectory) -> str:
        """Text of a completion, as a reward of this form reads it.

        A function of another framework gets what that framework decodes: no think tag before the
        completion, and the stop string that ended it. OpenRLHF keeps special tokens.
        """
        if form not in FOREIGN or trajectory.graded is not None:
            return trajectory.graded_text
        if self._shown is None:
            return trajectory.text
        tokens, start = trajectory.tokens, trajectory.prompt_length
        if form != "openrlhf":
            return self._shown(tokens[start:], special=False)
        whole, prompt = self._shown(tokens), self._shown(tokens[:start])
        # Some tokenizers decode the first token after the prompt without its space.
        return whole[len(prompt) :] if whole.startswith(prompt) else self._shown(tokens[start:])

    def _token_steps(
        self, grade: Grade, form: Form, trajectory: Trajectory
    ) -> tuple[tuple[int, float], ...]:
        """Steps of a grade, by their last tokens. For the errors see `step_ends.token_steps`."""
        text, decode, opened = self._text(form, trajectory), self._decode, trajectory.opened
        if form in FOREIGN and self._shown:
            decode, opened = partial(self._shown, special=form == "openrlhf"), ""
        return token_steps(grade.steps, text, trajectory, decode, opened) if decode else ()

    def _settle(self, trajectory: Trajectory) -> None:
        trajectory.reward = self._reward_so_far(trajectory)
        del self._pending[id(trajectory)]

    def _others(self, trajectory: Trajectory) -> OtherRewards:
        """Results of the rewards for single completions, for rewards over groups."""
        reward = self._reward_so_far(trajectory)
        return OtherRewards(reward.parts, reward.solved, reward.verdict)

    def _reward_so_far(self, trajectory: Trajectory) -> Reward:
        """The reward of a trajectory, from the results that are known."""
        results = self._pending[id(trajectory)].results
        order = [*self._local, *self._named]  # a float sum depends on it
        known = [(self._rewards[i], results[i]) for i in order if i in results]
        return combined([(r.label, r.weight, result) for r, result in known], self._rule)

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
            max(0, *(max(trajectory.version) for trajectory in trajectories)),
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
