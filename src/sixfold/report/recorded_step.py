"""Read the groups of a recorded step from its dump, and say which steps can be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..types import SAMPLED, Group, Task, Trajectory
from .rollouts import read_rollouts


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was recorded.

    Attributes:
        groups: groups of the step, in order, with their rewards.
        advantages: advantage of the first sampled token of each trajectory, in the shape of
            `groups`.
        notes: messages about tasks that have changed since.
    """

    groups: list[Group]
    advantages: list[list[float]]
    notes: tuple[str, ...] = ()


def read_step(path: Path, tasks: Mapping[str, Task]) -> RecordedStep:
    """Read the groups of a step from its dump.

    Args:
        tasks: training tasks by id.

    Raises:
        UserError: if the dump cannot be read, or a task in it is no longer a training task.
    """
    groups: list[Group] = []
    advantages: list[list[float]] = []
    changed: list[str] = []
    for task_id, records in _groups(read_rollouts(path)):
        if task_id not in tasks:
            raise UserError(
                f"task '{task_id}' of {path.name} is not among the training tasks: the dataset has"
                " changed, or the run was given its tasks from Python. Restore the dataset ([data])"
            )
        task = tasks[task_id]
        if not _is_same(task, records[0]):
            changed.append(task_id)
        given = records[0].get("greedy")
        greedy = Trajectory.from_record(given) if given else None
        groups.append(Group(task, [Trajectory.from_record(r) for r in records], greedy))
        advantages.append([_first(record) for record in records])
    if not groups:
        raise UserError(f"{path} holds no trajectories")
    note = (
        f"{len(changed)} tasks have another prompt or answer than recorded; the first is"
        f" '{''.join(changed[:1])}'"
    )
    return RecordedStep(groups, advantages, (note,) if changed else ())


def _groups(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Task and records of each group. Samples ascend within a group.

    A step of an asynchronous run may hold two groups of one task.
    """
    for task_id, same in groupby(lines, key=lambda record: record["task_id"]):
        records: list[dict[str, Any]] = []
        for record in same:
            if records and record["sample"] <= records[-1]["sample"]:
                yield task_id, records
                records = []
            records.append(record)
        yield task_id, records


def replayable(recorded: set[int], checkpoints: Sequence[int]) -> list[int]:
    """Steps that can be replayed: all steps from a checkpoint to them are recorded."""
    steps = set()
    for start in checkpoints:
        step = start + 1
        while step in recorded:
            steps.add(step)
            step += 1
    return sorted(steps)


def steps_text(steps: Sequence[int]) -> str:
    """Format ascending steps as text, such as "3, 5 to 9"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    texts = [f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts]
    return ", ".join(texts) or "none"


def _is_same(task: Task, record: Mapping[str, Any]) -> bool:
    """True if a task has the prompt and the answer of a record."""
    now = {"prompt": task.prompt_text, "answer": task.answer}
    same: bool = json.loads(json.dumps(now, default=str)) == {
        key: record.get(key) for key in ("prompt", "answer")
    }
    return same


def _first(record: Mapping[str, Any]) -> float:
    """Advantage of the first sampled token. A record has one number, or one per token."""
    advantage = record["advantage"]
    if not isinstance(advantage, list):
        return float(advantage)
    return float(advantage[max(0, record["provenance"].find(SAMPLED))])
