"""User code cannot hold up the run, end it, or change the settings of its process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold.checks.environment import Environment
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import check_episode
from sixfold.environment.rewards import load_reward
from sixfold.environment.tools.episode import Equipped
from sixfold.environment.tools.setup import ToolSetup
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits
from sixfold.types import Group, Task, Trajectory
from sixfold.user_code import Called
from sixfold_environments.audit.trials import Trials
from tests.rollout.episodes import Recording, letters, played


@pytest.fixture
def fake() -> tuple[Recording, Renderer]:
    renderer = Renderer(character_tokenizer("0123456789+=?#abcxyzgontwe ", ("<|user|>",)), (1,))
    return Recording(renderer, letters(renderer, None)), renderer


def played_once(fake: tuple[Recording, Renderer], make: Any, step_s: float) -> Trajectory:
    limits = Limits(tokens=1000, turns=4, step_s=step_s)
    tasks = [Task("bad", "go"), Task("good", "go")]
    groups, _ = played(*fake, make, tasks, limits=limits, scorer=None)
    (good,) = groups[1].trajectories
    assert good.reward is not None and good.reward.value == 1.0, "other episodes go on"
    return groups[0].trajectories[0]


class Quiet:
    """Plays one turn. A subclass overrides what it does for the task `bad`."""

    def __init__(self, task: Task) -> None:
        self.bad = task.id == "bad"

    async def start(self) -> Observation:
        return Observation(text="go")

    async def step(self, action: Action) -> Observation | End:
        return End(1.0)


def blocks() -> None:
    """Block until the process is interrupted. Ten minutes are a hang for a test."""
    with suppress(Exception):  # as programs do that wait for a server
        threading.Event().wait(600)
    while True:  # and goes on
        pass


class BlocksWhenMade(Quiet):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if self.bad:
            blocks()


class BlocksInStart(Quiet):
    async def start(self) -> Observation:
        if self.bad:
            blocks()
        return await super().start()


class BlocksInStep(Quiet):
    async def step(self, action: Action) -> Observation | End:
        await asyncio.sleep(0)
        if self.bad:
            blocks()
        return End(1.0)


class BlocksInClose(Quiet):
    async def close(self) -> None:
        if self.bad:
            blocks()


BLOCKING = [BlocksWhenMade, BlocksInStart, BlocksInStep]


@pytest.mark.parametrize("kind", BLOCKING)
def test_an_environment_that_blocks_the_run_ends_at_its_time_limit(
    fake: tuple[Recording, Renderer], kind: type
) -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    found = played_once(fake, kind, 0.3)
    assert found.outcome == "timeout" and found.total_reward is None
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == before


def test_an_environment_that_blocks_when_it_closes_keeps_its_reward(
    fake: tuple[Recording, Renderer],
) -> None:
    found = played_once(fake, BlocksInClose, 0.3)
    assert found.reward is not None and found.reward.value == 1.0
    assert found.events[-1]["kind"] == "close_failed"


def test_a_blocking_environment_fails_an_audit_and_does_not_stop_it() -> None:
    with Environment([lambda completion, task: 1.0], error_budget=1.0) as environment:
        trials = Trials(environment, BlocksInStep, timeout_s=0.3)
        bad, good = trials.rewards([(Task("bad", "go"), "a"), (Task("good", "go"), "a")])
    assert bad.value is None and good.value == 1.0


def test_the_limit_counts_blocked_time_only_and_keeps_the_callers_timer() -> None:
    async def waits() -> str:
        await asyncio.sleep(0.05)  # longer than the limit: a wait does not block
        return "done"

    rang = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 60.0)

        async def main() -> str:
            found: str = await Called(waits, 0.04)
            return found

        assert asyncio.run(main()) == "done" and not rang.is_set()
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 60.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Ends(BaseException):
    """What a library raises to end a program, such as `pytest.skip`."""


@pytest.mark.parametrize("error", [Ends("no board"), SystemExit(0)])
@pytest.mark.parametrize("where", ["made", "start", "step"])
def test_an_exception_that_is_no_exception_ends_its_episode(
    fake: tuple[Recording, Renderer], where: str, error: BaseException
) -> None:
    class Raising(Quiet):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            self.do("made")

        def do(self, now: str) -> None:
            if self.bad and now == where:
                raise error

        async def start(self) -> Observation:
            self.do("start")
            return await super().start()

        async def step(self, action: Action) -> Observation | End:
            self.do("step")
            return await super().step(action)

    assert played_once(fake, Raising, 60.0).outcome == "error"


def test_a_child_that_an_environment_forks_does_not_go_on_with_the_run(
    fake: tuple[Recording, Renderer], tmp_path: Path
) -> None:
    class Forking(Quiet):
        def fork(self, name: str) -> None:
            if self.bad and (child := os.fork()):
                _, status = os.waitpid(child, 0)
                (tmp_path / name).write_text(str(os.waitstatus_to_exitcode(status)))

        async def start(self) -> Observation:
            self.fork("start")
            return await super().start()

        async def step(self, action: Action) -> Observation | End:
            await asyncio.sleep(0)
            self.fork("step")
            return await super().step(action)

        async def close(self) -> None:
            self.fork("close")

    assert played_once(fake, Forking, 60.0).total_reward == 1.0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "start": "1",
        "step": "1",
        "close": "1",
    }


class Changes:
    """Changes torch's settings and Python's random numbers."""

    @staticmethod
    def change() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        random.seed(0)
        torch.manual_seed(0)


def settings() -> list[Any]:
    return [
        torch.get_default_dtype(),
        torch.empty(0).device,
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ]


def test_settings_of_torch_are_those_of_the_run_after_every_call(
    fake: tuple[Recording, Renderer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, seen = settings(), []

    class Changing(Quiet):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            Changes.change()

        async def start(self) -> Observation:
            Changes.change()
            await asyncio.sleep(0)
            seen.append(settings())
            Changes.change()
            return await super().start()

        async def step(self, action: Action) -> Observation | End:
            Changes.change()
            return await super().step(action)

    def rewards(completion: str, task: Task) -> float:
        Changes.change()
        return 1.0

    played_once(fake, Changing, 60.0)
    assert settings() == before == seen[0]
    made = Trajectory.one_turn("t", 0, [1], [2], [0.0], [0], "stop", text="a")
    with Environment([rewards]) as environment:
        environment.score([Group(Task("t", "?"), [made])])
    assert settings() == before
    (tmp_path / "changing.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\ndef f(text, task): return 1.0\n"
    )
    load_reward(f"{tmp_path / 'changing.py'}:f")
    assert settings() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.ones(1, requires_grad=True).sum().requires_grad


def test_methods_that_are_not_async_run_in_a_thread_of_their_own(
    fake: tuple[Recording, Renderer],
) -> None:
    """They may block, and hold what belongs to a thread. A hang ends its episode only."""
    go_on, threads = threading.Event(), []

    class Ordinary:
        def __init__(self, task: Task) -> None:
            self.bad, self.closed = task.id == "bad", False
            threads.append(threading.get_ident())

        def start(self) -> Observation:
            threads.append(threading.get_ident())
            return Observation(text="go")

        def step(self, action: Action) -> End:
            threads.append(threading.get_ident())
            if self.bad:
                go_on.wait(600)
            return End(1.0)

    check_episode(Ordinary, "environment")
    try:
        found = played_once(fake, Equipped(Ordinary, ToolSetup()), 0.5)
    finally:
        go_on.set()
    assert found.outcome == "timeout"
    assert len(set(threads)) == 2 and threading.get_ident() not in threads

    class Mixed(Ordinary):
        async def step(self, action: Action) -> End:  # type: ignore[override]
            return End(1.0)

    with pytest.raises(UserError, match="async"):
        check_episode(Mixed, "environment")
