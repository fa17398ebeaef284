"""The calculator: its arithmetic, its answers to calls, its rewards, and its tasks."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.environment.calculator import Calculator, CalculatorError, calculate, calculator_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.grade import right_or_wrong
from sixfold.errors import UserError
from sixfold.recipe.schema import ScratchConfig
from sixfold.types import Task


def play(task: Task, replies: list[str]) -> list[Observation | End]:
    """The environment's answers. A reply that ends with a bracket was stopped by it."""

    async def answers() -> list[Observation | End]:
        episode = Calculator(task)
        given: list[Observation | End] = [await episode.start()]
        for reply in replies:
            stopped = ")" if reply.endswith(")") else ""
            given.append(await episode.step(Action(reply.removesuffix(stopped), "stop", stopped)))
        return given

    return asyncio.run(answers())


def test_the_sample_dialogue_has_reward_1() -> None:
    task = Task("1", "123+456+789", answer=1368)
    start, result, end = play(task, ["let me compute c(123+456+789)", "the answer is 1368#"])
    assert isinstance(start, Observation) and start.text == "123+456+789"
    assert isinstance(result, Observation) and result.text == "=1368#"
    assert start.stops == result.stops == (")",)
    assert result.events[0]["kind"] == "tool_call" and result.events[0]["result"] == "1368"
    assert isinstance(end, End) and end.reward == right_or_wrong(True)


@pytest.mark.parametrize(("reply", "reward"), [("1368", 1), ("1367", 0), ("", 0), ("c(1368", 1)])
def test_only_the_last_reply_is_graded(reply: str, reward: float) -> None:
    end = play(Task("1", "123+456+789", answer=1368), ["c(123+456+789)", reply])[-1]
    assert isinstance(end, End) and end.reward == right_or_wrong(bool(reward))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("c()", "syntax"),
        ("c(1+)", "syntax"),
        ("c(1/2)", "syntax"),
        ("c(2**9)", "syntax"),
        ("c(__import__)", "syntax"),
        ("c(\u0661+1)", "syntax"),
        ("(1+2)", "call"),
        (f"c({'9' * 19})", "size"),
        (f"c({'1+' * 16}1)", "size"),
    ],
)
def test_a_malformed_call_is_answered_and_counted(reply: str, kind: str) -> None:
    answer = play(Task("1", "1+2=", answer=3), [reply])[-1]
    assert isinstance(answer, Observation)
    assert answer.text == f"=error {kind}#" and answer.tool_errors == 1
    assert answer.events[0]["error"] == kind
    assert set(ScratchConfig().alphabet).issuperset(answer.text)


@given(st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=1, max_size=16), st.data())
def test_values_are_those_of_python(numbers: list[int], data: st.DataObject) -> None:
    text = str(numbers[0]) + "".join(
        data.draw(st.sampled_from("+-*")) + str(number) for number in numbers[1:]
    )
    assert calculate(text) == eval(text.replace("--", "- -"))


def test_a_call_of_any_size_ends_at_once() -> None:
    for text in ("9" * 100_000, "1+" * 100_000, "-" * 100_000):
        with pytest.raises(CalculatorError):
            calculate(text)


def test_tasks_are_solved_by_their_replies() -> None:
    tasks = calculator_tasks(300, numbers=4, digits=3, seed=0)
    assert tasks == calculator_tasks(300, numbers=4, digits=3, seed=0)
    assert tasks != calculator_tasks(300, numbers=4, digits=3, seed=1)
    assert len({task.id for task in tasks}) == 300
    alphabet = set(ScratchConfig().alphabet)
    for task in tasks:
        assert isinstance(task.trace, tuple) and len(task.trace) == 4
        assert task.answer == eval(task.prompt_text.removesuffix("="))
        *_, end = play(task, list(task.trace))
        assert isinstance(end, End) and end.reward == right_or_wrong(True)
        assert alphabet.issuperset(task.prompt_text + "".join(task.trace))


def test_more_tasks_than_exist() -> None:
    assert len(calculator_tasks(300, numbers=2, digits=1, seed=0)) == 300
    with pytest.raises(UserError, match=r"only 300 exist.*data\.calculator\.digits"):
        calculator_tasks(301, numbers=2, digits=1, seed=0)
