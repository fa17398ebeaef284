"""Sources of the core: sums, and sums for a calculator."""

from __future__ import annotations

from dataclasses import replace
from math import comb

from ..environment.arithmetic import arithmetic_tasks, shared_counts
from ..environment.calculator import calculator_tasks
from ..recipe.schema import DataConfig
from ..types import Task

GENERATED_TASKS = 20_000
"""Tasks that a generator makes if data.limit is not set. Fewer if fewer exist."""


def sums(data: DataConfig, seed: int) -> list[Task]:
    """Sums with a worked trace."""
    made = data.arithmetic
    numbers = range(made.min_terms or made.terms, made.terms + 1)
    possible = [comb(10**made.digits + terms - 1, terms) for terms in numbers]
    whole = data.limit or min(GENERATED_TASKS, sum(possible))
    tasks: list[Task] = []
    for terms, count in zip(numbers, shared_counts(whole, possible), strict=True):
        few = arithmetic_tasks(count, terms=terms, digits=made.digits, seed=seed, trace=made.trace)
        tasks += [replace(t, source=f"{terms} terms") for t in few] if made.min_terms else few
    return tasks


def calls(data: DataConfig, seed: int) -> list[Task]:
    """Sums for episodes with a calculator."""
    made, count = data.calculator, data.limit or GENERATED_TASKS
    return calculator_tasks(count, numbers=made.numbers, digits=made.digits, seed=seed)
