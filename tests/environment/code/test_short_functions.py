"""Tasks of short functions: the solution is right, and the tests tell it from other functions."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold_environments.code.short_functions import (
    COMPUTED,
    CONSTANTS,
    KEPT,
    RETURNED,
    ShortFunction,
    function_tasks,
    number_of_functions,
)

Cases = list[dict[str, Any]]


def every() -> list[ShortFunction]:
    """All combinations of parts, with one pair of constants each."""
    rng = random.Random(0)
    return [
        ShortFunction(*parts, rng.choice(CONSTANTS), rng.choice(CONSTANTS))
        for parts in product(KEPT, COMPUTED, RETURNED)
    ]


def python(function: ShortFunction) -> Any:
    """The solution, run by Python. It is this module's own text, not a model's."""
    names: dict[str, Any] = {}
    exec(function.solution, names)
    return names["f"]


def test_the_solution_of_every_function_computes_what_the_tests_expect() -> None:
    rng = random.Random(1)
    for function in every():
        f = python(function)
        for length in (0, 1, 7):
            case: Any = function.case(rng, length)
            assert f(*case["args"]) == case["expected"], function.words


def test_values_computed_by_hand() -> None:
    function = ShortFunction(KEPT[3], COMPUTED[1], RETURNED[0], 9, 12)
    assert function.words == "f(xs, k): the sum of x plus 12 for x above k"
    assert function.solution == "def f(xs, k):\n    return sum(x + 12 for x in xs if x > k)"
    assert function.value([5, 3, 4], 3) == 17 + 16


def test_hidden_tests_tell_functions_apart() -> None:
    """Of all functions that differ in one part, the tests of a task refuse nearly all."""
    tasks, functions = function_tasks(60, seed=3), {f.words: f for f in every()}
    refused = tried = 0
    for task in tasks:
        cases: Cases = task.columns["tests"]["hidden"]
        for other in random.Random(task.id).sample(sorted(functions), 60):
            if other != task.prompt:
                tried += 1
                values = [functions[other].value(*case["args"]) for case in cases]
                refused += values != [case["expected"] for case in cases]
    assert refused / tried > 0.995, "some are equal: different x, different x plus 3"


def test_tasks_are_different_and_the_same_for_a_seed() -> None:
    tasks = function_tasks(300, seed=1)
    assert len({task.prompt for task in tasks}) == len({task.id for task in tasks}) == 300
    assert function_tasks(300, seed=1) == tasks
    assert function_tasks(300, seed=2) != tasks
    assert all(str(task.answer) in str(task.trace) for task in tasks)


def test_more_tasks_than_functions_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.limit = 10000000.*44541"):
        function_tasks(10_000_000, seed=0)


def test_a_number_of_parts_is_a_difficulty() -> None:
    """Of one part every function is drawn; more parts have a condition, a value, or both."""
    counts = [number_of_functions(parts) for parts in (1, 2, 3)]
    assert counts[0] == len(RETURNED) and sum(counts) == number_of_functions() == 44541
    one = {task.prompt for task in function_tasks(7, parts=1, seed=0)}
    assert one == {f"f(xs, k): {summary.words.format(each='x')}" for summary in RETURNED}
    of = {f.words: (f.kept is not KEPT[0]) + (f.computed is not COMPUTED[0]) for f in every()}
    for parts in (2, 3):
        drawn = [task.prompt for task in function_tasks(900, parts=parts, seed=0)]
        known = {of[words] for words in drawn if words in of}
        assert known == {parts - 1}
    with pytest.raises(UserError, match=r"data\.limit = 8: code_functions has 7 tasks with data"):
        function_tasks(8, parts=1, seed=0)
