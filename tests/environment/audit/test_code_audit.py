"""The audit of tasks with programs: reference solutions in every language, and forged programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sixfold.checks.environment import Environment
from sixfold.types import Task
from sixfold_environments.audit.checks import check_reference, right_answers
from sixfold_environments.audit.exploits import find_exploits
from sixfold_environments.audit.trials import Trials

ADD = {"type": "function", "fn_name": "add", "hidden": [[[1, 2], 3], [[5, -7], -2]]}
PYTHON = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Environment(["code"], timeout_s=30.0) as environment:
        yield Trials(environment)


def task(name: str, solution: str, tests: Any) -> Task:
    return Task(
        id=name, prompt=f"add two numbers, {name}", answer=solution, columns={"tests": tests}
    )


def test_reference_solutions_are_run_and_faulty_ones_are_named(trials: Trials) -> None:
    tasks = [
        task("python", PYTHON, ADD),
        task("text", PYTHON, json.dumps(ADD)),
        task("script", "function add(a, b) { return a + b }", {**ADD, "language": "javascript"}),
        task("faulty", "def add(a, b):\n    return a - b", ADD),
    ]
    finding = check_reference(trials, right_answers(trials, tasks), tasks)
    assert finding.level == "failure" and finding.result == "solves 75.0% of 4 tasks"
    assert len(finding.details) == 1
    assert finding.details[0].startswith("faulty: earned 0, wrong_answer")


def test_tests_of_constant_functions_are_found_also_as_json_text(trials: Trials) -> None:
    """The search fills in the name of the function, for every form of the tests."""
    zero = json.dumps({"type": "function", "fn_name": "zero", "hidden": [[[1], 0], [[2], 0]]})
    tasks = [task(f"zero {n}", "def zero(x): return 0", zero) for n in range(2)]
    exploits = find_exploits(trials, tasks, ["{answer}"], seed=0)
    assert any("def zero(*args, **kwargs):\n    return 0" in exploit.text for exploit in exploits)
    assert not any("Same()" in exploit.text for exploit in exploits), "a forged comparison"


def test_faulty_reference_solutions_of_all_tasks_are_run(trials: Trials) -> None:
    """The audit tries them in a form that the verifier reads, although no form earns a reward."""
    tasks = [task(f"t{n}", "def add(a, b):\n    return a - b", ADD) for n in range(2)]
    finding = check_reference(trials, right_answers(trials, tasks), tasks)
    assert [": earned 0, wrong_answer" in detail for detail in finding.details] == [True, True]
