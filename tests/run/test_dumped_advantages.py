"""Advantages in a dump: one number where all sampled tokens have it, otherwise one per token."""

from __future__ import annotations

from pathlib import Path

import torch

from sixfold.batch import collate
from sixfold.report.recorded_step import read_step
from sixfold.report.rollouts import read_rollouts, write_rollouts
from sixfold.run.step_log import dumped_advantages
from sixfold.types import Group, Reward, Task
from tests.made_trajectories import from_mask


def test_advantages_of_turns_are_dumped_by_token_and_read_back(tmp_path: Path) -> None:
    masks = ([0, 1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0], [0, 0, 1, 1, 1])
    task, other = Task("t", "?"), Task("u", "?")
    rows = [
        from_mask("t", k, [5] * len(mask), 1, [bool(m) for m in mask], reward=Reward(0.5))
        for k, mask in enumerate(masks)
    ]
    rows[3].task_id = "u"
    groups = [Group(task, rows[:3]), Group(other, rows[3:])]
    batch = collate(groups)
    values = torch.full_like(batch.old_logp, 9.0)  # values at other tokens are ignored
    values[0, 1:5] = torch.tensor([0.25, 0.25, 9.0, -0.5])
    values[1, [1, 3]] = 0.75
    values[3, 2:5] = torch.tensor([-1.0, -1.0, 2.0])
    found = dumped_advantages(groups, batch.with_(advantages=values))
    assert found[0][:2] == [[0.0, 0.25, 0.25, 0.0, -0.5], 0.75]
    assert isinstance(found[0][2], float), "nothing was sampled"
    assert found[1] == [[0.0, 0.0, -1.0, -1.0, 2.0]]
    path = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(path, groups, found)
    assert [r["advantage"] for r in read_rollouts(path)] == [*found[0], *found[1]]
    again = read_step(path, {"t": task, "u": other})
    assert [a[:2] for a in again.advantages] == [[0.25, 0.75], [-1.0]]


def test_two_groups_of_one_task_stay_two_groups(tmp_path: Path) -> None:
    """A step of an asynchronous run may hold a task of this epoch and of the next."""
    task = Task("t", "2+2=", "4")
    rows = [from_mask("t", k % 2, [5], 1, [False], reward=Reward(0.5)) for k in range(4)]
    groups = [Group(task, rows[:2]), Group(task, rows[2:])]
    path = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(path, groups, [[0.0, 1.0], [2.0, 3.0]])
    again = read_step(path, {"t": task})
    assert [len(group.trajectories) for group in again.groups] == [2, 2]
    assert again.advantages == [[0.0, 1.0], [2.0, 3.0]]
