"""A run whose engine is silent starts again by itself, as often as the recipe says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sixfold.batch import Metrics
from sixfold.cli import main
from sixfold.controller.loop import Controller
from sixfold.errors import NoAnswer, RankFailed
from sixfold.run import restart

from .processes import metrics, tiny_recipe

SETTINGS: dict[str, Any] = dict(run__steps=4, sft__steps=0, checkpoint__every=1)
SILENT = """
import sys
from sixfold.cli import main
from sixfold.errors import NoAnswer, RankFailed
from sixfold.controller.loop import Controller
step = Controller.step
def silent(self):
    if self.steps_done == 2:
        raise NoAnswer("the engine gave no sign of life")
    return step(self)
Controller.step = silent
sys.exit(main(sys.argv[1:]))
"""


class Replaced(BaseException):
    """`os.execv` was called, which does not return."""


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines with which the process was replaced."""
    commands: list[list[str]] = []

    def execv(program: str, command: list[str]) -> None:
        assert program == command[0] == sys.executable
        commands.append(command)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv(restart.COUNT, "0")
    return commands


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of steps after which a part of the run is silent, each once."""
    numbers: list[int] = []
    make_step = Controller.step

    def step(self: Controller) -> Metrics:
        if self.steps_done in numbers:
            numbers.remove(self.steps_done)
            raise NoAnswer("the engine gave no sign of life for 9 s")
        return make_step(self)

    monkeypatch.setattr(Controller, "step", step)
    return numbers


def command(folder: Path, name: str, **more: Any) -> list[str]:
    return ["train", "demo", *tiny_recipe(folder, **SETTINGS, **more, run__name=name)]


def weights(run: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(run.glob("checkpoints/step-000004/model/*"))]


@pytest.mark.nightly
def test_it_resumes_with_the_same_bits_as_often_as_the_recipe_says(
    tmp_path: Path,
    silent: list[int],
    replaced: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(tmp_path, "whole")) == 0
    silent += [1, 2, 3]
    with pytest.raises(Replaced):
        main(command(tmp_path, "struck", run__restarts=2))
    assert "no sign of life" in (said := capsys.readouterr().err) and "restart 1 of 2" in said
    with pytest.raises(Replaced):
        main(replaced[0][3:])
    assert "restart 2 of 2" in capsys.readouterr().err
    assert main(replaced[1][3:]) == 3, "the third silence ends the run"
    assert "go on with: sixfold train --resume" in capsys.readouterr().err
    assert main(replaced[1][3:]) == 0
    assert weights(tmp_path / "struck") == weights(tmp_path / "whole") != []
    assert [line["step"] for line in metrics(tmp_path / "struck")] == [1, 2, 3, 4]


@pytest.mark.parametrize("why", ["no restarts", "another error", "several ranks", "not begun"])
def test_other_runs_end(
    tmp_path: Path, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nor does the earlier run resume whose folder a new run would have replaced."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    error: Exception = RuntimeError() if why == "another error" else NoAnswer("silent")
    if why == "several ranks":
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv(restart.COUNT)
    limit, resumed = int(why != "no restarts"), why != "not begun"
    with pytest.raises(type(error)), restart.restarting(tmp_path, limit, resumed):
        raise error
    assert not replaced


def test_flags_of_a_resumed_run_are_given_again(
    tmp_path: Path, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder where the command was given, whatever user code has done."""
    monkeypatch.chdir(tmp_path)
    flags = ("--engine.kv_tokens", "9")
    with pytest.raises(Replaced), restart.restarting(Path("r"), 1, True, flags):
        os.chdir("/")
        raise NoAnswer("silent")
    assert replaced[0][3:] == ["train", "--resume", str(tmp_path / "r"), *flags]
    assert Path.cwd() == tmp_path


def test_a_rank_that_ray_has_started_asks_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the one that reports another part's silence, as `RankFailed`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as caught, restart.restarting(tmp_path, 1, True):
        raise RankFailed("rank 1 of 2: silent") from NoAnswer("silent")
    assert caught.value.code == restart.AGAIN
    assert capsys.readouterr().err == "WARNING: RankFailed: rank 1 of 2: silent\n"
    with pytest.raises(RankFailed), restart.restarting(tmp_path, 1, True):
        raise RankFailed("rank 1 failed") from RuntimeError("a bug")


@pytest.mark.nightly
def test_the_process_is_replaced(tmp_path: Path) -> None:
    arguments = command(tmp_path, "run", run__restarts=1)
    program = [sys.executable, "-c", SILENT, *arguments]
    environment = {k: v for k, v in os.environ.items() if k != restart.COUNT}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
