"""Tasks of short Python functions, with worked solutions and hidden tests.

A task describes a function of a list `xs` and a number `k` in words: "f(xs, k): the sum of x + 12
for each even x above k". It has three parts: which numbers are kept, what is computed from each,
and what is returned. The tests are calls whose values this module computes itself; no text of a
model is run here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sixfold.errors import UserError
from sixfold.types import Task

LENGTHS = (0, 4, 6, 7, 8, 9)
"""Lengths of `xs` in the hidden tests of a task."""

SPREAD = 40
"""Numbers of the tests are between -SPREAD and SPREAD."""

CONSTANTS = range(2, 21)
"""Constants of the functions."""


@dataclass(frozen=True)
class _Part:
    """One part of a function.

    Attributes:
        code: Python expression of x, k, and {n}, a constant of the task.
        value: its value, as a function of (x, k, n).
    """

    words: str
    code: str
    value: Callable[[int, int, int], int | bool]


@dataclass(frozen=True)
class _Summary:
    """The value that a function returns.

    Attributes:
        words: description, with {each} for the numbers.
        code: Python expression of {each}, a generator expression.
    """

    words: str
    code: str
    value: Callable[[Sequence[int]], int | list[int]]


KEPT = (
    _Part("x", "", lambda x, k, n: True),
    _Part("even x", "x % 2 == 0", lambda x, k, n: x % 2 == 0),
    _Part("odd x", "x % 2 == 1", lambda x, k, n: x % 2 == 1),
    _Part("x above k", "x > k", lambda x, k, n: x > k),
    _Part("x below k", "x < k", lambda x, k, n: x < k),
    _Part("x other than k", "x != k", lambda x, k, n: x != k),
    _Part("x above {n}", "x > {n}", lambda x, k, n: x > n),
    _Part("x below {n}", "x < {n}", lambda x, k, n: x < n),
    _Part("x divisible by {n}", "x % {n} == 0", lambda x, k, n: x % n == 0),
)

COMPUTED = (
    _Part("x", "x", lambda x, k, n: x),
    _Part("x plus {n}", "x + {n}", lambda x, k, n: x + n),
    _Part("x minus {n}", "x - {n}", lambda x, k, n: x - n),
    _Part("{n} minus x", "{n} - x", lambda x, k, n: n - x),
    _Part("{n} times x", "{n} * x", lambda x, k, n: n * x),
    _Part("x modulo {n}", "x % {n}", lambda x, k, n: x % n),
    _Part("x plus k", "x + k", lambda x, k, n: x + k),
    _Part("k minus x", "k - x", lambda x, k, n: k - x),
    _Part("x times k", "x * k", lambda x, k, n: x * k),
    _Part("the square of x", "x * x", lambda x, k, n: x * x),
    _Part("the size of x", "abs(x)", lambda x, k, n: abs(x)),
)

RETURNED = (
    _Summary("the sum of {each}", "sum({each})", sum),
    _Summary("the largest of {each}, or 0", "max({each}, default=0)", lambda v: max(v, default=0)),
    _Summary("the smallest of {each}, or 0", "min({each}, default=0)", lambda v: min(v, default=0)),
    _Summary("the list of {each}", "list({each})", list),
    _Summary("{each}, sorted", "sorted({each})", sorted),
    _Summary("{each}, largest first", "sorted({each}, reverse=True)", lambda v: sorted(v)[::-1]),
    _Summary("the number of different {each}", "len(set({each}))", lambda v: len(set(v))),
)


@dataclass(frozen=True)
class ShortFunction:
    """A function: it keeps some numbers, computes a value from each, and returns a summary.

    Attributes:
        kept: condition, with `limit` as its constant.
        computed: value of each number, with `constant` as its constant.
        limit: constant of the condition.
    """

    kept: _Part
    computed: _Part
    returned: _Summary
    limit: int
    constant: int

    @property
    def words(self) -> str:
        each = self.returned.words.format(each=self.computed.words.format(n=self.constant))
        where = f" for {self.kept.words.format(n=self.limit)}" if self.kept.code else ""
        return f"f(xs, k): {each}{where}"

    @property
    def solution(self) -> str:
        condition = f" if {self.kept.code.format(n=self.limit)}" if self.kept.code else ""
        each = f"{self.computed.code.format(n=self.constant)} for x in xs{condition}"
        alone = "{each}," not in self.returned.code
        body = self.returned.code.format(each=each if alone else f"({each})")
        return f"def f(xs, k):\n    return {body}"

    def value(self, xs: Sequence[int], k: int) -> int | list[int]:
        kept = [x for x in xs if self.kept.value(x, k, self.limit)]
        return self.returned.value([self.computed.value(x, k, self.constant) for x in kept])

    def case(self, rng: random.Random, length: int) -> dict[str, object]:
        """A test. Half of the numbers lie at the borders of conditions.

        Args:
            rng: draws the arguments.
            length: length of `xs`.
        """
        k = rng.choice(CONSTANTS)
        border = (k, self.limit, self.limit + 1, self.limit - 1, 2 * self.limit, self.constant)
        xs = [
            rng.choice(border) if rng.random() < 0.5 else rng.randint(-SPREAD, SPREAD)
            for _ in range(length)
        ]
        return {"args": [xs, k], "expected": self.value(xs, k)}


def function_tasks(count: int, *, parts: int = 0, seed: int) -> list[Task]:
    """Make tasks of different functions. The same arguments give the same list.

    Args:
        parts: parts of each function: 1 (what is returned) to 3. 0: any number of them.
        seed: random seed of the functions and of their tests.

    Raises:
        UserError: if fewer than `count` functions exist.
    """
    if count > (most := number_of_functions(parts)):
        of = f" with data.code_functions.parts = {parts}" if parts else ""
        raise UserError(f"data.limit = {count}: code_functions has {most} tasks{of}. Lower it")
    rng = random.Random(f"code_functions/{seed}")
    drawn: dict[str, ShortFunction] = {}
    while len(drawn) < count:
        kept, computed = rng.choice(KEPT), rng.choice(COMPUTED)
        returned = rng.choice(RETURNED)
        constants = rng.choice(CONSTANTS), rng.choice(CONSTANTS)
        if parts in (0, _parts(kept, computed)):
            function = ShortFunction(kept, computed, returned, *constants)
            drawn.setdefault(function.words, function)
    return [_task(function, rng) for function in drawn.values()]


def _task(function: ShortFunction, rng: random.Random) -> Task:
    cases = [function.case(rng, length) for length in LENGTHS]
    return Task(
        id=f"code_functions-{function.words}",
        prompt=function.words,
        answer=function.solution,
        trace=f"```python\n{function.solution}\n```",
        columns={"tests": {"type": "function", "fn_name": "f", "hidden": cases}},
        source="code_functions",
    )


def number_of_functions(parts: int = 0) -> int:
    """How many different functions have this number of parts. 0 counts all of them."""

    def constants(part: _Part) -> int:
        return len(CONSTANTS) if "{n}" in part.code else 1

    return len(RETURNED) * sum(
        constants(kept) * constants(computed)
        for kept in KEPT
        for computed in COMPUTED
        if parts in (0, _parts(kept, computed))
    )


def _parts(kept: _Part, computed: _Part) -> int:
    """Parts of a function: what is returned, and those that do something to the numbers."""
    return 1 + (kept is not KEPT[0]) + (computed is not COMPUTED[0])
