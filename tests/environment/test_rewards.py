"""Rewards by name, functions with TRL's arguments, and refusal of values that are not finite
numbers.
"""

import asyncio
import operator
import os
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sixfold.environment.callables import callable_name, check_callable
from sixfold.environment.frameworks import TrainerState, trl_arguments
from sixfold.environment.grade import checked_value
from sixfold.environment.rewards import RewardFunction, load_reward
from sixfold.environment.sampled import Sampled
from sixfold.errors import UserError
from sixfold.types import Message, Task

FILE = Path(__file__).parent / "rewards_for_tests" / "sample.py"
TASK = Task(
    id="t", prompt="say a", answer="a", columns={"letter": "a", "prompt": "say a", "level": 3}
)
CHAT = Task(id="c", prompt=(Message(role="user", content="say a"),), columns={"letter": "a"})


def test_built_in_names_files_and_modules() -> None:
    assert load_reward("arithmetic")("12#", Task(id="t", prompt="", answer=12)) == 1.0
    assert load_reward("math").name == "math"
    loaded = load_reward(f"{FILE}:length")
    assert (loaded.name, loaded.takes_groups, loaded("four", TASK)) == ("length", False, 4.0)
    assert (
        load_reward("sixfold.environment.arithmetic:arithmetic_reward").name == "arithmetic_reward"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("arithmatic", r"unknown reward 'arithmatic'.* Did you mean 'arithmetic'\?"),
        ("no/such.py:f", "file not found: no/such.py"),
        (f"{FILE}:lenght", r"has no function 'lenght'. Did you mean 'length'\?"),
        ("no_such_module:f", "no module 'no_such_module' is installed"),
        ("no_such_package.rewards:f", "no module 'no_such_package' is installed"),
        ("json.no_such_module:f", "cannot import json.no_such_module: ModuleNotFoundError"),
        (f"{FILE}:", "Use path/to/file.py:function"),
    ],
)
def test_unknown_reward_names(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_reward(spec)


def test_a_file_that_fails_to_load(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"broken.py: ZeroDivisionError: division by zero"):
        load_reward(f"{tmp_path}/broken.py:f")


NOTHING = Sampled(["stop", "stop"], [[], []], [], "")


def test_a_function_of_our_form_gets_what_it_names() -> None:
    def asks(
        completion: str, task: Task, rendered_prompt: str, finish_reason: str, scale: float = 2.0
    ) -> float:
        return scale * (finish_reason == "stop") * len(rendered_prompt)

    def tokens(
        completion: str, task: Task, *, completion_ids: list[int], prompt_ids: list[int]
    ) -> float:
        return 10.0 * sum(prompt_ids) + sum(completion_ids)

    sampled = Sampled(["stop", "length"], [[1], [2, 3]], [8, 9], "<user>")
    for function in (asks, tokens):
        check_callable(function)
    assert RewardFunction("asks", asks).scores(["x", "y"], TASK, sampled) == [12.0, 0.0]
    assert RewardFunction("tokens", tokens).scores(["x", "y"], TASK, sampled) == [171.0, 175.0]


def test_what_a_trl_function_is_given() -> None:
    def everything(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        return []

    def some(completions: list[Any], level: list[int]) -> list[float]:
        return []

    sampled = Sampled(["stop", "length"], [[1], [2, 3]], [8, 9], "<user>say a")
    text = trl_arguments(everything, ["x", "y"], TASK, sampled, {})
    assert text.pop("trainer_state") == TrainerState(0)
    assert callable(text.pop("log_extra")) and callable(text.pop("log_metric"))
    assert text == {
        "prompts": ["say a", "say a"], "completions": ["x", "y"], "completion_ids": [[1], [2, 3]],
        "finish_reason": ["stop", "length"], "prompt_ids": [[8, 9], [8, 9]],
        "rendered_prompt": ["<user>say a", "<user>say a"],
        "letter": ["a", "a"], "level": [3, 3], "answer": ["a", "a"],
    }  # fmt: skip
    assert trl_arguments(some, ["x"], TASK, sampled, {}) == {"completions": ["x"], "level": [3]}
    chat = trl_arguments(everything, ["x"], CHAT, sampled, {})
    assert chat["prompts"] == [[{"role": "user", "content": "say a"}]]
    assert chat["completions"] == [[{"role": "assistant", "content": "x"}]]


def test_trl_functions_score_groups() -> None:
    letters = load_reward(f"{FILE}:trl_letters")
    assert letters.takes_groups
    assert (
        letters.scores(["banana", "b"], TASK, NOTHING)
        == letters.scores(["banana", "b"], CHAT, NOTHING)
        == [3.0, 0.0]
    )
    assert letters("x", Task(id="t", prompt="", columns={"letter": "?"})) is None
    assert load_reward(f"{FILE}:trl_async").scores(["x", "yz"], TASK, NOTHING) == [6.0, 7.0]
    with pytest.raises(ValueError, match="returned 1 rewards for 2 completions"):
        load_reward(f"{FILE}:trl_short").scores(["x", "y"], TASK, NOTHING)


@pytest.mark.parametrize(
    ("value", "error"),
    [("1", TypeError), (None, TypeError), (float("nan"), ValueError), (float("-inf"), ValueError)],
)
def test_values_that_are_no_reward(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        checked_value(value)
    with pytest.raises(error):
        RewardFunction("f", lambda completion, task: value)("x", TASK)


def test_numbers_of_array_libraries_are_rewards() -> None:
    import numpy
    import torch

    values = [
        True, numpy.float32(0.5), numpy.int64(2), numpy.bool_(True), numpy.array(0.5),
        numpy.array([2]), Decimal("0.5"), Fraction(1, 4),
        torch.tensor(0.5), torch.tensor([[3]]), torch.tensor(True),
        torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(1.0, requires_grad=True),
    ]  # fmt: skip
    assert [checked_value(v) for v in values] == [
        1.0,
        0.5,
        2.0,
        1.0,
        0.5,
        2.0,
        0.5,
        0.25,
        0.5,
        3.0,
        1.0,
        0.5,
        1.0,
    ]
    for wrong in (
        numpy.array([1.0, 2.0]),
        torch.zeros(2),
        torch.tensor(1j),
        numpy.complex64(1),
        "0.5",
        b"1",
        [0.5],
        {},
    ):
        with pytest.raises(TypeError, match="not a number"):
            checked_value(wrong)


def test_what_trl_functions_may_return() -> None:
    import numpy
    import torch

    forms: list[Any] = [
        torch.tensor([0.5, 1.0]), torch.tensor([[0.5], [1.0]]), numpy.array([0.5, 1.0]),
        numpy.array([0.5, 1.0], dtype=object),
        [torch.tensor(0.5), numpy.bool_(True)], (0.5, 1), (value for value in (0.5, True)),
    ]  # fmt: skip
    for form in forms:
        assert RewardFunction("f", lambda completions, form=form: form).scores(
            ["x", "y"], TASK, NOTHING
        ) == [0.5, 1.0]
    for none in ([None, 1], numpy.array([None, 1.0])):
        assert RewardFunction("f", lambda completions, form=none: form).scores(
            ["x", "y"], TASK, NOTHING
        ) == [None, 1.0]
    for wrong in (1.0, torch.tensor(1.0), "ab", {"a": 1, "b": 2}, None):
        with pytest.raises(TypeError, match="not a list of rewards"):
            RewardFunction("f", lambda completions, form=wrong: form).scores(
                ["x", "y"], TASK, NOTHING
            )


def test_async_rewards_run_inside_a_running_loop_and_keep_one_loop() -> None:
    loops = []

    async def ours(completion: str, task: Task) -> float:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return float(len(completion))

    async def group(completions: list[str], **kwargs: Any) -> list[float]:
        return [await ours(text, TASK) for text in completions]

    async def notebook() -> list[list[float | None]]:
        return [RewardFunction("f", f).scores(["x", "yz"], TASK, NOTHING) for f in (ours, group)]

    assert asyncio.run(notebook()) == [[1.0, 2.0]] * 2
    assert RewardFunction("f", ours).scores(["xyz"], TASK, NOTHING) == [3.0]
    assert len(set(map(id, loops))) == 1  # a client that a reward keeps is bound to its loop


class Judge:
    def __len__(self) -> int:
        return 0  # an object that is false

    def __call__(self, completion: str, task: Task) -> float:
        return 2.0

    def method(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [3.0] * len(completions)


def scaled(completion: str, task: Task, factor: float) -> float:
    return factor


@pytest.mark.parametrize(
    ("reward", "name", "value"),
    [
        (lambda completion, task: 1.0, "<lambda>", 1.0), (Judge(), "Judge", 2.0),
        (Judge().method, "method", 3.0),
        (partial(scaled, factor=4.0), "scaled", 4.0), (lambda *arguments: 5.0, "<lambda>", 5.0),
        (lambda **columns: [6.0] * len(columns["completions"]), "<lambda>", 6.0),
        (operator.eq, "eq", 0.0),
    ],
    ids=["lambda", "object", "method", "partial", "star", "columns", "built-in"],
)  # fmt: skip
def test_callables_of_every_kind(reward: Any, name: str, value: float) -> None:
    check_callable(reward)
    assert (callable_name(reward), RewardFunction(name, reward).scores(["x"], TASK, NOTHING)) == (
        name,
        [value],
    )


@pytest.mark.parametrize(
    "reward",
    [42, None, "math", [scaled], scaled, lambda completion: 1.0, lambda: 1.0, Judge, object()],
)
def test_values_that_are_not_rewards(reward: Any) -> None:
    with pytest.raises(UserError, match="reward"):
        check_callable(reward)


def test_a_file_that_was_just_edited_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would use old bytecode if the source has the same size and second of change."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for value in (1.0, 2.0):
        file.write_text(f"def reward(completion, task):\n    return {value}\n")
        os.utime(file, (10**9, 10**9))
        assert load_reward(f"{file}:reward")("", Task(id="t", prompt="")) == value
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
