"""`sixfold env init` creates a folder that works unchanged. `sixfold env list`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.environment.registry import EPISODES, LIBRARIES
from sixfold.files.folder import RunFolder
from sixfold.report.rollouts import read_rollouts
from sixfold.types import Trajectory


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("tools", [(), ("--tools",)])
def test_the_new_test_passes_and_detects_a_wrong_environment(
    tools: tuple[str, ...], tmp_path: Path
) -> None:
    assert main(["env", "init", "my-walk", *tools]) == 0
    folder = tmp_path / "my-walk"

    def tested() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my-walk"]
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:9"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = tested()
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout
    assert len((folder / "tasks.jsonl").read_text("utf-8").splitlines()) == 900
    environment = folder / "environment.py"
    environment.write_text(environment.read_text().replace("== self.goal", "!= self.goal"))
    assert tested().returncode == 1
    assert not any("@" in path.name for path in folder.iterdir())
    lint = [sys.executable, "-m", "ruff", "check", "--line-length", "100", str(folder)]
    assert subprocess.run(lint, check=False, capture_output=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("tools", [(), ("--tools",)])
def test_the_new_recipe_trains(tools: tuple[str, ...], tmp_path: Path) -> None:
    assert main(["env", "init", "walk", *tools]) == 0
    flags = ["run.steps=2", "sft.steps=30", "eval.every=0", "data.heldout=8", "run.threads=1"]
    small = [
        "sft.examples_per_step=8",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
    ]
    settings = [part for flag in [*flags, *small] for part in f"--{flag}".split("=")]
    assert main(["train", "walk/recipe.toml", *settings]) == 0
    dump = RunFolder(tmp_path / "runs" / "walk").rollout_file(2)
    played = [Trajectory.from_record(record) for record in read_rollouts(dump)]
    assert {t.environment for t in played} == {"walk/environment.py:Walk"}
    assert all(t.reward is not None and t.reward.value is not None for t in played)
    assert any(event["kind"] == "tool_call" for t in played for event in t.events) == bool(tools)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("tools", [(), ("--tools",)])
def test_the_new_recipe_begins_well(
    tools: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first RL steps raise the share solved clearly, and nothing is warned about.

    With a smaller model, a shorter SFT and near goals, for speed. Whole runs are in docs/log.md.
    """
    assert main(["env", "init", "walk", *tools]) == 0
    tasks = tmp_path / "walk" / "tasks.jsonl"
    near = [line for line in tasks.read_text().splitlines() if re.search(r", [1-4] left", line)]
    tasks.write_text("\n".join(near))
    flags = ["run.steps=12", "run.threads=1", "run.seed=0", "eval.every=0", "data.heldout=64"]
    small = ["model.scratch.layers=1", "sft.steps=160", "rollout.prompts_per_step=8"]
    settings = [part for flag in [*flags, *small] for part in f"--{flag}".split("=")]
    assert main(["train", "walk/recipe.toml", *settings]) == 0
    said = "".join(capsys.readouterr())
    assert "no column" not in said and "did not fit" not in said
    assert not any(line.startswith("step ") for line in said.splitlines())  # alarms
    summary = json.loads((tmp_path / "runs" / "walk" / "summary.json").read_text())
    before, after = summary["heldout_after_sft"], summary["heldout_after"]
    assert after > before + 0.1, (before, after)


def test_existing_files_are_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "also").write_text("keep me")
    (tmp_path / "gone").symlink_to("nowhere")
    for name in ("mine", "also", "gone"):
        assert main(["env", "init", name]) == 2
        assert "exists" in capsys.readouterr().err
    assert (tmp_path / "also").read_text() == "keep me" and not list((tmp_path / "mine").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "also", "gone"}


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("My Walk", "my_walk"),
        ("../walk", "walk"),
        ("/tmp/walk", "tmp_walk"),
        ("class", "class_env"),
        ("sixfold", "sixfold_env"),
        ("2fast", "fast"),
        ("walk_", "walk"),
        ("x" * 100, "x" * 40),
        ("é", ""),
        ("..", ""),
    ],
)
def test_names_that_are_not_allowed(
    name: str, suggested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "init", name]) == 2
    error = capsys.readouterr().err
    assert "lower-case" in error
    assert error.endswith(f"for example {suggested}\n") if suggested else "example" not in error
    assert not list(tmp_path.iterdir())


def test_missing_and_extra_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["init"], ["list", "walk"], ["list", "--tools"], ["check", "x"], []):
        assert main(["env", *argv]) == 2
        assert "sixfold env" in capsys.readouterr().err


def test_every_environment_is_listed_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [*EPISODES, *(f"{kind}:NAME" for kind in LIBRARIES)]
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 3 for line in lines)
