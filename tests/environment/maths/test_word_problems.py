"""R-212: word problems are solved right, differ from each other, and get harder with their
settings.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from statistics import fmean

import pytest

from sixfold.data.sources import load_tasks
from sixfold.environment.arithmetic import arithmetic_reward
from sixfold.environment.registry import SOURCES
from sixfold.errors import UserError
from sixfold.recipe.toml import parse_recipe
from sixfold.types import Task
from sixfold_environments.maths.word_problems import word_problem_tasks

RULES = (
    (r"(\w+) has (\d+) \w+\.", lambda x, a, b: a),
    (r"\w+ buys (\d+) more \w+\.", lambda x, a, b: x + a),
    (r"\w+ loses (\d+) of them\.", lambda x, a, b: x - a),
    (r"\w+ gives (\d+) \w+ away\.", lambda x, a, b: x - a),
    (r"\w+ buys (\d+) bags with (\d+) \w+ each\.", lambda x, a, b: x + a * b),
    (r"A week later, \w+ has (\d+) times as many \w+\.", lambda x, a, b: x * a),
    (r"\w+ divides them equally among (\d+) boxes and keeps one box\.", lambda x, a, b: x / a),
)
"""An independent reading of the sentences."""


def read(prompt: str) -> Fraction:
    """The answer of a problem, from its text alone."""
    *said, question = re.findall(r"[^.?]+[.?]", prompt)
    asked = re.search(r"does (\w+) have now", question)
    assert asked
    x = Fraction(0)
    for number, sentence in enumerate(said):
        for pattern, value in RULES:
            if found := re.fullmatch(pattern, sentence.strip()):
                if pattern.startswith("(") and (number or found[1] != asked[1]):
                    continue  # another person's
                numbers = [Fraction(n) for n in found.groups() if n.isdigit()]
                x = value(x, *numbers, *[Fraction(0)] * (2 - len(numbers)))  # type: ignore[no-untyped-call]
                assert x > 0 and x.denominator == 1, prompt
    return x


def equations(task: Task) -> list[tuple[int, str, int, int]]:
    assert isinstance(task.trace, str)
    *found, answer = re.split(r"[;#]+", task.trace)
    assert answer == task.answer
    parts = [re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", text) for text in found]
    assert all(parts), task.trace
    return [(int(p[1]), p[2], int(p[3]), int(p[4])) for p in parts if p]


@pytest.mark.parametrize("asides", [0, 3])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_answers_and_solutions_are_right(steps: int, asides: int) -> None:
    """The text is read by rules of its own, and every equation is computed again."""
    tasks = word_problem_tasks(200, steps=steps, digits=2, asides=asides, seed=1)
    for task in tasks:
        assert read(str(task.prompt)) == int(task.answer)
        for a, sign, b, result in equations(task):
            assert Fraction(result) == {
                "+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)
            }[sign]  # fmt: skip
        assert equations(task)[-1][3] == int(task.answer)
        assert arithmetic_reward(str(task.trace), task) == 1.0
        assert str(task.prompt).count(".") == 1 + steps + asides


def test_no_two_problems_are_the_same_under_other_names() -> None:
    tasks = word_problem_tasks(3000, steps=2, digits=1, seed=0)
    names = r"[A-Za-z]+(?= has| buys| loses| gives| divides)"
    changes = [(t.trace, re.sub(names, "", str(t.prompt))) for t in tasks]
    numbers = Counter((t.trace, "loses" in str(t.prompt), "gives" in str(t.prompt)) for t in tasks)
    assert len({t.id for t in tasks}) == len({t.prompt for t in tasks}) == len(set(changes)) == 3000
    assert max(numbers.values()) <= 2  # loses 3, gives 4 away; gives 3 away, loses 4


def test_a_draw_is_that_of_its_seed() -> None:
    first, again, other = (word_problem_tasks(50, steps=3, digits=2, seed=s) for s in (4, 4, 5))
    assert first == again and {t.trace for t in first} != {t.trace for t in other}


def test_more_steps_and_digits_are_harder() -> None:
    """In equations per solution, and in digits per number of the text."""

    def measured(steps: int, digits: int) -> tuple[float, float]:
        tasks = word_problem_tasks(300, steps=steps, digits=digits, seed=0)
        lengths = [len(n) for t in tasks for n in re.findall(r"\d+", str(t.prompt))]
        assert max(lengths) == digits
        return fmean(len(equations(task)) for task in tasks), fmean(lengths)

    by_steps = [measured(steps, 2)[0] for steps in (1, 2, 4, 6)]
    by_digits = [measured(2, digits)[1] for digits in (1, 2, 3, 4)]
    assert all(b > a + 0.9 for a, b in pairwise(by_steps))
    assert all(b > a + 0.3 for a, b in pairwise(by_digits))


def test_a_recipe_draws_them_by_difficulty() -> None:
    assert "word_problems" in SOURCES
    text = "[data]\nsource = 'word_problems'\nlimit = 90\nheldout = 10\n"
    data = parse_recipe(f"{text}[data.word_problems]\nsteps = 3\nmin_steps = 1", "r.toml").data
    found = load_tasks(data, seed=0, rewards=("arithmetic",))
    every = [*found.train, *found.heldout]
    assert Counter(task.source for task in every) == {f"{n} steps": 30 for n in (1, 2, 3)}
    assert len({task.id for task in every}) == 90


@pytest.mark.nightly
def test_more_problems_than_there_are_and_an_empty_range_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.limit = 9000.*found \d+ different.*raise digits"):
        word_problem_tasks(9000, steps=1, digits=1, seed=0)
    assert 50 < len(word_problem_tasks(9000, steps=1, digits=1, seed=0, exact=False)) < 1000
    with pytest.raises(UserError, match=r"min_steps = 3 must be at most.*steps = 2"):
        parse_recipe("data.word_problems.min_steps = 3", "r.toml")
