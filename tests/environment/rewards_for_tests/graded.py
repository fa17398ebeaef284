"""Reward functions that return grades, and some that fail only the first time."""

import os
import signal
from pathlib import Path
from typing import Any

from sixfold.environment.grade import Grade
from sixfold.types import VERDICTS, Task


def graded(completion: str, task: Task) -> Any:
    """The grade, number or failure that the completion names."""
    if completion == "raise":
        raise ValueError("no answer")
    if completion == "failed":
        return Grade(None, "infrastructure_error", "no sandbox")
    if completion in VERDICTS:
        value = float(completion == "passed")
        return Grade(value, completion, isolation="namespaces")  # type: ignore[arg-type]
    return 0.5


async def graded_async(completion: str, task: Task) -> Any:
    return graded(completion, task)


def graded_group(completions: list[str], **columns: Any) -> list[Any]:
    return [graded(completion, Task(id="t", prompt="q")) for completion in completions]


def _fails(completion: str, folder: str, way: str) -> Any:
    """Fails in the given way, the first time that any process sees the completion."""
    try:
        Path(folder, completion).touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    if way == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raise":
        raise OSError("no space left")
    return Grade(None, "infrastructure_error", "no sandbox")


def first_fails(completion: str, task: Task) -> Any:
    return _fails(completion, task.columns["folder"], task.columns["way"])


async def first_fails_async(completion: str, task: Task) -> Any:
    return _fails(completion, task.columns["folder"], task.columns["way"])


def first_fails_group(
    completions: list[str], folder: list[str], way: list[str], **columns: Any
) -> list[Any]:
    """Fails only at the first completion: one check has one failure."""
    return [_fails(completions[0], folder[0], way[0]), *(1.0 for _ in completions[1:])]
