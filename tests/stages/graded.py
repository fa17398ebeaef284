"""A reward for tests: shorter completions are better, so even random ones differ."""

from __future__ import annotations

from sixfold.types import Task


def shorter(completion: str, task: Task) -> float:
    return -float(len(completion))
