"""Rewards that record each call in a file."""

from pathlib import Path

from sixfold.environment.versions import cached
from sixfold.types import Task


def _record(name: str, completion: str, task: Task) -> float:
    with Path(task.columns["file"]).open("a") as file:
        file.write(f"{name} {completion}\n")
    if completion == "fails":
        raise OSError("no answer")
    return 1.0


@cached("1")
def reused(completion: str, task: Task) -> float:
    return _record("reused", completion, task)


def not_reused(completion: str, task: Task) -> float:
    return _record("not_reused", completion, task)
