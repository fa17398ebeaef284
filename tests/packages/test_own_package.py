"""A package of a user that is installed beside Sixfold: its names work like the built-in ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from one_interpreter import outputs

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-tasks"
version = "1"

[project.entry-points."sixfold.rewards"]
even_length = "my_tasks:even_length"
loud = "my_tasks:LOUD"

[project.entry-points."sixfold.environments"]
echo = "my_tasks:Echo"

[project.entry-points."sixfold.sources"]
letters = "my_tasks:letters"

[project.entry-points."sixfold.verbs"]
hello = "my_tasks_verb"

[tool.setuptools]
py-modules = ["my_tasks", "my_tasks_verb"]
"""
MODULE = '''
from sixfold.environment.episode import End, Observation
from sixfold.environment.registry import RewardRow
from sixfold.types import Task

def even_length(completion, task):
    return float(len(completion) % 2 == 0)

def is_loud(completion, task):
    return float(completion.isupper())

LOUD = RewardRow("my_tasks:is_loud", verifier=False, bounded=True)

class Echo:
    """Repeat the letter."""
    def __init__(self, task):
        self.task = task
    async def start(self):
        return Observation(text=self.task.prompt)
    async def step(self, action):
        return End(reward=float(action.text == self.task.prompt))

def letters(data, seed):
    return [Task(f"letter-{x}", x, answer=x) for x in "abcdefghijklmnop"][: data.limit or None]
'''
VERB = '''
"""A command."""
PURPOSE = "greet"

def run(arguments):
    print("hello", *arguments)
    return 0
'''
TINY = (
    "--run.threads 1 --run.steps 1 --sft.steps 0 --data.heldout 4 --model.scratch.layers 1"
    " --rollout.prompts_per_step 2 --rollout.samples_per_prompt 2 --environment.preflight 0"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that finds the installed package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "my_tasks.py").write_text(MODULE)
    (source / "my_tasks_verb.py").write_text(VERB)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "-q", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "100"}


def said(installed: dict[str, str], folder: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "sixfold", *words]
    done = subprocess.run(
        command, env=installed, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_its_names_are_listed_and_suggested(installed: dict[str, str], tmp_path: Path) -> None:
    misspelt = "train demo --environment.rewards even_lenght"
    help, hello, listed, refused = outputs(
        installed, tmp_path, ["--help", "hello you", "env list", misspelt]
    )
    assert help[0] == 0 and "  hello       greet\n" in help[1]
    assert hello == (0, "hello you\n")
    assert listed[0] == 0 and "echo            Repeat the letter." in listed[1]
    assert refused[0] == 2 and "Did you mean 'even_length'?" in refused[1]


@pytest.mark.slow
def test_a_run_trains_on_its_tasks_in_its_environment(
    installed: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text(
        'run.name = "e"\ndata.source = "letters"\nenvironment.episode = "echo"\n'
    )
    assert "finished: 1 of 1 steps" in said(installed, tmp_path, "train", "e.toml", *TINY.split())


@pytest.mark.nightly
def test_a_run_with_its_rewards_is_resumed(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        'run.name = "r"\ndata.source = "letters"\nenvironment.rewards = ["even_length", "loud"]\n'
    )
    text = said(installed, tmp_path, "train", "r.toml", *TINY.split())
    assert "finished: 1 of 1 steps" in text
    resumed = said(installed, tmp_path, "train", "--resume", "runs/r", "--run.steps", "2")
    assert "has changed" not in resumed and "finished: 2 of 2 steps" in resumed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise SystemExit(0)", "SystemExit"),
        ("def broken(", "SyntaxError"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(
    text: str, reason: str, installed: dict[str, str], tmp_path: Path
) -> None:
    """Its other names still work, and so do all commands."""
    shutil.copytree(installed["PYTHONPATH"], tmp_path / "copy")
    there = {**installed, "PYTHONPATH": str(tmp_path / "copy")}
    for name in ("my_tasks.py", "my_tasks_verb.py"):
        (tmp_path / "copy" / name).write_text(text)
    named = "audit demo --environment.rewards even_length"
    audit, hello, help, explain = outputs(
        there, tmp_path, [named, "hello", "--help", "explain demo"]
    )
    assert audit[0] == 2 and "rewards 'even_length' of the package my-tasks" in audit[1]
    assert reason in audit[1]
    assert hello[0] == 2 and "verbs 'hello' of the package my-tasks" in hello[1]
    assert help[0] == 0 and "  hello" in help[1]
    assert explain[0] == 0


def test_a_name_of_two_packages_is_refused_when_it_is_used(
    installed: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[sixfold.rewards]\nloud = other:loud\n")
    there = {**installed, "PYTHONPATH": f"{installed['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    named = "audit demo --environment.rewards loud"
    refused, explain = outputs(there, tmp_path, [named, "explain demo"])
    assert refused[0] == 2 and "rewards 'loud' is registered by" in refused[1]
    assert "my-tasks" in refused[1] and "other" in refused[1]
    assert explain[0] == 0
