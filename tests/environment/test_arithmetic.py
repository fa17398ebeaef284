"""Sums with traces: the trace gives the answer, the order of terms does not make another task, and
the reward reads the last integer.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.environment.arithmetic import arithmetic_reward, arithmetic_tasks, worked_trace
from sixfold.errors import UserError
from sixfold.recipe.schema import ScratchConfig
from sixfold.types import Task


def test_the_trace_of_a_known_sum() -> None:
    assert worked_trace((347, 58)) == "7+8=15;4+5+1=10;3+0+1=4;#405"
    assert worked_trace((999, 1)) == "9+1=10;9+0+1=10;9+0+1=10;#1000"
    assert worked_trace((5, 6, 9)) == "5+6+9=20;#20"


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=8))
def test_the_answer_can_be_read_off_the_columns(operands: list[int]) -> None:
    *columns, last = worked_trace(tuple(operands)).split(";")
    sums = []
    for column in columns:
        left, right = column.split("=")
        assert sum(map(int, left.split("+"))) == int(right)
        sums.append(right)
    digits = sums[-1] + "".join(total[-1] for total in reversed(sums[:-1]))
    assert int(digits) == sum(operands) == int(last.removeprefix("#"))


def test_no_two_tasks_have_the_same_operands_in_any_order() -> None:
    for count, seed in (
        (20, 3),
        (25, 4),
        (27, 5),
        (55, 6),
    ):  # of the 55 sums of two digits: by drawing, and by taking all of them
        tasks = arithmetic_tasks(count, terms=2, digits=1, seed=seed)
        multisets = {tuple(sorted(task.prompt.rstrip("=").split("+"))) for task in tasks}
        assert len(multisets) == len({task.id for task in tasks}) == count


def test_tasks_are_a_function_of_the_arguments() -> None:
    first = arithmetic_tasks(200, terms=3, digits=2, seed=5)
    assert first == arithmetic_tasks(200, terms=3, digits=2, seed=5)
    assert first != arithmetic_tasks(200, terms=3, digits=2, seed=6)
    task = first[0]
    assert (
        task.answer == sum(map(int, task.prompt.rstrip("=").split("+")))
        and task.id == f"arithmetic-{task.prompt.rstrip('=')}"
    )


def test_tasks_use_the_alphabet_of_the_scratch_model_and_their_traces_are_right() -> None:
    alphabet = set(ScratchConfig().alphabet)
    for task in arithmetic_tasks(300, terms=4, digits=3, seed=0):
        assert alphabet.issuperset(task.prompt_text + (task.trace or ""))
        assert arithmetic_reward(task.trace or "", task) == 1.0


def test_more_sums_than_exist() -> None:
    with pytest.raises(
        UserError, match=r"56 different sums .* only 55 exist. Raise data.arithmetic.digits"
    ):
        arithmetic_tasks(56, terms=2, digits=1, seed=0)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("12#", 1),
        ("let me think... 12#", 1),
        ("7+5=12;#012", 1),
        ("11#", 0),
        ("120#", 0),
        ("12 or 13", 0),
        ("-12", 0),
        ("twelve", 0),
        ("", 0),
    ],
)
def test_reward_is_the_last_integer(completion: str, reward: float) -> None:
    assert arithmetic_reward(completion, Task(id="a", prompt="7+5=", answer=12)) == reward


def test_reward_of_a_number_longer_than_int_accepts() -> None:
    assert arithmetic_reward("1" * 10_000, Task(id="a", prompt="7+5=", answer=12)) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("The sum is −5", -5, 1), ("－５", -5, 1), ("４２", 42, 1), ("1,234", 1234, 1),
        ("1，234", 1234, 1), ("12.", 12, 1), ("12", -12, 0), ("-12", 12, 0), ("3.5", 5, 0),
        ("1,005", 5, 0), ("0.5", 5, 0), ("12.0", 0, 0), ("7, 8", 8, 1),
    ],
)  # fmt: skip
def test_the_last_number_is_read_as_a_whole(completion: str, answer: int, value: int) -> None:
    assert arithmetic_reward(completion, Task("t", "p", answer=answer)) == value
