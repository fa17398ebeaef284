"""A signal in a step stops the run there if nothing is lost, and a resume gives what the whole run
gives.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path

import pytest

from sixfold.types import Task

from .test_failed_steps import (
    STEPS,
    TRAINER,
    assert_goes_on_exactly,
    at_call,
    newest,
    reward,
    train,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == 0
    return folder / "r"


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


INTERRUPTED = [
    (f"{TRAINER}._accumulate", 2, "sft-000002", "stopped after SFT step 2"),
    (
        "sixfold.rollout.driver.Driver.play",
        1,
        "sft-000004",
        "stopped after SFT step 4",
    ),
    ("sixfold.engine.engine.Engine.step", 3, "sft-000004", "stopped after SFT step 4"),
    ("sixfold.controller.loop.collate", 3, "step-000002", "stopped after step 2"),
    (f"{TRAINER}._accumulate", 7, "step-000003", "stopped after step 3"),
    (
        "sixfold.rollout.driver.Driver.play",
        5,
        "step-000002",
        "stopped after step 2",
    ),
]


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(("where", "number", "left", "said"), INTERRUPTED)
def test_signal_stops_immediately_if_nothing_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: Path,
    where: str,
    number: int,
    left: str,
    said: str,
) -> None:
    with at_call(monkeypatch, where, number, interrupt):
        assert train(tmp_path) == 130
    assert newest(tmp_path / "r") == left and said in capsys.readouterr().err
    assert_goes_on_exactly(tmp_path, whole)


def test_a_signal_while_the_model_loads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with at_call(monkeypatch, "sixfold.run.assemble.load_policy", 1, interrupt):
        assert train(tmp_path) == 130
    assert (
        not (tmp_path / "r").exists()
        and "stopped before anything was trained" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_signal_inside_a_reward_is_no_failed_check(tmp_path: Path, whole: Path) -> None:
    calls = count(1)

    def interrupted(completion: str, task: Task) -> float:
        if next(calls) == 60:
            interrupt()
        return reward(completion, task)

    interrupted.__name__ = "reward"
    assert train(tmp_path, check=interrupted) == 130
    assert_goes_on_exactly(tmp_path, whole)


@pytest.mark.slow
def test_signal_in_the_last_evaluation_leaves_only_that_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    with at_call(monkeypatch, "sixfold.rollout.driver.Driver.play", 10, interrupt):
        assert train(tmp_path) == 130
    assert (
        newest(tmp_path / "r") == f"step-{STEPS:06d}"
        and not (tmp_path / "r" / "summary.json").exists()
    )
    assert_goes_on_exactly(tmp_path, whole)
    assert (tmp_path / "r" / "summary.json").exists()
