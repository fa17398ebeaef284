"""A completion is solved if the verifier gives full marks, independent of weights, scale and other
rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sixfold.checks.environment import Environment
from sixfold.environment.solved import solved_rule
from sixfold.errors import UserError
from sixfold.types import Group, Reward, Task, Trajectory

TASK = Task("t", "2+2=", answer=4)


def right(completion: str, task: Task) -> float:
    return float(completion == "4")


def half(completion: str, task: Task) -> float:
    return {"4": 1.0, "40": 0.75}.get(completion, 0.0)


def short(completion: str, task: Task) -> float:
    return -0.1 * len(completion)


def tidy(completion: str, task: Task) -> float:
    return 1.0


def judged(text: str, rewards: list[Callable[..., object]], **settings: object) -> Reward:
    trajectory = Trajectory.one_turn("t", 0, [1], [2], [0.0], [0], "stop", text=text)
    with Environment(rewards, **settings) as environment:  # type: ignore[arg-type]
        environment.score([Group(TASK, [trajectory])])
    assert trajectory.reward
    return trajectory.reward


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [([right], []), ([right], [2.0]), ([right], [0.25]), ([right, tidy], [1.0, 0.1]),
    ([tidy, right], [0.1, 1.0]), ([right, tidy], [2.0, 1.0]),
     ([right, short], [1.0, 0.5]), ([right, short], [0.5, 0.1])],
)  # fmt: skip
def test_the_verifier_decides_whatever_the_weights_are(
    rewards: list[Callable[..., object]], weights: list[float]
) -> None:
    yes, no = (judged(text, rewards, weights=weights) for text in ("4", "5"))
    assert (yes.score, yes.solved, no.score, no.solved) == (1.0, True, 0.0, False)


def test_partial_credit_is_not_solved() -> None:
    found = judged("40", [half], weights=[2.0])
    assert (found.value, found.score, found.solved) == (1.5, 0.75, False)


def test_the_sum_decides_between_rewards_of_one_weight() -> None:
    """The first of them may never reach full marks, so that nothing would ever be solved."""

    def form(completion: str, task: Task) -> float:
        return 0.5  # its maximum

    rule = solved_rule(["form", "right"], [1.0, 1.0])
    assert (rule.text, rule.parts) == ("form + right >= 2", ())
    assert solved_rule(["a", "b"], [0.5, 0.5]).text == "0.5 * a + 0.5 * b >= 1"
    found = judged("4", [form, right])
    assert (found.score, found.solved, found.decided_by) == (1.5, False, "")
    assert "eval.metric (form, right)" in rule.doubt([0.5, 1.5]) and rule.doubt([2.0]) == ""
    assert judged("4", [form, right], solved_at=0.75).solved is True
    assert judged("4", [form, right], metric="right").solved is True
    assert solved_rule(["form", "right"], [1.0, 1.0], "reward").text == "reward >= 2"


def test_a_reward_that_does_not_apply_is_no_part_of_full_marks() -> None:
    def elsewhere(completions: list[str], **_: object) -> list[float | None]:
        return [None for _ in completions]

    for metric in ("", "reward"):
        yes, no = (judged(text, [elsewhere, right], metric=metric) for text in ("4", "5"))
        assert (yes.score, yes.solved, no.solved) == (1.0, True, False)


def test_a_builtin_verifier_is_preferred_then_weight() -> None:
    assert solved_rule(["form", "math", "close"], [5.0, 0.1, 1.0]).parts == (
        "math",
        "form",
        "close",
    )
    assert solved_rule(["a", "b", "c"], [0.5, 2.0, 1.0]).parts == ("b", "c", "a")
    assert solved_rule(["a", "math", "b"], [1.0, 1.0, 1.0]).parts == ("math", "a", "b")


def test_a_part_or_the_sum_can_be_named() -> None:
    rewards = [right, half, tidy]
    assert judged("40", rewards, metric="half", solved_at=0.75).solved is True
    assert judged("40", rewards, metric="half", solved_at=0.76).solved is False
    assert judged("5", rewards, metric="tidy").solved is True
    whole, some = (
        judged(text, rewards, metric="reward", weights=[0.7, 0.2, 0.1]) for text in ("4", "40")
    )
    assert whole.solved is True and whole.score == whole.value, (
        "0.7 + 0.2 + 0.1 is full marks, rounding or not"
    )
    assert some.solved is False
    assert (
        judged("40", rewards, metric="reward", weights=[0.7, 0.2, 0.1], solved_at=0.25).solved
        is True
    )


def test_a_reward_for_evaluation_alone_has_weight_0() -> None:
    found = judged("4", [short, right], weights=[1.0, 0.0], metric="right")
    assert (found.value, found.score, found.solved) == (-0.1, 1.0, True)


def test_a_reward_that_does_not_apply_leaves_the_next_to_decide() -> None:
    def elsewhere(completions: list[str], **_: object) -> list[float | None]:
        return [None for _ in completions]

    found = judged("4", [elsewhere, right], weights=[2.0, 1.0])
    assert (found.value, found.score, found.solved) == (1.0, 1.0, True)
    named = judged("4", [elsewhere, right], metric="elsewhere")
    assert (named.value, named.score, named.solved) == (1.0, None, None)


def test_a_failed_check_is_neither_solved_nor_not() -> None:
    def broken(completion: str, task: Task) -> float:
        raise RuntimeError("no")

    found = judged("4", [right, broken], error_budget=1.0)
    assert (found.value, found.score, found.solved) == (None, None, None)


def test_a_name_that_no_reward_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        UserError, match=r"eval.metric = 'rihgt'.*Choose one of right, tidy, reward.*right"
    ):
        Environment([right, tidy], metric="rihgt")
    with pytest.raises(UserError, match=r"eval.metric = 'maths'.*Did you mean 'math'"):
        Environment(["math"], metric="maths")


def test_names_are_known_before_any_file_is_run(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def check(completion, task):\n    return 1.0\n")
    specs = [f"{tmp_path}/a.py:check", f"{tmp_path}/b.py:check"]
    environment = Environment(specs, metric=specs[1])
    assert environment.solved_rule.parts == (specs[1],)


def test_scores_above_full_marks_are_pointed_out() -> None:
    rule = solved_rule(["points"], [1.0])
    assert (
        "set eval.solved_at" in rule.doubt([0.0, 10.0])
        and rule.doubt([0.0, 0.5]) == ""
        and rule.doubt([0.0, 1.0]) == ""
        and rule.doubt([]) == ""
    )


@pytest.mark.parametrize("value", [1e300, -1e16, 10**400, float("inf"), float("nan")])
def test_reward_beyond_float32_is_a_failed_check(value: float) -> None:
    """1e300 is infinite in float32, so it would be taken for a failed check in a group whose other
    rewards are equal.
    """
    found = judged("4", [lambda completion, task: value], error_budget=1.0)
    assert found.value is None and found.error


def test_weighted_sum_beyond_float32_is_a_failed_check() -> None:
    found = judged("4", [right], weights=[1e300])
    assert found.value is None and found.error is not None and "1e+300" in found.error


def test_a_reward_of_steps_alone_decides_nothing() -> None:
    rule = solved_rule(["prm", "other"], [5.0, 1.0], of_steps=["prm"])
    assert rule.parts == ("other",) and rule.score(0.0, {"prm": 0.0}) is None
    rule = solved_rule(["prm", "a", "b"], [1.0, 1.0, 1.0], of_steps=["prm"])
    assert rule.assumed and rule.weights == {"a": 1.0, "b": 1.0} and rule.full == 2.0
    assert solved_rule(["prm", "a"], [9.0, 1.0], "reward", of_steps=["prm"]).full == 1.0
    for metric in ("", "reward"):
        alone = solved_rule(["prm 0", "prm 1"], [1.0, 1.0], metric, 0.0, ["prm 0", "prm 1"])
        assert alone.score(0.0, {"prm 0": 0.0}) is None and "unknown" in alone.text
    with pytest.raises(UserError, match=r"eval\.metric = 'prm' rewards steps"):
        solved_rule(["prm", "a"], [1.0, 1.0], "prm", of_steps=["prm"])


def test_of_rewards_of_steps_the_environment_has_no_score() -> None:
    class Steps:
        of_steps = True
        __name__ = "prm"

        def __call__(self, completion: str, task: Task) -> float:
            return 0.0

    assert judged("4", [Steps()], solved_at=0.0).solved is None
    both = judged("4", [Steps(), tidy], weights=[9.0, 1.0])
    assert both.score == 1.0 and both.solved
