"""reasoning-gym's own answers score 1, and the documented part of a completion is scored."""

import pickle
import re
from dataclasses import replace

import pytest

from sixfold.errors import UserError
from sixfold_environments.gym import (
    gym_options,
    gym_reward,
    gym_solved,
    gym_tasks,
    submitted_answer,
)
from sixfold_environments.gym_traces import gym_trace

pytest.importorskip("reasoning_gym")


def test_the_librarys_answers_score_one_and_others_less() -> None:
    tasks = gym_tasks(["chain_sum", "gcd", "spell_backward"], size=5, seed=1)
    assert len({task.id for task in tasks}) == 15
    for task in tasks:
        assert gym_reward(task.answer, task) == gym_reward(f"some work #{task.answer}", task) == 1.0
        assert gym_reward(f"#1 so <answer>{task.answer}</answer>#2", task) == 1.0
        assert gym_reward("no idea", task) < 0.5


NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Datasets whose tasks have several solutions, and no reference answer."""


@pytest.mark.nightly
@pytest.mark.slow
def test_every_dataset_of_the_library_loads_and_scores() -> None:
    import reasoning_gym

    tasks = gym_tasks(["all"], size=1, seed=3)
    names = set(reasoning_gym.factory.DATASETS) - {"composite"}
    assert {task.columns["dataset"] for task in tasks} == names and len(names) > 100
    for task in tasks:
        pickle.dumps(task.columns)  # rewards get the columns in another process
        assert 0 <= gym_reward("", task) < 0.5
        assert gym_reward("<answer>zzz</answer>", task) <= 1
        if task.answer is None:
            assert task.columns["dataset"] in NO_REFERENCE
        else:
            assert gym_reward(f"<answer>{task.answer}</answer>", task) == 1.0


def test_an_answer_that_a_scorer_cannot_read_is_wrong() -> None:
    """The library's scorer of prime_factorization raises on text."""
    (task,) = gym_tasks(["prime_factorization"], size=1, seed=0)
    assert gym_reward(f"<answer>{task.answer}</answer>", task) == 1.0
    assert gym_reward("<answer>no idea</answer>", task) == 0.0
    with pytest.raises(ValueError, match="int"):  # nothing shows that the scorer works
        gym_reward("<answer>no idea</answer>", replace(task, answer=None))


def test_a_mixture_of_datasets_is_a_list_of_names() -> None:
    with pytest.raises(UserError, match=r"data\.reasoning_gym\.tasks"):
        gym_tasks(["composite"], size=1, seed=0)


def test_tasks_are_the_librarys_for_the_seed() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", size=3, seed=4, min_terms=5, max_terms=5)
    tasks = gym_tasks(
        ["chain_sum"], size=3, seed=4, options=["chain_sum.min_terms=5", "chain_sum.max_terms=5"]
    )
    assert [(t.prompt, t.answer) for t in tasks] == [
        (entry["question"], entry["answer"]) for entry in dataset
    ]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("12", "12"),
        ("1+2=3#12 ", "12"),
        ("#1#2", "2"),
        ("<answer> 5 </answer> #6", "5"),
        ("<answer>5", "5"),
        ("", ""),
    ],
)
def test_submitted_answer(completion: str, answer: str) -> None:
    assert submitted_answer(completion) == answer


def test_unknown_names_and_settings() -> None:
    with pytest.raises(UserError, match=r"no dataset 'chain_sun'. Did you mean 'chain_sum'\?"):
        gym_tasks(["chain_sun"], size=1, seed=0)
    with pytest.raises(UserError, match=r"'chain_sum'.*min_trems"):
        gym_tasks(["chain_sum"], size=1, seed=0, options=["chain_sum.min_trems=5"])


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("max_terms=4", "DATASET.NAME=VALUE"),
        ("chain_sum.max_terms", "DATASET.NAME=VALUE"),
        ("gcd.max_value=9", "not in data.reasoning_gym.tasks"),
    ],
)
def test_options_of_another_form_or_dataset(option: str, problem: str) -> None:
    with pytest.raises(UserError, match=r"data\.reasoning_gym\.options") as caught:
        gym_tasks(["chain_sum"], size=1, seed=0, options=[option])
    assert problem in str(caught.value)


def test_options_have_the_types_that_json_gives_them() -> None:
    got = gym_options(
        ["a.n=3", "a.f=0.5", "a.flag=true", "a.list=[1,2]", "a.text=plain"], ["a", "b"]
    )
    assert got == {"a": {"n": 3, "f": 0.5, "flag": True, "list": [1, 2], "text": "plain"}, "b": {}}


def test_a_dataset_may_have_its_own_size_and_each_task_names_its_dataset() -> None:
    tasks = gym_tasks(["chain_sum", "gcd"], size=3, seed=0, options=["chain_sum.size=5"])
    assert [task.source for task in tasks] == ["chain_sum"] * 5 + ["gcd"] * 3


@pytest.mark.parametrize("size", ["2.5", "many", "-1"])
def test_invalid_size_is_refused(size: str) -> None:
    with pytest.raises(UserError, match="chain_sum"):
        gym_tasks(["chain_sum"], size=3, seed=0, options=[f"chain_sum.size={size}"])


def test_solved_is_full_marks_alone() -> None:
    (task,) = gym_tasks(["spell_backward"], size=1, seed=2)
    nearly = task.answer[:-1] + "?"
    assert 0 < gym_reward(nearly, task) < 1
    assert gym_solved(nearly, task) == 0.0 and gym_solved(task.answer, task) == 1.0


def test_worked_solutions_are_right_line_by_line() -> None:
    """Every step of a trace is a true equation that begins with the result of the last one, and the
    answer scores 1.
    """
    options = ["chain_sum.max_digits=2", "gcd.max_value=200", "gcd.max_numbers=3"]
    tasks = gym_tasks(["chain_sum", "gcd", "spell_backward"], size=40, seed=5, options=options)
    for task in tasks:
        if task.columns["dataset"] == "spell_backward":
            assert task.trace is None
            continue
        assert task.trace is not None
        steps, _, answer = task.trace.rpartition("#")
        assert answer == task.answer and gym_reward(task.trace, task) == 1.0
        for step in filter(None, steps.split(";")):
            left, _, right = step.partition("=")
            first, operator, second = re.fullmatch(r"(-?\d+)([-+%])(\d+)", left).groups()  # type: ignore[union-attr]
            compute = {"+": int.__add__, "-": int.__sub__, "%": int.__mod__}[operator]
            assert compute(int(first), int(second)) == int(right), task.trace


def test_worked_solutions_by_hand() -> None:
    assert (
        gym_trace("chain_sum", {"metadata": {"expression": "4 - 1 - 7"}, "answer": "-4"})
        == "4-1=3;3-7=-4#-4"
    )
    assert (
        gym_trace("gcd", {"metadata": {"numbers": [12, 18]}, "answer": "6"}) == "18%12=6;12%6=0#6"
    )
    assert gym_trace("spell_backward", {"metadata": {}, "answer": "nus"}) is None


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'sixfold\[gym\]'"):
        gym_tasks(["chain_sum"], size=1, seed=0)
