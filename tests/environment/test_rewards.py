"""Names become rewards, TRL's functions get what TRL gives them, and a value that is no finite number is refused."""

from pathlib import Path
from typing import Any

import pytest

from sixfold.environment.rewards import RewardFunction, checked_value, load_reward, trl_arguments
from sixfold.errors import UserError
from sixfold.types import Message, Task

FILE = Path(__file__).parent / "rewards_for_tests" / "sample.py"
TASK = Task(id="t", prompt="say a", answer="a", columns={"letter": "a", "prompt": "say a", "level": 3})
CHAT = Task(id="c", prompt=(Message(role="user", content="say a"),), columns={"letter": "a"})


def test_built_in_names_files_and_modules() -> None:
    assert load_reward("arithmetic")("12#", Task(id="t", prompt="", answer=12)) == 1.0
    assert load_reward("math").name == "math"
    loaded = load_reward(f"{FILE}:length")
    assert (loaded.name, loaded.takes_groups, loaded("four", TASK)) == ("length", False, 4.0)
    assert load_reward("sixfold.environment.arithmetic:arithmetic_reward").name == "arithmetic_reward"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("arithmatic", r"unknown reward 'arithmatic'.* Did you mean 'arithmetic'\?"),
        ("no/such.py:f", "no such file no/such.py"),
        (f"{FILE}:lenght", r"has no function 'lenght'. Did you mean 'length'\?"),
        ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError"),
        (f"{FILE}:", "want path/to/file.py:function"),
    ],
)
def test_names_that_mean_nothing(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_reward(spec)


def test_a_file_that_fails_to_load(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"broken.py: ZeroDivisionError: division by zero"):
        load_reward(f"{tmp_path}/broken.py:f")


def test_what_a_trl_function_is_given() -> None:
    def everything(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        return []

    def some(completions: list[Any], level: list[int]) -> list[float]:
        return []

    text = trl_arguments(everything, ["x", "y"], TASK, [[1], [2, 3]])
    assert text == {
        "prompts": ["say a", "say a"], "completions": ["x", "y"], "completion_ids": [[1], [2, 3]],
        "letter": ["a", "a"], "level": [3, 3], "answer": ["a", "a"],
    }  # fmt: skip
    assert trl_arguments(some, ["x"], TASK, [[]]) == {"completions": ["x"], "level": [3]}
    chat = trl_arguments(everything, ["x"], CHAT, [[]])
    assert chat["prompts"] == [[{"role": "user", "content": "say a"}]]
    assert chat["completions"] == [[{"role": "assistant", "content": "x"}]]


def test_trl_functions_score_groups() -> None:
    letters = load_reward(f"{FILE}:trl_letters")
    assert letters.takes_groups
    assert letters.scores(["banana", "b"], TASK, [[], []]) == letters.scores(["banana", "b"], CHAT, [[], []]) == [3.0, 0.0]
    assert letters("x", Task(id="t", prompt="", columns={"letter": "?"})) is None
    assert load_reward(f"{FILE}:trl_async").scores(["x", "yz"], TASK, [[], []]) == [6.0, 7.0]
    with pytest.raises(ValueError, match="returned 1 rewards for 2 completions"):
        load_reward(f"{FILE}:trl_short").scores(["x", "y"], TASK, [[], []])


@pytest.mark.parametrize(("value", "error"), [("1", TypeError), (None, TypeError), (float("nan"), ValueError), (float("-inf"), ValueError)])
def test_values_that_are_no_reward(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        checked_value(value)
    with pytest.raises(error):
        RewardFunction("f", lambda completion, task: value)("x", TASK)


def test_numpy_numbers_and_booleans_are_rewards() -> None:
    import numpy

    assert [checked_value(v) for v in (True, numpy.float32(0.5), numpy.int64(2))] == [1.0, 0.5, 2.0]
