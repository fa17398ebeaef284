"""Prompts that always fail are set aside, so that they neither end the run nor train.

A prompt fails if the episode or the check of each of its samples fails. It is sampled again then,
with the same noise: a time-out or a lost process may not happen again. After `max_failures`
failures it is a dead letter: the run writes it to `dead_letters.jsonl` and samples it no more.

The error budget of the environment is the circuit breaker. The checks of a first attempt count in
the budget of their step, those of each later attempt in a budget of the same size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..types import NOT_APPLICABLE, Group, Task
from .mixture import weighted_order

RARE = 1e-4
"""Share of the largest weight below which a source counts as none: few steps, if any, draw it."""

PlayAttempt = Callable[[Sequence[Task], int], Awaitable[Sequence[Group]]]
"""Plays and scores tasks. The number counts the earlier attempts."""


class DeadLetters:
    """Prompts that were set aside.

    Args:
        max_failures: failures after which a prompt is set aside. 0: never.
        tasks: all tasks of the run.
        weights: source name to weight, as in `MixtureStream`.

    Attributes:
        ids: task ids that were set aside.
        taken: records of the last `take`, without the step.
        exhausted: no prompt is left that steps draw.
    """

    def __init__(
        self,
        max_failures: int = 0,
        tasks: Sequence[Task] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.max_failures = max_failures
        self.ids: set[str] = set()
        self.taken: list[dict[str, Any]] = []
        self.exhausted = False
        self._new: list[dict[str, Any]] = []
        self._written: set[str] = set()
        self._last_error: str | None = None
        self._tasks = tasks
        self._weights = weights or {}

    async def survivors(self, tasks: Sequence[Task], play: PlayAttempt) -> list[Group]:
        """Groups of the tasks that do not always fail, in the order of the tasks.

        Raises:
            UserError: if no task of the run is left.
        """
        groups = {group.task.id: group for group in await play(tasks, 0)}
        for attempt in range(1, self.max_failures + 1):
            for known in self.ids & groups.keys():  # set aside meanwhile, by another group of it
                del groups[known]
            failed = [group for group in groups.values() if has_failed(group)]
            if not failed:
                break
            if attempt == self.max_failures:
                for group in failed:
                    self._add(groups.pop(group.task.id))
            else:
                again = await play([group.task for group in failed], attempt)
                groups |= {group.task.id: group for group in again}
        return list(groups.values())

    async def fill(self, tasks: Sequence[Task], seed: int, play: PlayAttempt) -> list[Group]:
        """As `survivors`, with a further task in place of each that is or was set aside.

        Args:
            tasks: tasks of a step.
            seed: seed of the step, from which the further tasks are drawn.
            play: plays and scores tasks.
        """
        alive = [task for task in tasks if task.id not in self.ids]
        groups = await self.survivors(alive, play) if alive else []
        further = self._further({task.id for task in tasks}, seed)
        while len(groups) < len(tasks):
            more = [task for _, task in zip(range(len(tasks) - len(groups)), further, strict=False)]
            if not more:
                break
            groups += await self.survivors(more, play)
        if not groups:
            raise UserError("every prompt of the step has failed, and no other is left")
        return groups

    def _further(self, taken: Collection[str], seed: int) -> Iterator[Task]:
        for i in weighted_order(self._tasks, len(self._tasks), f"{seed}/dead", self._weights):
            if (task := self._tasks[i]).id not in taken and task.id not in self.ids:
                yield task

    def _add(self, group: Group) -> None:
        task, reward = group.task, group.trajectories[-1].reward
        error = reward.error if reward else None
        self.ids.add(task.id)
        self._last_error = error
        self._new.append(
            {
                "task": task.id,
                "prompt": task.prompt,
                "failures": self.max_failures,
                "error": error,
            }
        )
        self._check_left()

    def _check_left(self) -> None:
        """Raise a UserError if no prompt is left that steps draw."""
        least = RARE * max(self._weights.values(), default=0.0)
        drawn = [t.id for t in self._tasks if self._weights.get(t.source, 1.0) > least]
        self.exhausted = self.ids.issuperset(drawn)
        if self.exhausted:
            raise UserError(
                f"all {len(drawn)} prompts have failed {self.max_failures} times"
                f" (rollout.max_failures). The last error: {self._last_error}"
            )

    def join(self, records: Sequence[dict[str, Any]]) -> None:
        """Replace `taken` by the records of all ranks, which set prompts aside on their own.

        Args:
            records: in the order of the ranks. Two may have the same prompt.

        Raises:
            UserError: if no prompt of the run is left.
        """
        self.taken = list({record["task"]: record for record in reversed(records)}.values())[::-1]
        if self.taken:
            self._last_error = self.taken[-1]["error"]
            self._written |= (found := {record["task"] for record in self.taken})
            self.ids |= found
            self._check_left()

    def take(self) -> dict[str, float]:
        """Move the new records to `taken`. A checkpoint has those that were taken.

        Returns:
            Their metric, if prompts are set aside.
        """
        self.taken, self._new = self._new, []
        self._written |= {record["task"] for record in self.taken}
        return {"rollout/dead_prompts": float(len(self.taken))} if self.max_failures else {}

    def state(self) -> dict[str, Any]:
        """Task ids that were taken. A prompt that was not is tried again after a resume."""
        return {"ids": sorted(self._written)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._written, self.ids = set(state["ids"]), set(state["ids"])


def has_failed(group: Group) -> bool:
    """True if the episode or the check of every sample has failed."""
    rewards = [t.reward for t in group.trajectories]
    return all(r and r.value is None and r.error != NOT_APPLICABLE for r in rewards)
