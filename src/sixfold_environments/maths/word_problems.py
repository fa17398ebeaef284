"""Word problems with worked solutions, generated from a seed: something is counted, and changes.

"Bavos has 12 coins. Bavos buys 4 bags with 3 coins each. Bavos loses 5 of them. How many coins does
Bavos have now?" The difficulty is the number of changes, the digits of the numbers, and the number
of sentences that do not matter. The solution is one equation after the other, then the answer, as
in the sums of `environment/arithmetic.py`: `4*3=12;12+12=24;24-5=19;#19`.

Invariant: no two problems of one call have the same numbers and the same changes, so a problem is
not held out under another name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sixfold.errors import UserError
from sixfold.types import Task

from ..made_up_names import made_up_names

THINGS = ("coins", "apples", "books", "stamps", "marbles", "shells", "pencils", "cards")
_ASIDE = (
    "{name} is {n} years old.",
    "{name} lives in house number {n}.",
    "{other} has {n} {things}.",
    "It is day {n} of the year.",
)
"""Sentences with a number that does not matter."""

ATTEMPTS = 20
"""Draws per problem after which no further different one is expected."""


@dataclass(frozen=True)
class _Change:
    """One change of the count.

    Attributes:
        words: sentence of {name}, {things} and the numbers {k} and {m}.
        equations: equations of the count {x} and the numbers, with the values {y} and {p}.
        apply: new count, as a function of (x, k, m). None: it cannot happen.
        factor: the numbers {k} are small: factors and shares.
    """

    words: str
    equations: str
    apply: Callable[[int, int, int], int | None]
    factor: bool = False


CHANGES = (
    _Change("{name} buys {k} more {things}.", "{x}+{k}={y};", lambda x, k, m: x + k),
    _Change("{name} loses {k} of them.", "{x}-{k}={y};", lambda x, k, m: x - k),
    _Change("{name} gives {k} {things} away.", "{x}-{k}={y};", lambda x, k, m: x - k),
    _Change(
        "{name} buys {k} bags with {m} {things} each.",
        "{k}*{m}={p};{x}+{p}={y};",
        lambda x, k, m: x + k * m,
        factor=True,
    ),
    _Change(
        "A week later, {name} has {k} times as many {things}.",
        "{x}*{k}={y};",
        lambda x, k, m: x * k,
        factor=True,
    ),
    _Change(
        "{name} divides them equally among {k} boxes and keeps one box.",
        "{x}/{k}={y};",
        lambda x, k, m: x // k if x % k == 0 else None,
        factor=True,
    ),
)


@dataclass(frozen=True)
class _Problem:
    """A count at the start, the changes with their numbers (k, m), and the count after each."""

    start: int
    changes: tuple[tuple[_Change, int, int], ...]
    counts: tuple[int, ...]


def word_problem_tasks(
    count: int, *, steps: int, digits: int, asides: int = 0, seed: int, exact: bool = True
) -> list[Task]:
    """Make different word problems. The same arguments give the same list.

    Args:
        digits: maximum digits of a number in the text. A result may have one more.
        asides: sentences of each problem that do not matter.
        exact: raise an error if fewer than `count` problems are found. Otherwise return those.

    Raises:
        UserError: if `exact`, and fewer are found.
    """
    rng = random.Random(f"word_problems/{steps}/{digits}/{asides}/{seed}")
    drawn: dict[_Problem, Task] = {}
    for _ in range(ATTEMPTS * count):
        problem = _draw(steps, digits, rng)
        if problem and problem not in drawn:
            drawn[problem] = _task(problem, len(drawn), digits, asides, rng)
            if len(drawn) == count:
                return list(drawn.values())
    if exact:
        raise UserError(
            f"data.limit = {count}: word_problems found {len(drawn)} different problems with"
            f" data.word_problems.steps = {steps} and digits = {digits}. Lower data.limit, or raise"
            " digits"
        )
    return list(drawn.values())


def _draw(steps: int, digits: int, rng: random.Random) -> _Problem | None:
    """A problem whose counts are all positive and not too large. None if the draw has failed."""
    largest = 10**digits - 1
    start = x = rng.randint(2, largest)
    changes: list[tuple[_Change, int, int]] = []
    counts: list[int] = []
    for _ in range(steps):
        change = rng.choice(CHANGES)
        k, m = rng.randint(2, 9 if change.factor else largest), rng.randint(2, 9)
        after = change.apply(x, k, m)
        if after is None or not 0 < after <= 10 * largest:
            return None
        x = after
        changes.append((change, k, m if "{m}" in change.words else 0))
        counts.append(x)
    return _Problem(start, tuple(changes), tuple(counts))


def _task(problem: _Problem, number: int, digits: int, asides: int, rng: random.Random) -> Task:
    name, other = made_up_names(rng, 2)
    said = {"name": name.capitalize(), "other": other.capitalize(), "things": rng.choice(THINGS)}
    x, trace = problem.start, ""
    sentences = ["{name} has {x} {things}.".format(x=x, **said)]
    for (change, k, m), y in zip(problem.changes, problem.counts, strict=True):
        sentences.append(change.words.format(k=k, m=m, **said))
        trace += change.equations.format(x=x, k=k, m=m, p=k * m, y=y)
        x = y
    for aside in rng.sample(_ASIDE, asides):
        text = aside.format(n=rng.randint(2, 10**digits - 1), **said)
        sentences.insert(rng.randint(1, len(sentences)), text)
    sentences.append("How many {things} does {name} have now?".format(**said))
    return Task(
        id=f"word_problems-{len(problem.changes)}-{number}",
        prompt=" ".join(sentences),
        answer=str(x),
        trace=f"{trace}#{x}",
        source="word_problems",
    )
