"""A collector whose rollout goes on while the trainer trains.

Groups of later steps start as soon as the ledger (`ledger.py`) admits them, each with the task and
the noise that it has in a synchronous run. A step takes finished groups out of the ledger's window.
New weights reach the sampler while sequences run: their later tokens come from the new weights, and
every token carries the version that sampled it. The loss corrects for that, if the recipe says so.

A failure of a rollout or a check ends the run at the next `collect`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..environment.base import EnvironmentRole, Scorer
from ..event_loop import EventLoop
from ..rollout.base import Choose, Rollout, groups_in_order
from ..sync.base import WeightSync
from ..types import Group, Task
from .collector import greedy_stats, with_baselines
from .dead_letters import DeadLetters
from .dynamic_sampling import mixed, sampled_stats
from .rounds import StaleGroup
from .schedule import Admits, ScheduledGroup
from .stream import greedy_seed

Observe = Callable[[Sequence[Group]], None]
"""Takes in scored groups."""


@dataclass(frozen=True)
class _Finished:
    """A scored group that waits for its step.

    Attributes:
        group: the group.
        begun: steps that had ended when it started.
    """

    group: Group
    begun: int


@dataclass
class AsyncCollector:
    """Collects the groups of a step while those of later steps are sampled.

    Attributes:
        rollout: plays the episodes. Its calls overlap.
        environment: scores them.
        loop: runs the episodes, in a thread of its own.
        ledger: says which groups may start and which may be trained.
        tasks: maps a step number to the tasks of the step.
        seed: maps a step number to its sampling seed.
        measure: metrics of the sampling since the last call, for the groups of a step.
        choose: dynamic K, or None.
        dead: prompts that were set aside. Later groups take the place of theirs.
        max_rounds: dynamic sampling: as many rounds of groups are sampled per step at most, and
            later groups take the place of those with equal rewards. 0: groups are not skipped.
        greedy: plays the greedy episode of each group at the same time, as its baseline. None: the
            method needs none.
        observe: called with the scored groups of a trained step, and those that it skipped, before
            new groups start.
        on_finished: called with the number of every finished group. It may raise.
        on_failure: called with the error of a group.
        scheduled: how the groups of the last step were sampled.
        skipped: groups that dynamic sampling has skipped until the last `trained`.
    """

    rollout: Rollout
    environment: EnvironmentRole
    loop: EventLoop
    ledger: Admits
    tasks: Callable[[int], Sequence[Task]]
    seed: Callable[[int], int]
    measure: Callable[[Sequence[Group]], dict[str, float]]
    choose: Choose | None = None
    dead: DeadLetters = field(default_factory=DeadLetters)
    max_rounds: int = 0
    greedy: Rollout | None = None
    observe: Observe = lambda groups: None
    on_finished: Callable[[int, Group], None] = lambda number, group: None
    on_failure: Callable[[Exception], None] = lambda error: None
    scheduled: list[ScheduledGroup] = field(default_factory=list)
    _playing: set[asyncio.Task[None]] = field(default_factory=set)
    _scorers: dict[int, Scorer] = field(default_factory=dict)
    _finished: dict[int, _Finished] = field(default_factory=dict)
    skipped: list[Group] = field(default_factory=list)
    _skipped: list[Group] = field(default_factory=list)  # since the last step
    _taken: list[int] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: Exception | None = None
    _stats: dict[str, float] = field(default_factory=dict)

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """The groups of the next step, in the order of their numbers.

        Args:
            tasks: tasks of the step. With a window, groups of later tasks may come first.
            seed: seed of the step.
            on_phase: called with "rollout" as the wait for them starts.
        """
        on_phase("rollout")
        return self.loop.run(self._collect())

    def stats(self) -> dict[str, float]:
        """Metrics of the last `collect`."""
        return self._stats

    def trained(self) -> None:
        """The groups of the last `collect` are trained, and the sampler has the new weights."""
        self.loop.run(self._trained())

    def stop(self) -> None:
        """End the groups that still run: no step will take them."""
        self.loop.run(self._stop())

    async def _stop(self) -> None:
        for playing in (running := [*self._playing]):
            playing.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _trained(self) -> None:
        self.ledger.train(self._taken)
        trained = [self._finished.pop(number).group for number in self._taken]
        self.skipped, self._taken, self._skipped = self._skipped, [], []
        if self.max_rounds:
            self._stats |= dynamic_stats(trained, self.skipped, self._stats)
        self.observe([*trained, *self.skipped])
        self._stats |= self.dead.take()
        self._admit()

    async def _collect(self) -> list[Group]:
        began = time.perf_counter()
        self._admit()
        while self._failure or (chosen := self.ledger.choose(self._finished)) is None:
            if self._failure:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        self._taken = chosen
        found = [self._finished[number] for number in chosen]
        groups = [one.group for one in found]
        self._check_age(found)
        self.scheduled = [
            ScheduledGroup.of(number, one.begun, one.group)
            for number, one in zip(chosen, found, strict=True)
        ]
        self._stats = self._metrics(found) | {
            "time/rollout_s": time.perf_counter() - began,
            "time/environment_s": 0.0,
        }
        return groups

    @property
    def _ended(self) -> int:
        """Steps that have ended."""
        return self.ledger.trained // self.ledger.per_step

    def group(self, number: int) -> tuple[Task, int]:
        """Task of the group with this number, and the seed of its step."""
        step, index = number // self.ledger.per_step + 1, number % self.ledger.per_step
        return self.tasks(step)[index], self.seed(step)

    def _admit(self) -> None:
        # Without a prompt that is left, every new group would be dropped, for ever.
        while not self.dead.exhausted and (numbers := self.ledger.admit()):
            for number in numbers:
                task, seed = self.group(number)
                if task.id in self.dead.ids:
                    self.ledger.drop(number)
                    continue
                scorer = self._scorer(number // self.ledger.per_step)
                play = self._play(number, task, seed, scorer, self._ended)
                playing = asyncio.create_task(play)
                self._playing.add(playing)
                playing.add_done_callback(self._playing.discard)

    async def _play(self, number: int, task: Task, seed: int, scorer: Scorer, begun: int) -> None:
        """Sample and score one group. begun: steps that had ended when it started."""

        async def attempt(tasks: Sequence[Task], earlier: int) -> list[Group]:
            own = self.environment.scorer(self._expected) if earlier else scorer
            groups = groups_in_order(self.rollout.play(tasks, seed, own, self.choose), tasks)
            if self.greedy is None:
                return await groups
            alone = groups_in_order(self.greedy.play(tasks, greedy_seed(seed), own), tasks)
            return with_baselines(*await _together(groups, alone))

        try:
            survivors = await self.dead.survivors([task], attempt)
            if survivors and not self._skip(survivors[0]):
                self.on_finished(number, survivors[0])
                self._finished[number] = _Finished(survivors[0], begun)
            else:
                self.ledger.drop(number)
                self._admit()
        except Exception as error:  # noqa: BLE001  raised by `collect`
            self._failure = self._failure or error
            self.on_failure(error)
        self._changed.set()

    def _skip(self, group: Group) -> bool:
        """True if a group is skipped: its rewards are equal, and the step may have more groups."""
        room = (self.max_rounds - 1) * self.ledger.per_step - len(self._skipped)
        if room < 1 or mixed(group):
            return False
        self._skipped.append(group)
        return True

    @property
    def _expected(self) -> int:
        """Trajectories of a step, greedy ones included: they have the same scorer."""
        return self.ledger.per_step * (self.rollout.samples + (self.greedy is not None))

    def _scorer(self, step: int) -> Scorer:
        """Scorer of the groups of one step of the task stream, which share an error budget.

        Args:
            step: the step, counted from 0.
        """
        if step not in self._scorers:
            self._scorers[step] = self.environment.scorer(self._expected)
            oldest = min(self.ledger.admitted) // self.ledger.per_step
            for old in [s for s in self._scorers if s < oldest]:
                del self._scorers[old]
        return self._scorers[step]

    def _check_age(self, found: Sequence[_Finished]) -> None:
        for one in found:
            if (age := self._ended - one.begun) > self.ledger.largest_age:
                raise StaleGroup(
                    f"task {one.group.task.id} was started {age} steps ago, but the bound is"
                    f" {self.ledger.largest_age}"
                )

    def _metrics(self, found: Sequence[_Finished]) -> dict[str, float]:
        groups = [one.group for one in found]
        ages = [self._ended - one.begun for one in found]
        trajectories = [t for group in groups for t in group.trajectories]
        changed = sum(len({v for v in t.version if v >= 0}) > 1 for t in trajectories)
        of_greedy = greedy_stats(groups) if self.greedy else {}
        return (
            self.measure(groups)
            | of_greedy
            | {
                "async/age_mean": sum(ages) / len(ages),
                "async/age_max": float(max(ages)),
                "async/mixed_frac": changed / max(1, len(trajectories)),
                "async/running": float(len(self.ledger.admitted) - len(self._finished)),
                "async/buffered": float(len(self._finished) - len(found)),
            }
        )


def dynamic_stats(
    trained: Sequence[Group], skipped: Sequence[Group], stats: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of the groups that a step has trained, and of those that it has skipped.

    Args:
        trained: as it says.
        skipped: likewise.
        stats: metrics of the step.
    """
    sampled = [*trained, *skipped]
    return {
        "rollout/kept_frac": stats["rollout/kept_frac"] * len(trained) / len(sampled),
        "dynamic/rounds": float(-(-len(sampled) // len(trained))),
        **sampled_stats(sampled, trained),
    }


async def _together(*work: Coroutine[Any, Any, list[Group]]) -> list[list[Group]]:
    """Results of coroutines that run together. If one fails, the others are cancelled first."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class AfterStep(Protocol):
    """What goes on when a step is trained: a collector that runs ahead, or a curriculum."""

    def trained(self) -> None:
        """As `AsyncCollector.trained`."""
        ...


@dataclass
class AdmittingSync:
    """Weight sync after which a collector may start new groups, or other tasks are drawn.

    Attributes:
        inner: passes the weights to the sampler.
        collector: is told that its step has been trained.
    """

    inner: WeightSync
    collector: AfterStep

    def sync(self, version: int) -> None:
        """As `WeightSync.sync`."""
        self.inner.sync(version)
        self.collector.trained()
