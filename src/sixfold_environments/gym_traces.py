"""Worked solutions of reasoning-gym tasks, for warm-up: the library gives only the final answer.

A model trained from scratch cannot compute a sum of six terms in one go, but it can learn to write
down the steps. Each solution ends with `#` and the answer, which `gym_reward` scores. For datasets
that are not in `TRACES`, warm-up imitates the answer alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_TERM = re.compile(r"([+-]?)\s*(\d+)")


def gym_trace(name: str, entry: Mapping[str, Any]) -> str | None:
    """Worked solution of an entry of dataset `name`. None if the dataset is not in `TRACES`."""
    steps = TRACES.get(name)
    return None if steps is None else f"{';'.join(steps(entry['metadata']))}#{entry['answer']}"


def running_totals(metadata: Mapping[str, Any]) -> list[str]:
    """Partial sums, one for each further term: `4 - 1 - 7` gives `4-1=3`, `3-7=-4`."""
    total: int | None = None
    steps = []
    for sign, digits in _TERM.findall(metadata["expression"]):
        term = int(sign + digits)
        if total is not None:
            steps.append(f"{total}{sign}{digits}={total + term}")
        total = term if total is None else total + term
    return steps


def euclid(metadata: Mapping[str, Any]) -> list[str]:
    """Divisions of Euclid's algorithm over all numbers: 12, 18 gives `18%12=6`, `12%6=0`."""
    result, *rest = metadata["numbers"]
    steps = []
    for number in rest:
        larger, smaller = max(result, number), min(result, number)
        while smaller:
            steps.append(f"{larger}%{smaller}={larger % smaller}")
            larger, smaller = smaller, larger % smaller
        result = larger
    return steps


TRACES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "chain_sum": running_totals,
    "gcd": euclid,
}
"""Dataset name -> function from an entry's metadata to the steps of its solution."""
