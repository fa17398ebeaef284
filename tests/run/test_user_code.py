"""What user code does to its arguments and to its process does not change the numbers of a run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import metrics, tiny_recipe


def test_a_reward_that_empties_its_row_gives_the_same_value_for_every_sample_and_epoch(
    tmp_path: Path,
) -> None:
    """A resumed run equals one that was not interrupted, and evaluations keep their value."""

    def popped(completion: str, task: Task) -> float:
        return float(task.columns["levels"].pop(0))

    def rows(name: str, count: int) -> list[Task]:
        return [
            Task(f"{name}{n}", f"{n}+{n}=", n, columns={"levels": [3, 2, 1]}) for n in range(count)
        ]

    given: Any = {"reward": popped, "tasks": rows("t", 4), "heldout": rows("h", 2)}
    flags = tiny_recipe(tmp_path, sft__steps=0, data__heldout=0, eval__every=1)
    for name, steps in (("whole", 4), ("halved", 2)):
        text = f'run.name = "{name}"'
        assert train_run(parse_recipe(text, "test", [*flags, f"--run.steps={steps}"]), **given) == 0
    run = tmp_path / "halved"
    longer = load_recipe(str(run / "recipe.toml"), ["--run.steps=4"])
    assert train_run(longer, resume=run, **given) == 0
    found = metrics(run)
    assert found == metrics(tmp_path / "whole")
    assert [line["reward/mean"] for line in found] == [3.0] * 4
    assert {line["heldout/score"] for line in found[:-1]} == {3.0}


MOVES = """
import os, tempfile
from sixfold.environment.episode import End, Observation

os.chdir(tempfile.mkdtemp())


class Moves:
    def __init__(self, task):
        os.chdir(tempfile.mkdtemp())
        self.task = task

    async def start(self):
        os.chdir(tempfile.mkdtemp())
        return Observation(text=self.task.prompt)

    async def step(self, action):
        os.chdir(tempfile.mkdtemp())
        return End(None)

    async def close(self):
        os.chdir(tempfile.mkdtemp())
"""


def test_a_run_in_a_relative_folder_stays_there_when_its_environment_changes_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text(MOVES)
    (tmp_path / "mine.py").write_text("def f(completion, task): return float(len(completion))\n")
    options = {
        "run__steps": 2,
        "environment__episode": "moves.py:Moves",
        "environment__rewards": '["mine.py:f"]',
        "environment__timeout_s": 60,
        "eval__every": 1,
        "sft__steps": 0,
    }
    recipe = parse_recipe('run.name = "r"', "test", tiny_recipe(Path("runs"), **options))
    assert train_run(recipe) == 0
    run = tmp_path / "runs" / "r"
    assert len(metrics(run)) == 2
    for name in ("recipe.toml", "summary.json", "report.html", "checkpoints/step-000002"):
        assert (run / name).exists(), name
    assert [p.name for p in tmp_path.glob("runs/*")] == ["r"]


LAUNCHER = """
import os, subprocess, sys
worker = subprocess.Popen(sys.argv[2:], env={**os.environ, "TORCHELASTIC_RUN_ID": "none"})
with open(sys.argv[1], "w") as noted:
    noted.write(str(worker.pid))
worker.wait()
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of the death of a parent")
def test_a_run_stops_and_saves_when_its_launcher_is_killed(tmp_path: Path) -> None:
    recipe, noted = tmp_path / "recipe.toml", tmp_path / "pid"
    recipe.write_text('run.name = "r"')
    flags = tiny_recipe(tmp_path, run__steps=1_000_000, sft__steps=0, checkpoint__every=1_000_000)
    words = [sys.executable, "-m", "sixfold", "train", str(recipe), *flags]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(noted), *words])
    log = tmp_path / "r" / "metrics.jsonl"
    _until(lambda: log.exists() and log.read_text().count("\n") > 1)
    launcher.kill()
    launcher.wait()
    stat = Path(f"/proc/{noted.read_text()}/stat")
    _until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
    saved = [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()]
    assert any(name > "step-000000" for name in saved), "the last step is saved"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
