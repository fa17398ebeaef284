"""The verdict changes exactly at its borders, and answers that know nothing earn nothing."""

import pytest

from sixfold.environment.arithmetic import arithmetic_reward, arithmetic_tasks
from sixfold.environment.math_answers import math_reward
from sixfold.environment.preflight import baseline_scores, preflight
from sixfold.types import Task


@pytest.mark.parametrize(
    ("solved", "label"),
    [(0, "too hard"), (4, "too hard"), (5, "borderline"), (9, "borderline"), (10, "productive"), (80, "productive"),
     (81, "borderline"), (95, "borderline"), (96, "too easy"), (100, "too easy")],
)  # fmt: skip
def test_borders(solved: int, label: str) -> None:
    verdict = preflight([1.0] * solved + [0.0] * (100 - solved))
    assert (verdict.label, verdict.pass_rate) == (label, solved / 100)


def test_no_rewards_no_verdict() -> None:
    with pytest.raises(ValueError):
        preflight([])


def test_answers_that_know_nothing_earn_nothing() -> None:
    sums = arithmetic_tasks(200, terms=2, digits=3, seed=0)
    assert max(baseline_scores(arithmetic_reward, sums).values()) <= 0.02
    golds = ["391", r"\frac{3}{7}", r"2\sqrt{2}", "(1,2)", "Evelyn", "x^2+1"]
    assert baseline_scores(math_reward, [Task(id=g, prompt="", answer=g) for g in golds]) == {"random": 0.0, "constant": 0.0}
    always = baseline_scores(lambda completion, task: float("1" in completion), sums)
    assert always["constant"] == 1.0 and always["random"] > 0.1
