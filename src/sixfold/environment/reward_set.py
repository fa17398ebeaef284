"""The rewards of an environment: their names and weights, and where each one runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from ..errors import UserError
from .cache import OutcomeCache
from .callables import callable_name, check_callable
from .checks import Check, Outcome, run_async_check, run_check
from .judge.judge import Judge
from .pool import WorkerPool
from .rewards import JUDGES, REWARDS, RewardCallable, RewardFunction, needs_judge
from .solved import SolvedRule, reward_labels, solved_rule, spec_name
from .values import reward_loop


class RewardSet:
    """One or several rewards. Named rewards run in processes, callables in this process.

    Args:
        rewards: names as `load_reward` takes them, or Python callables.
        weights: one per reward. Empty: 1 each.
        timeout_s: seconds per check of a named reward or an async callable.
        workers: number of processes for named rewards.
        judge: gives the rewards of `JUDGES`, in this process. It is not closed.

    Attributes:
        labels: name of each reward, by which it is logged.
        weights: weight of each reward.
        order: indices of the rewards, in the order in which their values are added up.
        starts: the same indices, in the order in which checks start: first the named rewards, which
            run in processes while callables run here.

    Raises:
        UserError: for an unknown reward name, an invalid callable, or a wrong number of weights.
    """

    def __init__(
        self,
        rewards: Sequence[str | RewardCallable],
        *,
        weights: Sequence[float],
        timeout_s: float,
        workers: int,
        judge: Judge | None = None,
    ) -> None:
        if weights and len(weights) != len(rewards):
            raise UserError(
                f"environment.weights has {len(weights)} entries for {len(rewards)} rewards. Give"
                " one per reward, or none"
            )
        for reward in rewards:
            if isinstance(reward, str):
                REWARDS.check(reward)
            else:
                check_callable(reward)
        named = [
            (index, spec)
            for index, spec in enumerate(rewards)
            if isinstance(spec, str) and spec not in JUDGES
        ]
        self.weights = list(weights) or [1.0] * len(rewards)
        self._local = {
            index: _judged(reward, judge)
            if isinstance(reward, str)
            else RewardFunction(callable_name(reward), reward)
            for index, reward in enumerate(rewards)
            if not isinstance(reward, str) or reward in JUDGES
        }
        self._judge = judge if any(f.asks_judge for f in self._local.values()) else None
        self._timeout_s = timeout_s
        specs = [spec for _, spec in named]
        self._pool = WorkerPool(specs, workers=workers, timeout_s=timeout_s) if named else None
        self._cache = OutcomeCache()
        self._versions: dict[int, str] = {}
        self._positions = {index: position for position, (index, _) in enumerate(named)}
        self.order = [*self._local, *self._positions]
        self.starts = [*self._positions, *self._local]
        self.labels = reward_labels(
            [spec_name(r) if isinstance(r, str) else callable_name(r) for r in rewards],
            [r if isinstance(r, str) else "" for r in rewards],
        )

    def solved_rule(self, metric: str, solved_at: float) -> SolvedRule:
        """Rule by which a completion counts as solved, see `solved`."""
        return solved_rule(self.labels, self.weights, metric, solved_at)

    def start(self) -> None:
        """Start the processes without waiting."""
        if self._judge:
            self._judge.start()
        if self._pool:
            self._pool.start()

    async def over_groups(self) -> list[bool]:
        """For each reward in order: True if it scores whole groups.

        Raises:
            UserError: if a named reward cannot be loaded.
        """
        infos = await self._pool.rewards() if self._pool else []
        every = [
            self._local[index] if index in self._local else infos[self._positions[index]]
            for index in range(len(self.weights))
        ]
        self._versions = {index: info.version for index, info in enumerate(every) if info.version}
        return [info.takes_groups for info in every]

    async def checked(self, index: int, check: Check) -> tuple[Outcome, int]:
        """Outcome of one check, which runs once more if it fails.

        A check that took too long does not run again: it would probably take too long again. A
        judge repeats its requests itself. A reward with `cached` is not called again for the same
        completion of the same task.

        Args:
            index: the reward. A named reward runs in a process, a callable here.
            check: the check.

        Returns:
            The outcome, and how often the check ran again.
        """
        reruns = 0

        async def run() -> Outcome:
            nonlocal reruns
            first = await self._check(index, check)
            judged = index in self._local and self._local[index].asks_judge
            if judged or not first.may_succeed_again:
                return first
            reruns = 1
            return (await self._check(index, check)).completed_by(first)

        if version := self._versions.get(index):
            key, text = f"{self.labels[index]} {version}", check.completions[0]
            return await self._cache.outcome(key, check.task, text, run), reruns
        return await run(), reruns

    def _check(self, index: int, check: Check) -> Awaitable[Outcome]:
        """Outcome of one run of a check. It starts when it is awaited."""
        if function := self._local.get(index):
            return self._call(function, check)
        assert self._pool is not None
        return self._pool.check(check._replace(reward=self._positions[index]))

    async def _call(self, function: RewardFunction, check: Check) -> Outcome:
        if not function.runs_async:
            return run_check(function, check)
        run = run_async_check(function, check, self._timeout_s)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run, reward_loop()))

    def leave(self) -> None:
        """End the use of the event loop. Processes that are still busy are ended."""
        if self._pool:
            self._pool.leave()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        if self._pool:
            self._pool.close()


def _judged(name: str, judge: Judge | None) -> RewardFunction:
    """The reward `name` of a judge.

    Raises:
        UserError: if there is no judge, or if its settings for this reward are wrong.
    """
    if judge is None:
        raise needs_judge(name)
    return RewardFunction(name, REWARDS.load(name)(judge), built_in=True)
