"""The environment role: rewards for groups of trajectories, even if reward functions fail.

Invariants: a scored trajectory has a `Reward`, and a trajectory that already had one keeps it. If a
check raises, hangs, crashes or returns no finite number, the value of its reward is None, never 0,
and no other trajectory is affected. If too many checks fail, the run stops and names the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import TracebackType

from ..environment.callables import callable_name, check_callable
from ..environment.registry import reward_row
from ..environment.resource import Started
from ..environment.rewards import NAMED, RewardCallable, RewardFunction, needs_judge
from ..environment.sampled import Shown
from ..environment.solved import reward_labels, solved_rule, spec_name
from ..errors import UserError
from ..event_loop import run_blocking
from ..types import Group
from .cache import OutcomeCache
from .prints import Prints
from .queue import WorkerPool
from .scorer import LocalReward, NamedReward, StepScorer, together
from .step_ends import Decode


class Environment:
    """Scores trajectories by one or several rewards.

    The value is the sum of weight x reward. `parts` holds every reward by name, unweighted. Use it
    in a `with` block or call `close`.

    Args:
        rewards: names as `load_reward` takes them, Python callables or `RewardFunction`s. Named
            rewards run in `workers` processes. A callable runs in this process and cannot be
            stopped if it hangs, unless it is async. Name it as `module:function` to apply
            `timeout_s`.
        weights: one per reward. Empty: 1 each.
        timeout_s: seconds per check. For a TRL function a check is one group.
        error_budget: share of the checks of a step that may fail.
        workers: number of processes for named rewards.
        metric: which score decides whether a completion is solved, see `solved`.
        solved_at: the score that counts as solved, see `solved`.
        judge: gives the rewards that need one (`judge_*`). The caller closes it.
        prints: gets what the rewards print. None: it goes to the terminal. The caller closes it.

    Attributes:
        shown: converts token ids to text, for the rendered prompt and for rewards of other
            frameworks. None: they get the prompt's and the completion's own text.
        decode: text of sampled token ids, as rewards read it. None: steps of grades are ignored.
        solved_rule: when a completion counts as solved.

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
        judge: Started | None = None,
        prints: Prints | None = None,
    ) -> None:
        if weights and len(weights) != len(rewards):
            raise UserError(
                f"environment.weights has {len(weights)} entries for {len(rewards)} rewards. Give"
                " one per reward, or none"
            )
        for reward in rewards:
            if isinstance(reward, str):
                NAMED.check(reward)
            elif not isinstance(reward, RewardFunction):
                check_callable(reward)
        labels = reward_labels(
            [spec_name(r) if isinstance(r, str) else _name(r) for r in rewards],
            [r if isinstance(r, str) else "" for r in rewards],
        )
        weights = list(weights) or [1.0] * len(rewards)
        functions = [_function_here(reward, judge) for reward in rewards]
        self.shown: Shown | None = None
        self.decode: Decode | None = None
        of_steps = [
            n for n, r in zip(labels, rewards, strict=True) if getattr(r, "of_steps", False)
        ]
        self.solved_rule = solved_rule(labels, weights, metric, solved_at, of_steps)
        self._error_budget = error_budget
        self._judge = judge if any(f and f.row.needs == "judge" for f in functions) else None
        self._started = [f.started for f in functions if f and f.started]
        named = [r for r in rewards if isinstance(r, str) and not reward_row(r).needs]
        self._pool = WorkerPool(
            [NAMED.absolute(spec) for spec in named],
            workers=workers,
            timeout_s=timeout_s,
            output=prints.descriptor if prints else None,
        )
        cache, index = OutcomeCache(), count()
        self._rewards = [
            LocalReward(label, weight, cache, function, timeout_s, prints)
            if function
            else NamedReward(label, weight, cache, self._pool, next(index))
            for label, weight, function in zip(labels, weights, functions, strict=True)
        ]

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name in `Reward.parts`."""
        return {reward.label: reward.weight for reward in self._rewards}

    def start(self) -> None:
        """Start the processes without waiting.

        Call it early: rewards then load while the model loads.
        """
        if self._judge:
            self._judge.start()
        for one in self._started:
            one.start()
        self._pool.start()

    def scorer(self, expected: int, error_budget: float | None = None) -> StepScorer:
        """A scorer for the trajectories of one step. They share one error budget.

        Args:
            expected: number of trajectories of the step.
            error_budget: replaces the environment's error budget.
        """
        return StepScorer(
            self._rewards,
            self.solved_rule,
            expected=expected,
            share=self._error_budget if error_budget is None else error_budget,
            shown=self.shown,
            decode=self.decode,
        )

    def score(self, groups: Sequence[Group], *, error_budget: float | None = None) -> None:
        """Fill `trajectory.reward` of every trajectory that has none, and wait for it.

        Args:
            error_budget: replaces the environment's error budget.

        Raises:
            RewardBudgetExceeded: if too many checks fail. Some rewards are then not filled in.
        """
        unscored = sum(t.reward is None for group in groups for t in group.trajectories)
        scorer = self.scorer(unscored, error_budget)
        try:
            run_blocking(together(scorer.finish(group) for group in groups))
        finally:
            self._pool.leave()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        for one in self._started:
            one.close()
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


def _function_here(reward: str | RewardCallable, judge: Started | None) -> RewardFunction | None:
    """The function of a reward that is called in this process. None for others.

    Raises:
        UserError: if there is no judge for it, or if its settings for this reward are wrong.
    """
    if isinstance(reward, RewardFunction):
        return reward
    if not isinstance(reward, str):
        return RewardFunction(_name(reward), reward)
    row = reward_row(reward)
    if not row.needs:
        return None
    if judge is None:
        raise needs_judge(reward)
    return RewardFunction(reward, NAMED.load(reward)(judge), row)


def _name(reward: RewardCallable) -> str:
    return reward.name if isinstance(reward, RewardFunction) else callable_name(reward)
