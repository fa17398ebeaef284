"""Rewards with `cached` are called once per completion of a task. Failed checks are repeated."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sixfold.checks.cache import OutcomeCache
from sixfold.checks.check import Outcome
from sixfold.checks.environment import Environment
from sixfold.environment.grade import Grade
from sixfold.environment.rewards import RewardFunction
from sixfold.environment.versions import cached, version_of
from sixfold.types import Group, Reward, Task, Trajectory

REWARDS = str(Path(__file__).parents[1] / "environment" / "rewards_for_tests" / "counted.py")


def group(texts: list[str], task: Task) -> Group:
    made = [
        Trajectory.one_turn(task.id, k, [1], [7], [-1.0], [0], "stop", text=text)
        for k, text in enumerate(texts)
    ]
    return Group(task, made)


def rewards(g: Group) -> list[Reward]:
    return [t.reward for t in g.trajectories if t.reward is not None]


def test_equal_completions_of_a_task_are_checked_once() -> None:
    """Also if they arrive together. Another task, or another content of a task, is another key."""
    asked: list[str] = []

    @cached("1")
    async def counted(completion: str, task: Task) -> Grade:
        asked.append(f"{task.id} {task.answer} {completion}")
        await asyncio.sleep(0.01)
        return Grade(float(len(completion)), "passed")

    first, second = Task("a", "q", answer=1), Task("b", "q", answer=1)
    groups = [group(["x", "x", "yy"], first), group(["x"], second), group(["x"], Task("a", "q"))]
    with Environment([counted]) as environment:
        environment.score(groups[:2])
        environment.score(groups[2:])
        again = group(["yy", "x"], first)
        environment.score([again])
    assert sorted(asked) == ["a 1 x", "a 1 yy", "a None x", "b 1 x"]
    assert [g.rewards for g in (*groups, again)] == [[1.0, 1.0, 2.0], [1.0], [1.0], [2.0, 1.0]]
    assert [r.cached for r in rewards(again)] == [1, 1]
    assert [r.seconds for r in rewards(again)] == [0.0, 0.0]
    assert {r.verdict for r in rewards(again)} == {"passed"}
    assert sum(r.cached for r in rewards(groups[0])) == 1


@pytest.mark.slow
def test_named_rewards_tell_their_version(tmp_path: Path) -> None:
    task = Task("t", "q", columns={"file": str(tmp_path / "asked")})
    g, again = group(["x", "x"], task), group(["x", "fails", "fails"], task)
    names = [f"{REWARDS}:reused", f"{REWARDS}:not_reused"]
    with Environment(names, error_budget=1.0) as environment:
        environment.score([g])
        environment.score([again])
    assert g.rewards == [2.0, 2.0] and again.rewards == [2.0, None, None]
    asked = (tmp_path / "asked").read_text().split("\n")
    assert asked.count("reused x") == 1 and asked.count("not_reused x") == 3
    assert asked.count("reused fails") == 4, "each of two failed checks runs twice"


@pytest.mark.parametrize("verdict", ["timeout", "out_of_memory"])
def test_verdicts_that_depend_on_the_machine_are_not_kept(verdict: Any) -> None:
    runs = []

    async def run() -> Outcome:
        runs.append(1)
        return Outcome([Grade(0.0, verdict)], None, 0.5)

    async def twice() -> None:
        cache, task = OutcomeCache(), Task("t", "q")
        await asyncio.gather(*(cache.outcome("v", task, "x", run) for _ in range(3)))
        await cache.outcome("v", task, "x", run)

    asyncio.run(twice())
    assert len(runs) == 4


def test_a_cancelled_run_leaves_the_others_to_run() -> None:
    async def play() -> list[Outcome]:
        cache, task = OutcomeCache(), Task("t", "q")

        async def slow() -> Outcome:
            await asyncio.sleep(60)
            raise AssertionError

        async def quick() -> Outcome:
            return Outcome([1.0], None, 0.0)

        first = asyncio.ensure_future(cache.outcome("v", task, "x", slow))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(cache.outcome("v", task, "x", quick)) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(asyncio.gather(*others), 5)

    assert [outcome.values for outcome in asyncio.run(play())] == [[1.0]] * 3


def test_a_task_without_json_form_is_checked_every_time() -> None:
    runs = []

    async def run() -> Outcome:
        runs.append(1)
        return Outcome([1.0], None, 0.0)

    async def twice() -> None:
        cache, task = OutcomeCache(), Task("t", "q", columns={"f": lambda: 0})
        for _ in range(2):
            await cache.outcome("v", task, "x", run)

    asyncio.run(twice())
    assert len(runs) == 2


def test_only_functions_of_a_completion_and_a_task_have_a_version() -> None:
    @cached("1")
    def plain(completion: str, task: Task) -> float:
        return 1.0

    @cached("1")
    def asks(completion: str, task: Task, finish_reason: str) -> float:
        return 1.0

    assert version_of(plain) == "1" and version_of(len) == ""
    assert RewardFunction("plain", plain).version == "1"
    assert RewardFunction("asks", asks).version == ""
    with pytest.raises(ValueError, match="version"):
        cached("")
