"""The rewards `code` and `code_fraction` in the process of rewards."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import pytest

from sixfold.checks.check import Check, Outcome
from sixfold.checks.environment import Environment
from sixfold.checks.worker import HEARTBEAT_S, AsyncChecks
from sixfold.environment.registry import REWARDS
from sixfold.environment.rewards import RewardFunction
from sixfold.environment.sampled import Sampled
from sixfold.types import Group, Reward, Task, Trajectory
from sixfold_environments.code.reward import code_fraction_reward, code_reward

TESTS = {
    "type": "function",
    "fn_name": "add",
    "cases": [[[1, 2], 3]],
    "hidden": [[[2, 2], 4], [[0, 5], 5]],
}
RIGHT = "def add(a, b): return a + b"


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def made(task: Task, number: int, text: str) -> Trajectory:
    return Trajectory.one_turn(task.id, number, [1], [2], [0.0], [0], "stop", text=text)


def scored(texts: list[str], tests: Any = TESTS, **settings: Any) -> list[Reward]:
    task = Task("t", "p", columns={"tests": tests})
    group = Group(task, [made(task, number, text) for number, text in enumerate(texts)])
    with Environment(settings.pop("rewards", ("code",)), **settings) as environment:
        environment.score([group])
    rewards = [trajectory.reward for trajectory in group.trajectories]
    assert None not in rewards
    return [reward for reward in rewards if reward]


def test_rewards_say_verdict_and_isolation() -> None:
    slow = "import time\ndef add(a, b): time.sleep(9)"
    lucky = "def add(a, b): return {3: 3, 4: 4}.get(a + b)"
    texts = [fenced(RIGHT), fenced(lucky), RIGHT, fenced(slow)]
    found = scored(texts, rewards=("code", "code_fraction"), timeout_s=2.5)
    assert [dict(reward.parts) for reward in found] == [
        {"code": 1.0, "code_fraction": 1.0},
        {"code": 0.0, "code_fraction": 0.5},
        {"code": 0.0, "code_fraction": 0.0},
        {"code": 0.0, "code_fraction": 0.0},
    ]
    verdicts = [reward.verdict for reward in found]
    assert verdicts == ["passed", "wrong_answer", "rejected", "timeout"]
    assert found[0].isolation == "namespaces"


@pytest.mark.nightly
def test_waiting_for_a_sandbox_does_not_count_as_time() -> None:
    """The checks together take longer than one check may."""
    code = "import time\ndef add(a, b): time.sleep(0.2); return a + b"
    found = scored([fenced(code + f"  # {n}") for n in range(8)], timeout_s=2.0)
    assert [reward.value for reward in found] == [1.0] * 8


def test_checks_that_time_themselves_show_life_instead_of_being_cancelled() -> None:
    async def waits(completion: str, task: Task) -> float:
        await asyncio.sleep(2.5 * HEARTBEAT_S)
        return 1.0

    outcomes: queue.Queue[Outcome] = queue.Queue()
    signs: list[None] = []
    checks = AsyncChecks(
        HEARTBEAT_S / 10,
        lambda ticket, outcome: outcomes.put(outcome),
        lambda: None,
        lambda: signs.append(None),
    )
    check = Check(0, Task("t", "p"), ["x"], Sampled(["stop"], [[]], [], "p"))
    checks.start(1, RewardFunction("code", waits, REWARDS.row("code")), check)
    assert outcomes.get(timeout=30).values == [1.0]
    assert len(signs) >= 2
    checks.start(2, RewardFunction("code", waits), check)
    assert outcomes.get(timeout=30).cause == "timeout"


def test_a_task_without_tests_has_no_reward() -> None:
    (reward,) = scored([fenced(RIGHT)], tests={}, error_budget=1.0)
    assert (reward.value, reward.verdict) == (None, "infrastructure_error")
    assert "unknown type of tests" in str(reward.error)


def test_a_limit_of_the_tests_that_the_check_cannot_keep_is_an_error_with_a_remedy() -> None:
    (reward,) = scored(
        [fenced(RIGHT)], tests={**TESTS, "time_limit_s": 9}, timeout_s=5.0, error_budget=1.0
    )
    assert (reward.value, reward.verdict) == (None, "infrastructure_error")
    assert "environment.timeout_s to at least 9.5" in str(reward.error)


def test_both_are_async_functions_of_a_completion_and_a_task() -> None:
    assert asyncio.iscoroutinefunction(code_reward)
    assert asyncio.iscoroutinefunction(code_fraction_reward)
