"""The pre-flight: the limits of its verdicts, and answers without knowledge of the task."""

from collections.abc import Sequence

import pytest

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.environment.arithmetic import arithmetic_reward, arithmetic_tasks
from sixfold.environment.preflight import (
    Baseline,
    baseline_scores,
    expected_refill,
    made_up_answers,
    preflight,
)
from sixfold.environment.rewards import RewardCallable
from sixfold.types import Task
from sixfold_environments.maths.answers import math_grade


@pytest.mark.parametrize(
    ("solved", "label"),
    [(0, "too hard"), (4, "too hard"), (5, "borderline"), (9, "borderline"), (10, "productive"),
    (80, "productive"),
     (81, "borderline"), (95, "borderline"), (96, "too easy"), (100, "too easy")],
)  # fmt: skip
def test_borders(solved: int, label: str) -> None:
    verdict = preflight([True] * solved + [False] * (100 - solved))
    assert (verdict.label, verdict.pass_rate) == (label, solved / 100)


def test_no_rewards_no_verdict() -> None:
    with pytest.raises(ValueError):
        preflight([])


def test_what_refilling_will_cost_by_hand() -> None:
    """Half of the groups are degenerate, three rounds: 1/2 + 1/4 extra groups per slot, and 1/8 of
    the slots stay degenerate.
    """
    assert expected_refill(0.5, 3) == (0.75, 0.125)
    assert expected_refill(0.5, 1) == (0.0, 0.5)
    assert expected_refill(0.0, 9) == (0.0, 0.0) and expected_refill(1.0, 4) == (3.0, 1.0)


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_made_up_answers_are_no_longer_than_completions() -> None:
    make = made_up_answers(lambda task: [0], encode, decode, [7], longest=4)
    for text, kept in (("12345", "123"), ("123", "123"), ("", "")):
        answer = make(Task("t", "p"), 0, text)
        assert answer.text == kept and answer.tokens == [0, *encode(kept), 7]


def baseline(reward: RewardCallable, tasks: Sequence[Task]) -> Baseline:
    return baseline_scores(
        Environment([reward]).score, tasks, made_up_answers(lambda task: [0], encode, decode)
    )


@pytest.mark.slow
def test_uninformed_answers_earn_nothing() -> None:
    sums = arithmetic_tasks(200, terms=2, digits=3, seed=0)
    honest = baseline(arithmetic_reward, sums)
    assert max(honest.random, honest.constant) <= 0.02 and not honest.warning
    golds = ["391", r"\frac{3}{7}", r"2\sqrt{2}", "(1,2)", "Evelyn", "x^2+1"]
    tasks = [Task(id=g, prompt="", answer=g) for g in golds]
    assert baseline(math_grade, tasks)[:2] == (0.0, 0.0)


def test_reward_earned_without_solving_is_named_in_the_warning() -> None:
    sums = arithmetic_tasks(8, terms=2, digits=3, seed=0)
    contains = baseline(lambda completion, task: float("1" in completion), sums)
    assert contains.constant == 1.0 and contains.random > 0.1 and contains.answer == "1"
    assert (
        "the reward can be earned without solving the task" in contains.warning
        and "the constant answer '1' earns 1 per task" in contains.warning
    )
    short = baseline(
        lambda completion, task: 0.3 * (len(completion) > 17), sums
    )  # longer than any constant: random text alone is paid
    assert short.constant == 0.0 and short.random >= 0.2
    assert (
        short.warning.startswith(
            "the reward can be earned without solving the task: random text earns"
        )
        and "constant" not in short.warning
    )
    everything = baseline(lambda completion, task: 1.0, sums)
    assert everything[:2] == (1.0, 1.0) and " and " in everything.warning


def test_constant_answer_needs_two_hits_for_a_warning() -> None:
    tasks = [Task(id=str(i), prompt="", answer="1" if i < 1 else "x") for i in range(8)]
    once = baseline(lambda completion, task: float(completion == task.answer), tasks)
    assert once == Baseline(0.0, 1 / 8, "1") and not once.warning
    twice = baseline(
        lambda completion, task: float(completion == task.answer),
        [*tasks[1:], tasks[0], tasks[0]][-8:],
    )
    assert twice.constant == 2 / 8 and twice.warning


def test_functions_in_trl_form_get_texts_and_their_tokens() -> None:
    def by_tokens(
        completions: list[str], completion_ids: list[list[int]], **columns: object
    ) -> list[float]:
        assert [encode(text) for text in completions] == completion_ids
        return [float(not ids) for ids in completion_ids]

    assert baseline(by_tokens, arithmetic_tasks(3, terms=2, digits=1, seed=0)) == Baseline(
        0.0, 1.0, ""
    )


def test_failing_checks_earn_nothing_until_the_budget_is_gone() -> None:
    def strict(completion: str, task: Task) -> float:
        if not completion:
            raise ValueError("empty")
        return 1.0

    tasks = arithmetic_tasks(8, terms=2, digits=1, seed=0)
    assert baseline(strict, tasks).random == 1.0
    with pytest.raises(RewardBudgetExceeded):
        baseline_scores(
            Environment([strict], error_budget=0.0).score,
            tasks,
            made_up_answers(lambda task: [0], encode, decode),
        )
    with pytest.raises(ValueError, match="at least one task"):
        baseline(strict, [])
