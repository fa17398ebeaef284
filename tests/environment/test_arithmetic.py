"""Sums with traces: the trace gives the answer, the order of terms does not make another task, and
the reward reads the last integer.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.data.generated import sums
from sixfold.environment.arithmetic import (
    arithmetic_reward,
    arithmetic_tasks,
    running_trace,
    shared_counts,
    worked_sum_grade,
    worked_trace,
)
from sixfold.errors import UserError
from sixfold.recipe.schema import ArithmeticConfig, DataConfig, ScratchConfig
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


def test_the_running_sums_of_a_known_sum() -> None:
    assert running_trace((3, 4, 5, 6)) == "3+4=7;7+5=12;12+6=18;#18"
    assert running_trace((9, 0)) == "9+0=9;#9"


@given(st.lists(st.integers(0, 999), min_size=2, max_size=8))
def test_each_running_sum_adds_the_next_number_to_the_last_sum(operands: list[int]) -> None:
    *steps, last = running_trace(tuple(operands)).split(";")
    read = [tuple(map(int, step.replace("=", "+").split("+"))) for step in steps]
    assert [number for _, number, _ in read] == operands[1:]
    assert [before for before, _, _ in read] == [operands[0], *(after for *_, after in read[:-1])]
    assert all(before + number == after for before, number, after in read)
    assert last == f"#{sum(operands)}"


def ranged(trace: str, limit: int = 0) -> list[Task]:
    settings = ArithmeticConfig(terms=5, min_terms=3, digits=1, trace=trace)  # type: ignore[arg-type]
    return sums(DataConfig(limit=limit, arithmetic=settings), seed=3)


def test_sums_of_a_range_of_terms_name_their_number_and_differ_in_their_trace_only() -> None:
    running, alone = ranged("running", 700), ranged("answer", 700)
    assert Counter(task.source for task in running) == {
        "3 terms": 220,  # all that exist: 10 + 2 choose 3
        "4 terms": 240,
        "5 terms": 240,
    }
    assert all(len(t.prompt_text.split("+")) == int(t.source[0]) for t in running)
    assert [replace(task, trace=None) for task in running] == [
        replace(task, trace=None) for task in alone
    ]
    assert all(task.trace == f"#{task.answer}" for task in alone)
    assert all(str(task.trace).count(";") == int(task.source[0]) - 1 for task in running)
    one = arithmetic_tasks(240, terms=4, digits=1, seed=3)
    assert [task.prompt for task in running[220:460]] == [task.prompt for task in one]


def test_all_sums_of_a_range_exist_without_a_limit() -> None:
    assert len(ranged("answer")) == len({task.id for task in ranged("answer")}) == 220 + 715 + 2002


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 60))
def test_counts_are_shared_as_evenly_as_possible(possible: list[int], count: int) -> None:
    possible.sort()
    count = min(count, sum(possible))
    shares = shared_counts(count, possible)
    assert sum(shares) == count
    assert all(0 <= s <= most for s, most in zip(shares, possible, strict=True))
    # A part that is not full has as much as the largest, but for one that no division gives.
    assert all(s >= max(shares) - 1 for s, most in zip(shares, possible, strict=True) if s < most)


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("3+4=7;7+5=12;#12", "passed"),
        ("#12", "passed"),
        ("3+4+5=12;#12", "passed"),
        ("3+4=8;8+5=13;#13", "wrong_answer"),
        ("#13", "wrong_answer"),
        ("#-12", "wrong_answer"),
        ("3+4=7;7+5=12;12", "rejected"),  # without #
        ("3+4=7;7+5=12#12", "rejected"),
        ("3+4=7;7+5=;#12", "rejected"),
        ("3+4=7;7+5=12;#12#12", "rejected"),
        ("3+4=7;7+5=12;#", "rejected"),
        ("12", "rejected"),
        ("#12.0", "rejected"),
        ("#１２", "rejected"),
        ("", "rejected"),
    ],
)
def test_a_broken_form_is_told_apart_from_wrong_arithmetic(completion: str, verdict: str) -> None:
    grade = worked_sum_grade(completion, Task(id="a", prompt="3+4+5=", answer=12))
    assert (grade.verdict, grade.value) == (verdict, float(verdict == "passed"))


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
