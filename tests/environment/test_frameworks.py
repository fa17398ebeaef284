"""Functions of TRL, verl and OpenRLHF: recognised by their parameters, called as there, and their
results read as there. Expected values are computed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold.batch import collate
from sixfold.checks.environment import Environment
from sixfold.checks.trial import try_rewards
from sixfold.environment.callables import callable_name, check_callable, form_of
from sixfold.environment.named import load_file
from sixfold.errors import UserError
from sixfold.types import Group, Message, Reward, Task, Trajectory

FILE = Path(__file__).parent / "rewards_for_tests" / "other_frameworks.py"
other: Any = load_file(FILE, "reward")
ROW = {
    "data_source": "math_dapo",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 7},
    "solution": "72",
}
CHAT = (Message(role="user", content="6 * 12?"),)
VOCABULARY = {1: "<user>", 2: "6*12?", 3: "<think>", 4: "72", 5: "</stop>", 6: "<end>", 7: "71"}


def shown(ids: Sequence[int], special: bool = True) -> str:
    return "".join(VOCABULARY[i] for i in ids if special or i not in (1, 6))


def scored(
    reward: Callable[..., Any] | str,
    texts: Sequence[str] = ("72", "71"),
    *,
    prompt: Any = CHAT,
    answer: Any = "72",
    **settings: Any,
) -> list[Reward]:
    task = Task("t", prompt, answer=answer, columns=ROW)
    group = Group(
        task,
        [
            Trajectory.one_turn("t", i, [1, 2], [4] * (i + 3), [0.0] * (i + 3), [5] * (i + 3),
                                "stop", text=text)
            for i, text in enumerate(texts)
        ],
    )  # fmt: skip
    decode = settings.pop("shown", None)
    with Environment([reward], **settings) as environment:
        environment.shown = decode
        environment.score([group])
    assert all(t.reward for t in group.trajectories)
    return [t.reward for t in group.trajectories if t.reward]


def values(reward: Callable[..., Any] | str, *texts: str, **settings: Any) -> list[float | None]:
    return [one.value for one in scored(reward, texts or ("72", "71"), **settings)]


def test_forms_are_told_by_the_names_of_the_parameters() -> None:
    forms: dict[str, list[Any]] = {
        "trl": [
            *(other.soft_overlong, other.cosine, other.accuracy),
            *(other.by_keyword_alone, other.column_alone),
            lambda prompts, **kwargs: [],
            lambda completions, ground_truth: [],
            lambda completions, group, **kwargs: [],
            lambda ground_truth, **kwargs: [],
            lambda solution, completion_ids, **kwargs: [],
            lambda trainer_state, **kwargs: [],
        ],
        "verl": [
            *(other.gsm8k, other.compute_score, other.compute_score_async),
            *(other.geo3k, other.prime_math, other.math_verify),
            lambda completion, ground_truth: 0.0,
        ],
        "verl_batch": [other.compute_score_batched],
        "openrlhf": [other.reward_func, other.old_reward_func],
        "members": [lambda group, task: []],
        "single": [
            lambda completion, task: 0.0,
            lambda text, _: 0.0,
            lambda c, t, completion_ids: 0.0,
            lambda completion, task, **kwargs: 0.0,
            lambda *args, **kwargs: 0.0,
            lambda answer, reference_task: 0.0,
        ],
    }
    for form, functions in forms.items():
        for number, function in enumerate(functions):
            check_callable(function)
            assert form_of(function) == form, (form, number)
    assert callable_name(other.soft_overlong) == "soft_overlong_punishment_reward"


def test_trl_functions_are_called_by_keyword() -> None:
    assert values(other.soft_overlong) == [-0.5, -1.0]  # 3 and 4 tokens of 4, a buffer of 2
    assert values(f"{FILE}:soft_overlong") == [-0.5, -1.0]
    assert values(other.cosine) == [3.0, 4.0]
    assert values(other.by_keyword_alone, prompt="p") == [2.0, 2.0]
    assert values(other.column_alone, prompt="p") == [1.0, 0.0]
    assert values(lambda prompts, **_: [len(p[0]["content"]) for p in prompts]) == [7.0, 7.0]


def test_trl_functions_may_log_and_read_the_step() -> None:
    first, second = scored(other.accuracy)
    assert (first.value, second.value) == (1.0, 0.0)
    assert first.parts == {"accuracy": 1.0, "accuracy.accuracy": 0.5}
    assert first.weights == {"accuracy": 1.0, "accuracy.accuracy": 0.0}

    def late(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        return [float(trainer_state.global_step)] * len(completions)

    assert values(late) == [5.0, 5.0]  # the version of the weights that sampled them


def test_a_missing_column_is_named() -> None:
    def wants(completions: list[Any], gold: list[Any]) -> list[float]:
        return [1.0] * len(completions)

    error = scored(wants, error_budget=1.0)[0].error
    assert error and "no column 'gold'" in error and "solution" in error


def test_verl_functions() -> None:
    assert values(other.gsm8k, "#### 72", "#### 71") == [1.0, 0.0]
    assert values(other.geo3k) == values(other.prime_math) == [1.0, 0.0]
    assert values(other.compute_score_async) == [1.0, 0.0]
    assert values(f"{FILE}:compute_score") == [1.0, -1.0]
    first = scored(other.compute_score)[0]
    assert first.parts == {
        "compute_score": 1.0, "compute_score.acc": 1.0, "compute_score.index": 7.0
    }  # fmt: skip
    assert [one.parts["compute_score_batched.extras"] for one in scored(
        other.compute_score_batched)] == [2.0, 1.0]  # fmt: skip
    assert values(other.compute_score_batched) == [1.0, 0.0]
    assert ROW["extra_info"] == {"index": 7}


def test_verl_rows_without_an_answer_column_use_their_ground_truth() -> None:
    assert values(other.gsm8k, "#### 72", answer=None) == [1.0]
    bare = Task("t", "p")
    one = Trajectory.one_turn("t", 0, [1], [4], [0.0], [0], "stop", text="72")
    with Environment([other.gsm8k], error_budget=1.0) as environment:
        environment.score([Group(bare, [one])])
    assert one.reward and "data.answer_field" in str(one.reward.error)


def test_openrlhf_functions() -> None:
    first = scored(other.reward_func, shown=shown)[0]
    assert first.value == 0.0  # the three tokens "72" are no label
    assert values(f"{FILE}:reward_func") == [1.0, 0.0]
    assert scored(other.reward_func)[1].parts == {
        "reward_func": 0.0, "reward_func.scores": 0.0, "reward_func.length": 9.0
    }  # fmt: skip
    assert values(other.old_reward_func) == [9.0, 9.0]  # "6 * 12?" and the completion


def test_a_dictionary_without_its_reward_is_a_failed_check() -> None:
    for function, key in (
        (lambda solution_str, ground_truth: {"acc": 1.0}, "score"),
        (lambda queries, prompts, labels: {"scores": [1.0]}, "rewards"),
    ):
        error = scored(function, error_budget=1.0)[0].error
        assert error and f"without '{key}'" in error


def test_metrics_are_logged_and_not_trained_on() -> None:
    """A method that normalises each part would otherwise count them with weight 1."""
    rewards = scored(other.compute_score)
    rows = [
        Trajectory.one_turn("t", i, [1], [2], [0.0], [0], "stop", reward=reward)
        for i, reward in enumerate(rewards)
    ]
    batch = collate([Group(Task("t", "p"), rows)])
    assert batch.part_names == ("compute_score",)
    assert rewards[0].paid_for_form is False


def test_each_framework_gets_its_own_text() -> None:
    """The prompt opens a thought, a stop string ends the completion, and so does an end token."""
    seen: dict[str, Any] = {}

    def ours(completion: str, task: Task) -> float:
        seen["ours"] = completion
        return 1.0

    def trl(completions: list[Any], **_: Any) -> list[float]:
        seen["trl"] = completions[0]
        return [1.0]

    def verl(solution_str: str, ground_truth: str) -> float:
        seen["verl"] = solution_str
        return 1.0

    def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        seen["openrlhf"] = queries, prompts
        return [1.0]

    one = Trajectory.one_turn(
        "t", 0, [1, 2, 3], [4, 5, 6], [0.0] * 3, [0] * 3, "stop", text="72", opened="<think>"
    )
    with Environment([ours, trl, verl, openrlhf]) as environment:
        environment.shown = shown
        environment.score([Group(Task("t", "6*12?", answer="72"), [one])])
    assert seen == {
        "ours": "<think>72",
        "trl": "72</stop>",
        "verl": "72</stop>",
        "openrlhf": (["<user>6*12?<think>72</stop><end>"], ["<user>6*12?<think>"]),
    }


@pytest.mark.parametrize(
    "name", ["answer", "solution", "ground_truths", "label", "reference", "test_cases", "prompt",
             "expected_output", "extra_info", "questions", "target"],
)  # fmt: skip
def test_a_second_parameter_that_is_no_task_is_refused(name: str) -> None:
    function = eval(f"lambda completion, {name}: 0.0")
    with pytest.raises(UserError, match=rf"parameter '{name}'.*f\(completion, task\).*task.answer"):
        check_callable(function)


def test_a_second_parameter_of_a_plain_type_is_refused() -> None:
    def typed(completion: str, other: str) -> float:
        return 0.0

    with pytest.raises(UserError, match="parameter 'other'"):
        check_callable(typed)


def test_a_pool_that_a_reward_keeps_lives_on(tmp_path: Path) -> None:
    """Without its processes the pool is broken in the second check, and the reward pays 0."""
    reward = f"{FILE}:math_verify"
    assert values(reward, "72", "72", "72", timeout_s=60.0) == [1.0, 1.0, 1.0]


def test_the_error_says_how_prompts_become_messages() -> None:
    text = scored(other.accuracy, prompt="6 * 12?", error_budget=1.0)[0].error
    assert text and "data.system_prompt" in text and "data.prompt_field" in text

    def texts(completions: list[str], **_: Any) -> list[float]:
        return [float(completion.strip() == "72") for completion in completions]

    def pattern(completions: list[str], **_: Any) -> list[float]:
        import re

        return [float(bool(re.search("7", completion))) for completion in completions]

    for function in (texts, pattern):
        chat = scored(function, error_budget=1.0)[0].error
        assert chat and "completion[0]['content']" in chat, function


def test_a_reward_that_applies_to_no_task_is_told_before_training() -> None:
    def elsewhere(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    def make(task: Task, number: int, text: str) -> Trajectory:
        return Trajectory.one_turn(task.id, number, [1], [4], [0.0], [0], "stop", text=text)

    with Environment([elsewhere]) as environment:
        line = try_rewards(environment, [Task("t", "p", answer="72")], make)
    assert "returned None for all 3 made-up completions" in line
