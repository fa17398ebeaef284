"""Grades reach the reward of their trajectory. Failed checks have no value and run once more."""

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.check import Check, Outcome
from sixfold.checks.environment import Environment
from sixfold.checks.process import Job, _outcome
from sixfold.checks.scorer import Result, combined
from sixfold.environment.episode import End, final_reward
from sixfold.environment.grade import Grade
from sixfold.environment.rewards import RewardFunction, load_reward
from sixfold.environment.sampled import Sampled
from sixfold.environment.solved import SolvedRule
from sixfold.processes.child import ChildEnded
from sixfold.types import VERDICTS, Group, Reward, Task, Trajectory, Verdict

REWARDS = str(Path(__file__).parent / "rewards_for_tests" / "graded.py")
PASSED, WRONG = Grade(1.0, "passed"), Grade(0.0, "wrong_answer", "line 1\nline 2", "namespaces")
FAILED = Grade(None, "infrastructure_error", "no sandbox")


def group(texts: list[str], **columns: Any) -> Group:
    made = [
        Trajectory.one_turn("t", k, [1], [7], [-1.0], [0], "stop", text=text)
        for k, text in enumerate(texts)
    ]
    return Group(Task(id="t", prompt="q", answer=1, columns=columns), made)


def rewards(g: Group) -> list[Reward]:
    return [t.reward for t in g.trajectories if t.reward is not None]


def test_verdicts_are_those_of_the_contract() -> None:
    assert set(VERDICTS) == set(get_args(Verdict)) and len(VERDICTS) == 10


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(None, "wrong_answer"), (0.0, "infrastructure_error"), (1.0, "right"), (None, "")],
)
def test_a_grade_has_a_value_exactly_if_the_check_did_not_fail(value: Any, verdict: Any) -> None:
    with pytest.raises(ValueError, match=r"passed|None exactly"):
        Grade(value, verdict)


def test_the_detail_of_a_grade_is_one_short_line() -> None:
    assert WRONG.detail == "line 1 line 2"
    assert len(Grade(0.0, "rejected", "x" * 10_000).detail) == 300


@pytest.mark.parametrize("value", [float("nan"), 1e300, "1"])
def test_the_value_of_a_grade_must_be_trainable(value: Any) -> None:
    given = RewardFunction("f", lambda completion, task: Grade(value, "passed"))
    with pytest.raises((TypeError, ValueError)):
        given("x", Task(id="t", prompt="q"))


def result(given: float | Grade | None, error: str | None = None) -> Result:
    return Result(given, error, 0.25)


CORRECT_DECIDES = SolvedRule(("correct", "other"), 1.0)


def test_the_reward_that_decides_gives_the_verdict() -> None:
    every = [("form", 0.5, result(PASSED)), ("correct", 2.0, result(WRONG))]
    reward = combined(every, CORRECT_DECIDES)
    assert (reward.value, reward.verdict, reward.solved) == (0.5, "wrong_answer", False)
    assert (reward.detail, reward.isolation) == ("line 1 line 2", "namespaces")
    assert reward.weights == {"form": 0.5, "correct": 2.0} and reward.decided_by == "correct"
    assert reward.latency == {"form": 0.25, "correct": 0.25} and reward.seconds == 0.5


def test_a_plain_number_that_decides_leaves_no_verdict() -> None:
    every = [("form", 1.0, result(PASSED)), ("correct", 1.0, result(0.0))]
    assert combined(every, CORRECT_DECIDES).verdict is None


@pytest.mark.parametrize(
    ("second", "verdict"), [(PASSED, "passed"), (WRONG, "wrong_answer"), (0.0, "passed")]
)
def test_where_the_sum_decides_the_first_fault_gives_the_verdict(second: Any, verdict: str) -> None:
    every = [("form", 1.0, result(PASSED)), ("correct", 1.0, result(second))]
    assert combined(every, SolvedRule((), 2.0)).verdict == verdict


@pytest.mark.parametrize("failed", [result(None, "raised"), result(FAILED, "no sandbox")])
def test_one_failed_check_is_an_infrastructure_error_without_value(failed: Result) -> None:
    every = [("correct", 1.0, result(PASSED)), ("other", 1.0, failed)]
    reward = combined(every, CORRECT_DECIDES)
    assert (reward.value, reward.verdict) == (None, "infrastructure_error")
    assert reward.parts == {"correct": 1.0} and str(reward.error).startswith("other: ")
    assert reward.solved is None and reward.score is None


def test_a_reward_that_does_not_apply_is_no_infrastructure_error() -> None:
    reward = combined([("correct", 1.0, result(None))], CORRECT_DECIDES)
    assert (reward.value, reward.verdict) == (None, None) and reward.error


@pytest.mark.parametrize(
    ("form", "correct", "paid"), [(1.0, 0.0, True), (1.0, 1.0, False), (0.0, 0.0, False)]
)
def test_paid_for_form_alone(form: float, correct: float, paid: bool) -> None:
    every = [("form", 0.1, result(form)), ("correct", 1.0, result(correct))]
    assert combined(every, CORRECT_DECIDES).paid_for_form is paid
    punished = [("form", -0.1, result(form)), ("correct", 1.0, result(correct))]
    assert combined(punished, CORRECT_DECIDES).paid_for_form is False
    assert combined(every, SolvedRule((), 1.1)).paid_for_form is None


def test_a_trajectory_keeps_its_verdict_in_its_record() -> None:
    trajectory = group(["x"]).trajectories[0]
    trajectory.reward = combined([("correct", 1.0, result(WRONG))], CORRECT_DECIDES)
    record = json.loads(json.dumps(trajectory.to_record()))
    assert Trajectory.from_record(record).reward == trajectory.reward
    for name in ("verdict", "detail", "isolation", "weights", "decided_by", "latency", "reruns"):
        del record["reward"][name]  # a record of an earlier release
    assert Trajectory.from_record(record).reward == Reward(
        0.0, {"correct": 0.0}, None, 0.25, score=0.0, solved=False
    )


def test_the_end_of_an_episode_may_have_a_grade() -> None:
    assert final_reward(End(reward=WRONG)) == Reward(
        0.0, verdict="wrong_answer", detail="line 1 line 2", isolation="namespaces"
    )
    assert final_reward(End(reward=FAILED)) == Reward.failed("no sandbox")


SOUND = {"values": [0.5], "error": None, "seconds": 0.1, "cause": ""}
RECORD = {"value": 0.0, "verdict": "timeout", "detail": "test 3", "isolation": "namespaces"}


@pytest.mark.parametrize(
    ("changes", "sound"),
    [
        ({}, True),
        ({"values": [RECORD]}, True),
        ({"values": [None]}, True),
        ({"values": [], "error": "ValueError", "cause": "raised"}, True),
        ({"check": 1}, False),
        ({"values": []}, False),
        ({"values": [0.5, 0.5]}, False),
        ({"values": [float("nan")]}, False),
        ({"values": ["1"]}, False),
        ({"values": [True]}, False),
        ({"values": [{**RECORD, "value": float("inf")}]}, False),
        ({"values": [{**RECORD, "value": "1"}]}, False),
        ({"values": [{**RECORD, "value": None}]}, False),
        ({"values": [{**RECORD, "verdict": "right"}]}, False),
        ({"values": [{**RECORD, "verdict": ["passed"]}]}, False),
        ({"values": [{**RECORD, "detail": 5}]}, False),
        ({"values": [{**RECORD, "isolation": 5}]}, False),
        ({"values": [{**RECORD, "more": 5}]}, False),
        ({"values": [{}]}, False),
        ({"error": "ValueError"}, False),
        ({"values": [], "error": "ValueError"}, False),
        ({"cause": "raised"}, False),
        ({"values": [], "error": "ValueError", "cause": "bored"}, False),
    ],
)
def test_only_a_sound_reply_of_a_worker_becomes_an_outcome(
    changes: dict[str, Any], sound: bool
) -> None:
    async def read() -> Outcome:
        checked = Check(0, Task("t", "q"), ["x"], Sampled(["stop"], [[]], [], ""))
        job = Job(checked, asyncio.get_running_loop().create_future())
        return _outcome({"check": job.ticket, **SOUND, **changes}, job)

    if sound:
        outcome = asyncio.run(read())
        expected = [Grade(**v) if isinstance(v, dict) else v for v in (SOUND | changes)["values"]]
        assert outcome.values == expected
    else:
        with pytest.raises(ChildEnded):
            asyncio.run(read())


@pytest.mark.slow
def test_grades_of_all_forms_arrive_from_processes_and_from_here() -> None:
    """This includes entries of a TRL function, of which one fails and one does not apply."""
    names = ["graded", "graded_async", "graded_group"]
    texts = ["passed", "wrong_answer", "timeout", "compile_error", "failed", "plain"]
    with Environment([f"{REWARDS}:{n}" for n in names], error_budget=1.0) as environment:
        named = group(texts)
        environment.score([named])
    local = group(texts)
    graded = load_reward(f"{REWARDS}:graded").function
    with Environment([graded], error_budget=1.0) as environment:
        environment.score([local])
    for g in (named, local):
        found = [(r.verdict, r.value is None) for r in rewards(g)]
        assert found == [
            ("passed", False),
            ("wrong_answer", False),
            ("timeout", False),
            ("compile_error", False),
            ("infrastructure_error", True),
            (None, False),
        ]
    assert rewards(named)[0].value == 3.0 and rewards(named)[1].isolation == "namespaces"
    assert rewards(named)[4].error == "; ".join(f"{name}: no sandbox" for name in names)
    assert [r.reruns for r in rewards(named)] == [1, 1, 1, 1, 3, 1]


@pytest.mark.mostly_nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("reward", ["first_fails", "first_fails_async", "first_fails_group"])
@pytest.mark.parametrize("way", ["raise", "crash", "grade"])
def test_a_failed_check_runs_once_more(reward: str, way: str, tmp_path: Path) -> None:
    """The process of a reward is killed during a check. The sample still gets its reward."""
    g = group(["a", "b"], folder=str(tmp_path), way=way)
    with Environment([f"{REWARDS}:{reward}"], timeout_s=10.0, error_budget=0.0) as environment:
        environment.score([g])
    assert g.rewards == [1.0, 1.0]
    assert [r.verdict for r in rewards(g)] == [None, None]
    assert sum(r.reruns for r in rewards(g)) >= (0 if way == "crash" and "async" in reward else 1)


@pytest.mark.slow
def test_the_message_of_a_spent_budget_counts_each_reason() -> None:
    g = group(["failed", "failed", "plain", "raise"])
    with (
        Environment([f"{REWARDS}:graded"], error_budget=0.5) as environment,
        pytest.raises(RewardBudgetExceeded) as raised,
    ):
        environment.score([g])
    text = str(raised.value)
    assert "3 of 4" in text and "infrastructure_error" in text and "error_budget = 0.5" in text
    assert "2 x graded: no sandbox" in text and "1 x graded: ValueError" in text


def test_a_check_that_takes_too_long_does_not_run_again() -> None:
    runs: list[str] = []

    async def slow(completion: str, task: Task) -> float:
        runs.append(completion)
        await asyncio.sleep(30)
        return 1.0

    g = group(["a", "b"])
    with Environment([slow], timeout_s=0.2, error_budget=1.0) as environment:
        environment.score([g])
    assert sorted(runs) == ["a", "b"]
    assert [r.error for r in rewards(g)] == ["slow: timeout after 0.2 s"] * 2
    assert {r.verdict for r in rewards(g)} == {"infrastructure_error"}
