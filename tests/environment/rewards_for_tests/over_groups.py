"""Rewards over groups in Sixfold's form."""

from sixfold.environment.group_form import Member
from sixfold.types import Task


def told(group: list[Member], task: Task) -> list[float]:
    """100 for a solved completion, and the size of the group."""
    assert all(member.finish_reason == "stop" for member in group)
    return [100.0 * bool(member.solved) + len(group) for member in group]


async def told_async(group: list[Member], task: Task) -> list[float]:
    return told(group, task)
