"""Rewards over a whole group in Sixfold's form, and two that ship: diversity and win rate.

Such a reward is a function `f(group, task)`, recognised by its parameter named `group`. It gets all
completions of a task with the results of the rewards for single completions, and returns one value
per completion. TRL's form has no such results.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any, NamedTuple

from ..types import Task, Verdict
from ..user_code import own_copy
from .callables import callable_name, runs_async
from .grade import number

WORDS_PER_PIECE = 3


class OtherRewards(NamedTuple):
    """Results of the rewards for single completions, for one completion of a group.

    Attributes:
        parts: value of each reward by name, before its weight. A reward that failed is left out.
        solved: whether the completion solves its task. None if no such reward decides that.
        verdict: as in `Reward.verdict`.
    """

    parts: Mapping[str, float]
    solved: bool | None
    verdict: Verdict | None


class Member(NamedTuple):
    """One completion of a group.

    Attributes:
        text: the completion, as other rewards get it.
        finish_reason: why its last reply ended.
        parts: as in `OtherRewards`.
        solved: as in `OtherRewards`.
        verdict: as in `OtherRewards`.
    """

    text: str
    finish_reason: str
    parts: Mapping[str, float] = {}
    solved: bool | None = None
    verdict: Verdict | None = None


def diversity(group: Sequence[Member], task: Task) -> list[float | None]:
    """How much each right completion differs from the other right ones, from 0 to 1.

    A wrong completion earns 0. A right one earns 1 minus its mean similarity to the other right
    ones, or 1 if there is no other. The similarity of two texts is the share of their runs of three
    words that they have in common (Jaccard). A completion whose check failed gets no value.

    Raises:
        ValueError: if no other reward decides which completions are right.
    """
    if all(member.solved is None for member in group) and not any(m.verdict for m in group):
        raise ValueError(
            "diversity needs another reward in environment.rewards that decides which completions"
            " are right"
        )
    numbers: dict[tuple[str, ...], int] = {}
    right = {index: _pieces(m.text, numbers) for index, m in enumerate(group) if m.solved}
    similar = dict.fromkeys(right, 0.0)
    for one, other in combinations(right, 2):
        share = _similarity(right[one], right[other])
        similar[one] += share
        similar[other] += share
    values: list[float | None] = []
    for index, member in enumerate(group):
        if member.verdict == "infrastructure_error":
            values.append(None)
        elif index in right:
            values.append(1.0 - similar[index] / max(1, len(right) - 1))
        else:
            values.append(0.0)
    return values


Compare = Callable[[str, str, Task], float | Awaitable[float]]
"""First text, second text, task -> 1 if the first is better, 0 if the second is, 0.5 for a tie. May
be async.
"""


def win_rate(compare: Compare) -> Callable[[Sequence[Member], Task], Any]:
    """Reward that compares every completion with every other one of its group.

    A completion earns the mean result of its comparisons, from 0 to 1. Every pair is compared in
    both orders, because judges prefer one position. An async `compare` runs for all pairs
    concurrently. A group of one completion has no value.

    Returns:
        A reward function, async if `compare` is.
    """

    def rates(size: int, results: Sequence[Any]) -> list[float | None]:
        sums = [0.0] * size
        for (first, second), result in zip(permutations(range(size), 2), results, strict=True):
            share = number(result)
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{callable_name(compare)} returned {share:g}, not 0 to 1")
            sums[first] += share
            sums[second] += 1.0 - share
        return [total / (2 * (size - 1)) if size > 1 else None for total in sums]

    def pairs(group: Sequence[Member]) -> list[tuple[str, str]]:
        return list(permutations((member.text for member in group), 2))

    def compared(group: Sequence[Member], task: Task) -> list[float | None]:
        return rates(len(group), [compare(a, b, own_copy(task)) for a, b in pairs(group)])

    async def compared_async(group: Sequence[Member], task: Task) -> list[float | None]:
        running: list[Any] = [compare(a, b, own_copy(task)) for a, b in pairs(group)]
        return rates(len(group), await asyncio.gather(*running))

    reward = compared_async if runs_async(compare) else compared
    reward.__name__ = f"win_rate_{callable_name(compare)}"
    return reward


def _pieces(text: str, numbers: dict[tuple[str, ...], int]) -> frozenset[int]:
    """Runs of WORDS_PER_PIECE words and signs in a text, without regard to case.

    Args:
        numbers: number of each run. New runs are added. Sets of numbers are faster than of tuples.
    """
    words = re.findall(r"\w+|[^\w\s]", text.casefold())
    length = min(WORDS_PER_PIECE, len(words))
    runs = (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
    return frozenset(numbers.setdefault(run, len(numbers)) for run in runs)


def _similarity(a: frozenset[int], b: frozenset[int]) -> float:
    """Jaccard similarity, 0 to 1. Two empty sets are equal."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared) if a or b else 1.0
