"""Sources of the core: sums, and sums for a calculator."""

from __future__ import annotations

from math import comb

from ..environment.arithmetic import arithmetic_tasks
from ..environment.calculator import calculator_tasks
from ..recipe.schema import DataConfig
from ..types import Task

GENERATED_TASKS = 20_000
"""Tasks that a generator makes if data.limit is not set. Fewer if fewer exist."""


def sums(data: DataConfig, seed: int) -> list[Task]:
    """Sums with a worked trace."""
    terms, digits = data.arithmetic.terms, data.arithmetic.digits
    count = data.limit or min(GENERATED_TASKS, comb(10**digits + terms - 1, terms))
    return arithmetic_tasks(count, terms=terms, digits=digits, seed=seed)


def calls(data: DataConfig, seed: int) -> list[Task]:
    """Sums for episodes with a calculator."""
    made, count = data.calculator, data.limit or GENERATED_TASKS
    return calculator_tasks(count, numbers=made.numbers, digits=made.digits, seed=seed)
