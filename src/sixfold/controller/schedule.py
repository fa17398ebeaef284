"""The schedule of an asynchronous run: recorded step by step, and played again.

An asynchronous run depends on timing: which groups had finished when a step took its groups, and
which version of the weights sampled each token. Nothing else does. So a run that takes the same
groups and samples every token from the same version gives the same bits.

`schedule.jsonl` has one line per step:

    {"step": 3, "groups": [{"number": 9, "begun": 1, "versions": [[0, [[1, 12], [2, 4]]], ...]}]}

A group has its number in the task stream, the number of steps that had ended when it started, and
for each trajectory its sample and (version, tokens) of its sampled tokens. Sample -1 is the greedy
baseline. A run on several ranks also records their number, "ranks".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError
from ..types import Group, Trajectory

GREEDY = -1
"""Sample number of a greedy baseline in a schedule."""


class Admits(Protocol):
    """Says which groups start, and which a step trains. `Ledger`, or a schedule that is replayed.

    Attributes:
        per_step: groups per step.
        admitted: numbers of the groups that have started and are not trained, ascending.
    """

    per_step: int
    admitted: list[int]

    @property
    def trained(self) -> int:
        """Number of trained groups."""
        ...

    @property
    def largest_age(self) -> int:
        """Bound of the age of a group when it is trained, in steps."""
        ...

    def admit(self) -> list[int]:
        """Numbers of the groups that may start now. They count as started."""
        ...

    def choose(self, finished: Collection[int]) -> list[int] | None:
        """Numbers of the groups of the next step, ascending. None: too few have finished."""
        ...

    def train(self, numbers: Collection[int]) -> None:
        """Record that groups have been trained."""
        ...

    def drop(self, number: int) -> None:
        """Record that an open group will not be trained."""
        ...

    def state(self) -> dict[str, Any]:
        """The trained groups, as JSON."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore the trained groups. No group is open then."""
        ...


@dataclass(frozen=True)
class ScheduledGroup:
    """One group of a recorded step.

    Attributes:
        number: its number in the task stream.
        begun: steps that had ended when it started.
        versions: version of every sampled token, by sample.
    """

    number: int
    begun: int
    versions: dict[int, list[int]]

    @classmethod
    def of(cls, number: int, begun: int, group: Group) -> ScheduledGroup:
        versions = {t.sample: sampled_versions(t) for t in group.trajectories}
        if group.greedy:
            versions[GREEDY] = sampled_versions(group.greedy)
        return cls(number, begun, versions)

    def to_record(self) -> dict[str, Any]:
        runs = [
            [sample, [[version, len([*same])] for version, same in groupby(versions)]]
            for sample, versions in self.versions.items()
        ]
        return {"number": self.number, "begun": self.begun, "versions": runs}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ScheduledGroup:
        """The inverse of `to_record`."""
        versions = {
            sample: [version for version, tokens in runs for _ in range(tokens)]
            for sample, runs in record["versions"]
        }
        return cls(record["number"], record["begun"], versions)


def sampled_versions(trajectory: Trajectory) -> list[int]:
    """Version of every sampled token of a trajectory."""
    return [v for v, sampled in zip(trajectory.version, trajectory.mask, strict=True) if sampled]


def read_schedule(file: Path, ranks: int) -> list[list[ScheduledGroup]]:
    """Groups of every step of a run.

    Args:
        file: `schedule.jsonl` of the run.
        ranks: number of ranks that will train them. Sums over another number have other bits.

    Raises:
        UserError: if there is no schedule, it is damaged, or its run had other ranks.
    """
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: only a run with rollout.staleness > 0 records a schedule."
            " Other runs need none: the same recipe gives the same bits"
        )
    steps = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            groups = [ScheduledGroup.from_record(group) for group in record["groups"]]
            if record["step"] != number:
                raise ValueError(f"step {number} is missing")
            recorded = record.get("ranks", 1)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}, line {number}: not a step of a schedule: {error}") from error
        if recorded != ranks:
            way = f"as torchrun --nproc-per-node {recorded} -m sixfold train --replay-schedule RUN"
            raise UserError(
                f"{file}: the ranks of the run were {recorded}, and those of this replay are"
                f" {ranks}. Their sums have other bits: start the replay"
                f" {way if recorded > 1 else 'without torchrun'}"
            )
        steps.append(groups)
    return steps


class ScheduleEnds(UserError):
    """A replay has reached the end of the recorded schedule."""


class ReplayLedger:
    """A ledger that starts and trains the groups of a recorded schedule.

    Args:
        steps: groups of every step.
        per_step: groups per step.

    Attributes:
        steps: as given.
        admitted: as in `Ledger`.
    """

    def __init__(self, steps: Sequence[Sequence[ScheduledGroup]], per_step: int) -> None:
        self.per_step = per_step
        self.admitted: list[int] = []
        self.steps = steps
        self._begun = {group.number: group.begun for step in steps for group in step}
        self._ended = 0

    @property
    def trained(self) -> int:
        return self._ended * self.per_step

    @property
    def largest_age(self) -> int:
        """Age of the oldest group of the schedule."""
        return max(
            (at - group.begun for at, step in enumerate(self.steps) for group in step), default=0
        )

    def admit(self) -> list[int]:
        new = sorted(n for n, begun in self._begun.items() if begun <= self._ended)
        for number in new:
            del self._begun[number]
        self.admitted = sorted([*self.admitted, *new])
        return new

    def choose(self, finished: Collection[int]) -> list[int] | None:
        """As `Ledger.choose`.

        Raises:
            ScheduleEnds: if the recorded run made no further step.
        """
        if self._ended == len(self.steps):
            raise ScheduleEnds(f"the recorded schedule ends after step {self._ended}")
        numbers = [group.number for group in self.steps[self._ended]]
        return numbers if set(numbers) <= set(finished) else None

    def train(self, numbers: Collection[int]) -> None:
        self.admitted = [number for number in self.admitted if number not in numbers]
        self._ended += 1

    def drop(self, number: int) -> None:
        """As `Ledger.drop`. A recorded group was not dropped."""
        raise ValueError(f"group {number} is trained in the recorded run")

    def state(self) -> dict[str, Any]:
        return {"ended": self._ended}

    def load(self, state: dict[str, Any]) -> None:
        self._ended = state["ended"]
        for step in self.steps[: self._ended]:
            for group in step:
                self._begun.pop(group.number, None)
