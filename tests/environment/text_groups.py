"""Groups of texts that no model wrote."""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.types import Group, Reward, Task, Trajectory


def text_group(task: Task, texts: Sequence[str]) -> Group:
    """A group with one trajectory for each text."""
    made = [
        Trajectory.one_turn(task.id, k, [1], [7], [-1.0], [0], "stop", text=text)
        for k, text in enumerate(texts)
    ]
    return Group(task, made)


def rewards(group: Group) -> list[Reward]:
    """The rewards of a group that has been scored."""
    return [t.reward for t in group.trajectories if t.reward is not None]
