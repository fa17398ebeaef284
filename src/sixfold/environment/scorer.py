"""The environment role: rewards for groups of trajectories, even if reward functions fail.

`Environment` makes scorers. A scorer (`step_scorer`) turns trajectories into checks, and outcomes
into `Reward`s. `reward_set` knows where each reward runs: `pool` runs the checks of named rewards
in killable processes. `rewards` calls the functions.

Invariants: a scored trajectory has a `Reward`, and a trajectory that already had one keeps it. If a
check raises, hangs, crashes or returns no finite number, the value of its reward is None, never 0,
and no other trajectory is affected. If too many checks fail, the run stops and names the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from ..types import Group
from .blocking import run_blocking
from .judge.judge import Judge
from .reward_set import RewardSet
from .rewards import RewardCallable
from .step_scorer import StepScorer, together


class Environment:
    """Scores trajectories by one or several rewards.

    The value is the sum of weight x reward. `parts` holds every reward by name, unweighted. Use it
    in a `with` block or call `close`.

    Args:
        rewards: names as `load_reward` takes them, or Python callables. Named rewards run in
            `workers` processes. A callable runs in this process and cannot be stopped if it hangs,
            unless it is async. Name it as `module:function` to apply `timeout_s`.
        weights: one per reward. Empty: 1 each.
        timeout_s: seconds per check. For a TRL function a check is one group.
        error_budget: share of the checks of a step that may fail.
        workers: number of processes for named rewards.
        metric: which score decides whether a completion is solved, see `solved`.
        solved_at: the score that counts as solved, see `solved`.
        judge: gives the rewards of `JUDGES`. The caller closes it.

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
        judge: Judge | None = None,
    ) -> None:
        self.shown: Callable[[Sequence[int]], str] | None = None
        """Converts token ids to text, for rewards that ask for the rendered prompt. None: they get
        the prompt's own text.
        """
        self._error_budget = error_budget
        self._rewards = RewardSet(
            rewards, weights=weights, timeout_s=timeout_s, workers=workers, judge=judge
        )
        self.solved_rule = self._rewards.solved_rule(metric, solved_at)

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name in `Reward.parts`."""
        return dict(zip(self._rewards.labels, self._rewards.weights, strict=True))

    def start(self) -> None:
        """Start the processes without waiting.

        Call it early: rewards then load while the model loads.
        """
        self._rewards.start()

    def scorer(self, expected: int) -> StepScorer:
        """A scorer for the trajectories of one step. They share one error budget.

        Args:
            expected: number of trajectories of the step.
        """
        return self._scorer(expected, self._error_budget)

    def score(self, groups: Sequence[Group], *, error_budget: float | None = None) -> None:
        """Fill `trajectory.reward` of every trajectory that has none, and wait for it.

        Args:
            groups: trajectories by task.
            error_budget: replaces the environment's error budget.

        Raises:
            RewardBudgetExceeded: if too many checks fail. Some rewards are then not filled in.
        """
        unscored = sum(t.reward is None for group in groups for t in group.trajectories)
        share = self._error_budget if error_budget is None else error_budget
        scorer = self._scorer(unscored, share)
        try:
            run_blocking(together(scorer.finish(group) for group in groups))
        finally:
            self._rewards.leave()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._rewards.close()

    def _scorer(self, expected: int, share: float) -> StepScorer:
        return StepScorer(
            self._rewards,
            self.solved_rule,
            expected=expected,
            share=share,
            shown=self.shown,
        )

    def __enter__(self) -> Environment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
