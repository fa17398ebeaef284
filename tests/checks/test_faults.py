"""Processes that check rewards are killed or hang. Slow checks share the processes."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.environment.text_groups import rewards, text_group

from sixfold.checks.environment import Environment
from sixfold.types import Group, Task

SAMPLE = str(Path(__file__).parents[1] / "environment" / "rewards_for_tests" / "sample.py")
TASK = Task(id="t", prompt="q", answer=1)


def play(
    environment: Environment, texts: list[str], meanwhile: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[Group, float]:
    """Score completions while `meanwhile` runs. Returns the group and the duration in seconds.

    The processes have already loaded their rewards.
    """
    g = text_group(TASK, texts)

    async def score() -> float:
        await environment._pool.rewards()
        began = time.monotonic()
        await asyncio.gather(environment.scorer(len(texts)).finish(g), meanwhile())
        seconds = time.monotonic() - began
        environment._pool.leave()
        return seconds

    return g, asyncio.run(score())


async def nothing() -> None:
    """No fault."""


def workers(environment: Environment) -> list[int]:
    """Process ids of the workers that have loaded their rewards."""
    pool = environment._pool
    return [worker.child.pid for worker in pool._workers if worker.ready]


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("reward", ["length_told", "length_async"])
def test_a_process_that_is_killed_from_outside_costs_no_reward(reward: str) -> None:
    """SIGKILL during a check: the check runs again and gives the same reward."""
    texts = ["sleep 1.0|a", "ok|bb"]
    with Environment([f"{SAMPLE}:{reward}"], timeout_s=8.0, error_budget=0.0) as environment:

        async def kill() -> None:
            await asyncio.sleep(0.4)
            os.kill(workers(environment)[0], signal.SIGKILL)

        g, seconds = play(environment, texts, kill)
    assert g.rewards == [float(len(text)) for text in texts]
    assert seconds < 5 + 1.0  # 5 s for the recovery, 1 s for the check itself


@pytest.mark.slow
def test_a_check_whose_process_dies_every_time_is_excluded_and_not_zero() -> None:
    """The check runs again once. The other checks have their rewards."""
    with Environment([f"{SAMPLE}:told"], timeout_s=8.0, error_budget=0.5) as environment:
        g, _ = play(environment, ["ok", "crash", "ok"], nothing)
    assert g.rewards == [1.0, None, 1.0]
    crashed = rewards(g)[1]
    assert crashed.verdict == "infrastructure_error" and crashed.reruns == 1
    assert "SIGKILL" in str(crashed.error)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("word", ["hang", "spin"])
def test_a_hanging_check_ends_at_its_limit_and_the_pool_stays_whole(word: str) -> None:
    """It ends at most one second after the limit, although the reward would run for a minute."""
    limit_s = 1.0
    with Environment(
        [f"{SAMPLE}:told"], timeout_s=limit_s, error_budget=1.0, workers=2
    ) as environment:
        g, seconds = play(environment, [word, "ok"], nothing)
        assert limit_s <= seconds < limit_s + 1.0
        assert g.rewards == [None, 1.0] and rewards(g)[0].reruns == 0
        assert "timeout" in str(rewards(g)[0].error)
        after, _ = play(environment, ["ok"] * 4, nothing)
        pool = environment._pool
        assert len(pool._workers) == 2
    assert after.rewards == [1.0] * 4


@pytest.mark.nightly
@pytest.mark.slow
def test_slow_checks_share_the_processes() -> None:
    """8 checks of 0.5 s in 2 processes take about 2 s, not 4 s."""
    with Environment([f"{SAMPLE}:length_told"], timeout_s=8.0, workers=2) as environment:

        async def ready() -> None:
            while len(workers(environment)) < 2:
                await asyncio.sleep(0.01)

        play(environment, ["ok"], ready)
        g, seconds = play(environment, ["ok 0.5"] * 8, nothing)
    assert g.rewards == [6.0] * 8
    assert 2.0 <= seconds < 3.5
