"""Sums with worked solutions, generated from a seed: the demo tasks, and their reward.

Invariant: no two tasks of one call have the same operands in any order. However the list is split,
no training sum is held out with its terms swapped.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations_with_replacement
from math import comb
from typing import Literal

from ..errors import UserError
from ..types import Task
from .answer_part import answer_part
from .grade import Grade, right_or_wrong

TraceForm = Literal["columns", "running", "answer"]

_NUMBER = re.compile(r"[-−－]?\d+(?:[.,．，]\d+)*")
_WORKED = re.compile(r"(?:[0-9]+(?:\+[0-9]+)+=[0-9]+;)*#-?[0-9]+")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+")


def arithmetic_tasks(
    count: int, *, terms: int, digits: int, seed: int, trace: TraceForm = "columns"
) -> list[Task]:
    """Different sums of random numbers. The same arguments give the same list.

    Args:
        count: number of tasks.
        terms: numbers per sum.
        digits: maximum digits per number.
        trace: form of the worked solutions. The sums do not depend on it.

    Raises:
        UserError: if fewer than `count` sums exist. Sums with reordered terms count as one.
    """
    rng = random.Random(f"arithmetic/{terms}/{digits}/{seed}")
    drawn = _distinct_operands(count, terms, 10**digits, rng)
    return [_task(operands, trace) for operands in drawn]


def shared_counts(count: int, possible: Sequence[int]) -> list[int]:
    """Divide `count` as evenly as possible.

    Args:
        possible: largest value of each part, in ascending order. The last gets what is left.
    """
    shares: list[int] = []
    for at, most in enumerate(possible[:-1]):
        shares.append(min(most, (count - sum(shares)) // (len(possible) - at)))
    return [*shares, count - sum(shares)]


def arithmetic_reward(completion: str, task: Task) -> float:
    """1.0 if the last number after all thoughts is the answer, otherwise 0.0.

    A number is read as a whole: 3.5 does not end with the answer 5, and 1,000 is 1000.
    """
    numbers = _NUMBER.findall(answer_part(completion))
    return float(bool(numbers) and _canonical(numbers[-1]) == _canonical(str(task.answer)))


def arithmetic_grade(completion: str, task: Task) -> Grade:
    """`arithmetic_reward` with a verdict."""
    return right_or_wrong(arithmetic_reward(completion, task) == 1.0)


def worked_sum_grade(completion: str, task: Task) -> Grade:
    """`arithmetic_grade` of replies in the form of worked sums. Any other reply is "rejected".

    The form is steps such as `3+4=7;`, maybe none, then `#` and the answer. So a broken form is
    counted apart from wrong arithmetic.
    """
    if not _WORKED.fullmatch(answer_part(completion)):
        return Grade(0.0, "rejected", "the reply has not the form 3+4=7;7+5=12;#12")
    return arithmetic_grade(completion, task)


def running_trace(operands: tuple[int, ...]) -> str:
    """The sum of one number after the other, then the answer: 3+4+5 gives `3+4=7;7+5=12;#12`."""
    totals = list(accumulate(operands))
    steps = zip(totals, operands[1:], totals[1:], strict=False)
    return "".join(f"{before}+{n}={after};" for before, n, after in steps) + f"#{totals[-1]}"


def worked_trace(operands: tuple[int, ...]) -> str:
    """Column sums from the right, then the answer: 347+58 gives `7+8=15;4+5+1=10;3+0+1=4;#405`.

    Each column adds one digit of every number (0 where a number is shorter) and, after the first
    column, the carry, which is always the last term. Thus everything that a step needs is at a
    fixed place. The last digit of the column's sum is the digit of the answer; the digits before it
    are the carry.
    """
    columns = []
    carry = 0
    for place in range(max(len(str(number)) for number in operands)):
        parts = [number // 10**place % 10 for number in operands]
        if place:
            parts.append(carry)
        total = sum(parts)
        columns.append(f"{'+'.join(map(str, parts))}={total};")
        carry = total // 10
    return f"{''.join(columns)}#{sum(operands)}"


def answer_alone(operands: tuple[int, ...]) -> str:
    """The answer without a step: 3+4+5 gives `#12`."""
    return f"#{sum(operands)}"


_TRACES: Mapping[TraceForm, Callable[[tuple[int, ...]], str]] = {
    "columns": worked_trace,
    "running": running_trace,
    "answer": answer_alone,
}


def _task(operands: tuple[int, ...], trace: TraceForm) -> Task:
    expression = "+".join(map(str, operands))
    return Task(
        id=f"arithmetic-{expression}",
        prompt=f"{expression}=",
        answer=sum(operands),
        trace=_TRACES[trace](operands),
        source="arithmetic",
    )


def _distinct_operands(
    count: int, terms: int, below: int, rng: random.Random
) -> list[tuple[int, ...]]:
    """`count` tuples, no two of them permutations of each other."""
    possible = comb(below + terms - 1, terms)
    if count > possible:
        raise UserError(
            f"data.arithmetic: {count} tasks need {count} different sums of {terms} numbers below"
            f" {below}, but only {possible} exist. Raise data.arithmetic.digits"
        )
    if 2 * count > possible:  # rejection sampling would take too long
        multisets = list(combinations_with_replacement(range(below), terms))
        return [tuple(rng.sample(operands, terms)) for operands in rng.sample(multisets, count)]
    drawn: dict[tuple[int, ...], tuple[int, ...]] = {}
    while len(drawn) < count:
        operands = tuple(rng.randrange(below) for _ in range(terms))
        drawn.setdefault(tuple(sorted(operands)), operands)
    return list(drawn.values())


def _canonical(number: str) -> str:
    """The number in ASCII without leading zeros and thousands separators, as text.

    int() refuses numbers of more than 4300 digits, and a model may write such a number.
    """
    integer = unicodedata.normalize("NFKC", number).replace("−", "-")
    if _GROUPED.fullmatch(integer):
        integer = integer.replace(",", "")
    digits = integer.lstrip("-").lstrip("0")
    return f"-{digits}" if integer.startswith("-") and digits else digits or "0"
