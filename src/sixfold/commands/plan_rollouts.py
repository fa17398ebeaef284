"""Lengths and rewards of an earlier run, for the simulation of `sixfold plan`."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..files.folder import RunFolder
from ..planning.simulate.groups import RecordedGroup, RecordedGroups
from ..report.rollouts import dumped_steps, read_rollouts
from ..types import Trajectory

NEWEST = 20
"""Dumps that are read: the newest ones, because lengths and rewards change during a run."""


def recorded_groups(folder: Path) -> RecordedGroups:
    """Groups of the newest rollout dumps of a run.

    Args:
        folder: folder of the run.

    Raises:
        UserError: if the run has no rollouts, or a dump cannot be read.
    """
    run = RunFolder(folder)
    steps = dumped_steps(run.rollouts)[-NEWEST:]
    groups = [group for step in steps for group in _groups(run.rollout_file(step))]
    if not groups:
        raise UserError(
            f"{folder} has no rollouts: train with log.rollouts_every = 1, or leave --run out"
        )
    return RecordedGroups(groups)


def _groups(path: Path) -> list[RecordedGroup]:
    """Groups of one dump, which writes the samples of a group one after the other."""
    groups: list[list[Trajectory]] = []
    for record in read_rollouts(path):
        sample = Trajectory.from_record(record)
        last = groups[-1] if groups else []
        tasks, samples = {other.task_id for other in last}, {other.sample for other in last}
        if sample.task_id not in tasks or sample.sample in samples:
            groups.append([])
        groups[-1].append(sample)
    return [
        RecordedGroup(
            tuple(sample.sampled_length for sample in group),
            tuple(sample.reward.value if sample.reward else None for sample in group),
        )
        for group in groups
    ]
