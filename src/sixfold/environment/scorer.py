"""The environment role: rewards for groups of trajectories, whatever the reward functions do.

`Environment` turns groups into checks, and outcomes into `Reward`s. `pool` runs the checks of named
rewards in killable processes. `rewards` calls the functions.

Invariants: after `score` every trajectory has a `Reward`, and a trajectory that already had one
keeps it. If a check raises, hangs, crashes or returns no finite number, the value of its reward is
None, never 0, and no other trajectory is affected. If too many checks fail, the run stops with the
reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType

from ..errors import UserError
from ..types import Group, Reward, Trajectory
from .callables import callable_name, check_callable
from .pool import WorkerPool
from .rewards import MAX_REWARD, RewardCallable, RewardFunction, check_spec
from .sampled import Sampled
from .solved import SolvedRule, reward_labels, solved_rule, spec_name
from .worker import Check, Outcome, run_check

NOT_APPLICABLE = "no reward function applies"
"""Error of a trajectory to which no reward function applies. No check failed."""


class RewardBudgetExceeded(UserError):
    """More checks failed than the error budget allows: the rewards of this step are meaningless."""


@dataclass
class _Verdict:
    """Rewards of one trajectory so far."""

    parts: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    value: float = 0.0

    def reward(self, rule: SolvedRule) -> Reward:
        if self.errors or not self.parts:
            return Reward(None, self.parts, "; ".join(self.errors) or NOT_APPLICABLE, self.seconds)
        if not math.isfinite(self.value) or abs(self.value) > MAX_REWARD:
            return Reward(
                None,
                self.parts,
                f"the weighted sum {self.value:g} is beyond {MAX_REWARD:g}",
                self.seconds,
            )
        score = rule.score(self.value, self.parts)
        return Reward(
            self.value,
            self.parts,
            None,
            self.seconds,
            score=score,
            solved=None if score is None else rule.solves(score),
        )


class Environment:
    """Scores trajectories by one or several rewards.

    The value is the sum of weight x reward. `parts` holds every reward by name, unweighted. Use it
    in a `with` block or call `close`.

    Args:
        rewards: names as `load_reward` takes them, or Python callables. Named rewards run in
            `workers` processes. A callable runs in this process and cannot be stopped if it hangs;
            name it as `module:function` to apply `timeout_s`.
        weights: one per reward. Empty: 1 each.
        timeout_s: seconds per check. For a TRL function a check is one group.
        error_budget: share of the checks of one `score` call that may fail.
        workers: number of processes for named rewards.
        metric: which score decides whether a completion is solved, see `solved`.
        solved_at: the score that counts as solved, see `solved`.

    Raises:
        UserError: for an unknown reward name, an invalid callable, a wrong number of weights, or a
            `metric` that names no reward.
    """

    def __init__(
        self,
        rewards: Sequence[str | RewardCallable],
        *,
        weights: Sequence[float] = (),
        timeout_s: float = 5.0,
        error_budget: float = 0.1,
        workers: int = 1,
        metric: str = "",
        solved_at: float = 1.0,
    ) -> None:
        if weights and len(weights) != len(rewards):
            raise UserError(
                f"environment.weights has {len(weights)} entries for {len(rewards)} rewards. Give"
                " one per reward, or none"
            )
        named = [reward for reward in rewards if isinstance(reward, str)]
        for spec in named:
            check_spec(spec)
        for reward in rewards:
            if not isinstance(reward, str):
                check_callable(reward)
        self.shown: Callable[[Sequence[int]], str] | None = None
        """Converts token ids to text, for rewards that ask for the rendered prompt. None: they get
        the prompt's own text.
        """
        self._weights = list(weights) or [1.0] * len(rewards)
        self._error_budget = error_budget
        self._pool = WorkerPool(named, workers=workers, timeout_s=timeout_s) if named else None
        self._local = {
            index: RewardFunction(callable_name(reward), reward)
            for index, reward in enumerate(rewards)
            if not isinstance(reward, str)
        }
        self._named = [index for index, reward in enumerate(rewards) if isinstance(reward, str)]
        specs = ["" if callable(reward) else reward for reward in rewards]
        names = [
            callable_name(reward) if callable(reward) else spec_name(reward) for reward in rewards
        ]
        self._labels = reward_labels(names, specs)
        self.solved_rule = solved_rule(self._labels, self._weights, metric, solved_at)

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name in `Reward.parts`."""
        return dict(zip(self._labels, self._weights, strict=True))

    def start(self) -> None:
        """Start the processes without waiting.

        Call it early: rewards then load while the model loads.
        """
        if self._pool:
            self._pool.start()

    def score(
        self, groups: Sequence[Group], *, expected: int = 0, error_budget: float | None = None
    ) -> None:
        """Fill `trajectory.reward` of every trajectory that has none.

        Trajectories that already have a reward are not checked again but count in the error budget,
        as one failed check each if their check failed. So a step whose groups arrive in several
        rounds has one budget, provided that each round is scored with all earlier groups.

        Args:
            groups: trajectories by task.
            expected: total number of trajectories of the step. The budget is a share of it if it is
                larger than the number given.
            error_budget: replaces the environment's error budget.

        Raises:
            RewardBudgetExceeded: if too many checks fail. Rewards are then not filled in.
        """
        given = [trajectory for group in groups for trajectory in group.trajectories]
        groups = _unscored(groups)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        verdicts = [_Verdict() for _ in trajectories]
        share = self._error_budget if error_budget is None else error_budget
        budget = _Budget(
            max(len(given), expected) * len(self._weights), share, failed=sum(map(_failed, given))
        )
        names, takes_groups = self._labels, self._takes_groups()
        for index, function in self._local.items():
            for check, members in _checks(groups, index, takes_groups[index], self.shown):
                self._record(
                    verdicts, members, index, names[index], run_check(function, check), budget
                )
        if self._pool:
            work = list(
                chain.from_iterable(
                    _checks(groups, index, takes_groups[index], self.shown) for index in self._named
                )
            )
            positions = {index: position for position, index in enumerate(self._named)}

            def on_outcome(number: int, outcome: Outcome) -> None:
                check, members = work[number]
                self._record(verdicts, members, check.reward, names[check.reward], outcome, budget)

            self._pool.run(
                [check._replace(reward=positions[check.reward]) for check, _ in work], on_outcome
            )
        for trajectory, verdict in zip(trajectories, verdicts, strict=True):
            trajectory.reward = verdict.reward(self.solved_rule)

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        if self._pool:
            self._pool.close()

    def __enter__(self) -> Environment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _takes_groups(self) -> list[bool]:
        """For each reward in order: True if it is a TRL function."""
        infos = dict(zip(self._named, self._pool.rewards(), strict=True)) if self._pool else {}
        return [
            infos[i].takes_groups if i in infos else self._local[i].takes_groups
            for i in range(len(self._weights))
        ]

    def _record(
        self,
        verdicts: list[_Verdict],
        members: Sequence[int],
        index: int,
        name: str,
        outcome: Outcome,
        budget: _Budget,
    ) -> None:
        """Record the outcome of one check for the trajectories at `members`."""
        for position, member in enumerate(members):
            verdict = verdicts[member]
            verdict.seconds += outcome.seconds / len(members)
            if outcome.error is not None:
                verdict.errors.append(f"{name}: {outcome.error}")
                continue
            value = outcome.values[position]
            if value is not None:
                verdict.parts[name] = value
                verdict.value += self._weights[index] * value
        if outcome.error is not None:
            budget.spend(len(members), f"{name}: {outcome.error}")


@dataclass
class _Budget:
    """Failures of one `score` call.

    It raises as soon as the budget is exceeded: a reward that always hangs then costs seconds, not
    hours.
    """

    checks: int
    share: float
    failed: int = 0
    lines: list[str] = field(default_factory=list)

    def spend(self, count: int, line: str) -> None:
        self.failed += count
        self.lines.append(line)
        if self.failed > self.share * self.checks:
            shown = " | ".join(self.lines[:3])
            raise RewardBudgetExceeded(
                f"{self.failed} of {self.checks} reward checks failed, more than"
                f" environment.error_budget = {self.share:g} allows: {shown}"
            )


def _unscored(groups: Sequence[Group]) -> list[Group]:
    """Groups with only the trajectories that have no reward. Empty groups are omitted."""
    waiting = [
        Group(group.task, [t for t in group.trajectories if t.reward is None]) for group in groups
    ]
    return [group for group in waiting if group.trajectories]


def _failed(trajectory: Trajectory) -> bool:
    """True if an earlier check failed."""
    return trajectory.reward is not None and trajectory.reward.error not in (None, NOT_APPLICABLE)


def _checks(
    groups: Sequence[Group],
    reward: int,
    takes_groups: bool,
    shown: Callable[[Sequence[int]], str] | None,
) -> list[tuple[Check, list[int]]]:
    """Checks of one reward, each with the positions of its trajectories.

    Args:
        groups: trajectories by task.
        reward: index of the reward.
        takes_groups: True if the reward is a TRL function.
        shown: converts token ids to text.
    """
    work: list[tuple[Check, list[int]]] = []
    first = 0
    for group in groups:
        trajectories = group.trajectories
        members = list(range(first, first + len(trajectories)))
        first += len(members)
        prompt = trajectories[0].tokens[: trajectories[0].prompt_length]
        rendered = shown(prompt) if shown else group.task.prompt_text
        for part in [range(len(members))] if takes_groups else [[i] for i in range(len(members))]:
            asked = [trajectories[i] for i in part]
            sampled = Sampled(
                [t.finish_reason for t in asked],
                [_completion_ids(t) for t in asked],
                prompt,
                rendered,
            )
            work.append(
                (
                    Check(reward, group.task, [t.graded_text for t in asked], sampled),
                    [members[i] for i in part],
                )
            )
    return work


def _completion_ids(trajectory: Trajectory) -> list[int]:
    return trajectory.tokens[trajectory.prompt_length :]
