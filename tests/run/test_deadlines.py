"""A silent part ends the run with a message that names the part."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sixfold.checkpoint.listing import list_checkpoints
from sixfold.cli import main
from sixfold.engine.engine import Engine
from sixfold.errors import NoAnswer
from sixfold.processes import deadline
from sixfold.processes.deadline import Deadline, Pulse
from sixfold.reference.worker_reference import WorkerReference
from sixfold.rollout.engine_guard import EngineGuard

from ..forked_programs import fork_programs, kill_program
from .processes import tiny_recipe


def train(folder: Path, **overrides: Any) -> int:
    """`sixfold train` of a tiny run with a short deadline. Returns the exit code."""
    recipe = folder / "r.toml"
    recipe.write_text('run.name = "r"')
    settings = {"run__steps": 4, "sft__steps": 0, "data__heldout": 0, "checkpoint__every": 0}
    return main(["train", str(recipe), *tiny_recipe(folder, **settings, **overrides)])


def newest(folder: Path) -> str:
    return list_checkpoints(folder / "r" / "checkpoints")[-1].name


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """Event that is set at the end of the test, so that a blocked thread can end."""
    event = threading.Event()
    yield event
    event.set()


def test_an_engine_that_hangs_ends_the_run_with_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hung: threading.Event,
) -> None:
    """The engine blocks in step 3. Step 2 is saved, and the run does not wait for the engine.

    Silence counts from the block on, so that a busy machine ends no earlier step.
    """
    step, silence = Engine.step, Pulse.silence
    blocked: list[bool] = []

    def blocks(self: Engine) -> Any:
        if self.version == 2:
            blocked.append(True)
            hung.wait(300)
        return step(self)

    def counted(self: Pulse) -> float:
        return silence.__get__(self) if blocked else 0.0

    monkeypatch.setattr(Engine, "step", blocks)
    monkeypatch.setattr(Pulse, "silence", property(counted))
    began = time.monotonic()
    assert train(tmp_path, run__silence_s=1) == 3
    assert time.monotonic() - began < 250
    said = capsys.readouterr().err
    assert "the engine gave no sign of life for 1 s" in said
    assert "run.silence_s" in said and "step-000002" in said
    assert newest(tmp_path) == "step-000002"


@pytest.mark.nightly
def test_a_reference_process_that_stops_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped process keeps its pipe open: only a deadline notices it."""
    fork_programs(monkeypatch)
    start = WorkerReference.start
    pids: list[int] = []

    def stops(self: WorkerReference, groups: Any) -> None:
        pids.append(self._child.process.pid)
        if len(pids) == 3:
            self._deadline = Deadline("the reference process", 2.0)
            os.kill(self._child.pid, signal.SIGSTOP)
        start(self, groups)

    monkeypatch.setattr(WorkerReference, "start", stops)
    settings = {"reference__placement": "worker", "algorithm__beta": 0.1}
    assert train(tmp_path, **settings) == 3
    said = capsys.readouterr().err
    assert "the reference process gave no sign of life for 2 s" in said and "run.silence_s" in said
    assert newest(tmp_path) == "step-000002"
    with pytest.raises(ProcessLookupError):
        os.kill(pids[-1], 0)


def test_a_reference_process_that_dies_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_programs(monkeypatch)
    start = WorkerReference.start

    def dies(self: WorkerReference, groups: Any) -> None:
        kill_program(self._child.process.pid)
        start(self, groups)

    monkeypatch.setattr(WorkerReference, "start", dies)
    assert train(tmp_path, reference__placement="worker", algorithm__beta=0.1) == 3
    said = capsys.readouterr().err
    assert "the reference process was killed by SIGKILL" in said
    assert "reference.placement = 'inline'" in said and "go on with" in said


def test_signs_of_life_restart_the_deadline_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls may last longer than the deadline while the engine gives signs of life.

    Silence is measured by a clock of the test: a busy machine adds nothing to it.
    """
    clock = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    pulse = Pulse()
    guard = EngineGuard(pulse, Deadline("the engine", 0.3))

    async def calls() -> list[BaseException | None]:
        loop = asyncio.get_running_loop()
        results: list[asyncio.Future[None]] = [loop.create_future() for _ in range(3)]
        waiting = [asyncio.ensure_future(guard.answer(result)) for result in results]
        pulse.begin()
        for _ in range(10):
            await asyncio.sleep(0.06)  # the guard looks about twice in the meantime
            clock[0] += 0.2
            pulse.beat()
        assert not any(call.done() for call in waiting)
        results[0].set_result(None)
        clock[0] += 0.3
        return await asyncio.gather(*waiting, return_exceptions=True)  # type: ignore[return-value]

    first, *others = asyncio.run(calls())
    assert first is None
    assert all(isinstance(error, NoAnswer) for error in others) and len(others) == 2
    assert guard.left == 0.0


def test_an_engine_without_work_never_misses_its_deadline() -> None:
    pulse = Pulse()
    guard = EngineGuard(pulse, Deadline("the engine", 0.05))
    pulse.begin()
    pulse.end()

    async def call() -> str:
        given: Future[str] = Future()
        asyncio.get_running_loop().call_later(0.3, given.set_result, "late")
        return await guard.outcome(given)

    assert asyncio.run(call()) == "late"
    assert guard.left == 0.05


def test_clocks_of_deadlines_ignore_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's time jumps by an hour."""
    pulse = Pulse()
    pulse.begin()
    for jump in (3600.0, -3600.0):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
        assert 0 <= pulse.silence < 5
