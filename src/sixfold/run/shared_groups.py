"""Groups that several ranks sample ahead of the trainer, each its share of the tasks.

Rank r samples the tasks i of every step with i % size == r, by a collector and a ledger of its own
(`controller/asynchronous.py`). A step takes as many finished groups of every rank as that rank has
in a synchronous step. So all ranks make the same steps, whatever finishes when. They exchange their
groups once per step, in the main thread: the groups of later steps are sampled meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..controller.asynchronous import AsyncCollector, Observe, dynamic_stats
from ..controller.collector import greedy_stats
from ..controller.dead_letters import DeadLetters
from ..controller.rounds import Round, merged_stats
from ..controller.schedule import Admits, ScheduledGroup
from ..errors import UserError
from ..ranks import Ranks
from ..types import Group, Task, Trajectory

GREEDY = "rollout/greedy_"
"""Start of the keys of metrics that are computed from the groups of all ranks."""

Played = tuple[list[Trajectory], Trajectory | None]
"""Trajectories of a group, and its greedy one."""


class RankLedgers:
    """The ledgers of all ranks. Every rank has all of them, so each can save them.

    Args:
        ledgers: in the order of the ranks. Each counts its rank's groups alone.
        rank: the rank whose groups this process samples.
    """

    def __init__(self, ledgers: Sequence[Admits], rank: int) -> None:
        self._ledgers = ledgers
        self._rank = rank

    @property
    def own(self) -> Admits:
        """Ledger of this rank."""
        return self._ledgers[self._rank]

    def follow(self, states: Sequence[dict[str, Any]]) -> None:
        """Record what the other ranks have trained and dropped: their ledgers, in rank order."""
        for rank, (ledger, state) in enumerate(zip(self._ledgers, states, strict=True)):
            if rank != self._rank:
                ledger.load(state)

    def state(self) -> dict[str, Any]:
        """The trained and dropped groups of all ranks. Open ones start again after a resume."""
        return {"ranks": [ledger.state() for ledger in self._ledgers]}

    def load(self, state: dict[str, Any]) -> None:
        """As `Ledger.load`, on all ranks."""
        if (saved := len(state["ranks"])) != len(self._ledgers):
            raise UserError(
                f"the run has {saved} ranks with groups of their own, but {len(self._ledgers)} were"
                f" started. With rollout.staleness > 0, resume it with {saved} ranks"
            )
        for ledger, own in zip(self._ledgers, state["ranks"], strict=True):
            ledger.load(own)


class SharedCollector:
    """Collects the groups of all ranks while those of later steps are sampled.

    Args:
        inner: collects the groups of this rank.
        ledgers: those of all ranks.
        tasks: training tasks by id.
        ranks: the ranks.
        dead: prompts that were set aside: by this rank, and from the next step on by the others.
        observe: called with the groups of all ranks that a step has trained, before new ones start.

    Attributes:
        scheduled: how the groups of the last step were sampled, with their numbers in the task
            stream of all ranks.
    """

    def __init__(
        self,
        inner: AsyncCollector,
        ledgers: RankLedgers,
        tasks: Mapping[str, Task],
        ranks: Ranks,
        dead: DeadLetters | None = None,
        observe: Observe = lambda groups: None,
    ) -> None:
        self._dead = dead or DeadLetters()
        self.scheduled: list[ScheduledGroup] = []
        self._observe = observe
        self._groups: list[Group] = []
        self._inner = inner
        self._ledgers = ledgers
        self._tasks = tasks
        self._ranks = ranks
        self._stats: dict[str, float] = {}

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """The groups of the next step of all ranks, in the order of their numbers.

        Raises:
            Exception: if one rank has failed (`Ranks.agree`).
        """
        began, own, failure = time.perf_counter(), list[Group](), None
        try:
            own = self._inner.collect(tasks, seed, on_phase)
        except Exception as error:  # noqa: BLE001  raised on all ranks
            failure = error
        self._ranks.agree(failure)
        played = [_played(group) for group in own]
        counts = {k: v for k, v in self._inner.stats().items() if not k.startswith(GREEDY)}
        shares = self._ranks.gather((self._inner.scheduled, played, counts))
        found: list[tuple[ScheduledGroup, Group]] = []
        rounds = []
        for rank, (scheduled, others, stats) in enumerate(shares):
            each = [
                (self._numbered(rank, one, len(tasks)), self._group(of))
                for one, of in zip(scheduled, others, strict=True)
            ]
            rounds.append(Round([group for _, group in each], stats, 1, 0))
            found += each
        found.sort(key=lambda pair: pair[0].number)
        self.scheduled = [one for one, _ in found]
        self._stats = merged_stats(rounds) | {"time/rollout_s": time.perf_counter() - began}
        self._stats["rollout/tok_s"] = sum(r.stats["rollout/tok_s"] for r in rounds)
        self._groups = [group for _, group in found]
        if self._inner.greedy:
            self._stats |= greedy_stats(self._groups)
        return self._groups

    def stats(self) -> dict[str, float]:
        """Metrics of the last `collect`, over all ranks."""
        return self._stats

    def trained(self) -> None:
        """As `AsyncCollector.trained`. The ranks exchange which groups they have dropped."""
        self._observe(self._groups)  # before new groups start, whose tasks it decides
        self._inner.trained()
        skipped = [_played(group) for group in self._inner.skipped]
        own = self._ledgers.own.state(), skipped, self._dead.taken
        shares = self._ranks.gather(own)
        self._ledgers.follow([state for state, _, _ in shares])
        if self._dead.max_failures:
            self._dead.join([record for _, _, records in shares for record in records])
            self._stats |= {"rollout/dead_prompts": float(len(self._dead.taken))}
        if self._inner.max_rounds:
            dropped = [self._group(played) for _, skips, _ in shares for played in skips]
            self._stats |= dynamic_stats(self._groups, dropped, self._stats)

    def stop(self) -> None:
        """End the groups of this rank that still run."""
        self._inner.stop()

    def _numbered(self, rank: int, own: ScheduledGroup, per_step: int) -> ScheduledGroup:
        """A group of one rank with its number in the task stream of all ranks."""
        size = self._ranks.size
        step, place = divmod(own.number, len(range(rank, per_step, size)))
        index = rank + place * size
        return replace(own, number=step * per_step + index)

    def _group(self, played: Played) -> Group:
        trajectories, greedy = played
        return Group(self._tasks[trajectories[0].task_id], trajectories, greedy)


def share_of(
    schedule: Sequence[Sequence[ScheduledGroup]], rank: int, size: int, per_step: int
) -> list[list[ScheduledGroup]]:
    """What one rank samples of the steps of a schedule, with its numbers in the rank's task stream.

    Args:
        schedule: groups of all ranks by step.
        rank: the rank.
        size: number of ranks.
        per_step: groups of a step of all ranks.
    """
    own = len(range(rank, per_step, size))
    return [
        [
            replace(group, number=group.number // per_step * own + group.number % per_step // size)
            for group in step
            if group.number % per_step % size == rank
        ]
        for step in schedule
    ]


def _played(group: Group) -> Played:
    """A group without its task, whose columns may hold objects that cannot be sent."""
    return group.trajectories, group.greedy
