"""A package of a user that is installed beside Sixfold: its names work like the built-in ones."""

from __future__ import annotations

import os
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


@pytest.mark.nightly
def test_a_run_with_its_rewards_is_resumed(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        'run.name = "r"\ndata.source = "letters"\nenvironment.rewards = ["even_length", "loud"]\n'
    )
    text = said(installed, tmp_path, "train", "r.toml", *TINY.split())
    assert "finished: 1 of 1 steps" in text
    resumed = said(installed, tmp_path, "train", "--resume", "runs/r", "--run.steps", "2")
    assert "has changed" not in resumed and "finished: 2 of 2 steps" in resumed


BROKEN = {
    "import no_such_library": "No module named 'no_such_library'",
    "raise SystemExit(0)": "SystemExit",
    "def broken(": "SyntaxError",
}
"""Text of the modules of a package that cannot be imported, and why."""


@pytest.fixture(scope="module")
def answers(
    installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Exit code and text of commands beside three broken packages and one that repeats a name. One
    interpreter answers all of them: to import torch takes seconds.
    """
    folder = tmp_path_factory.mktemp("others")
    points = {"other": "[sixfold.rewards]\nloud = other:loud\n"}
    for number, text in enumerate(BROKEN):
        points[f"broken-{number}"] = (
            f"[sixfold.rewards]\nmade_{number} = broken_{number}:made\n"
            f"[sixfold.verbs]\nhello-{number} = broken_{number}_verb\n"
        )
        for name in (f"broken_{number}.py", f"broken_{number}_verb.py"):
            (folder / name).write_text(text)
    for name, text in points.items():
        there = folder / f"{name.replace('-', '_')}-1.dist-info"
        there.mkdir()
        (there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (there / "entry_points.txt").write_text(text)
    path = f"{installed['PYTHONPATH']}{os.pathsep}{folder}"
    (folder / "e.toml").write_text(
        'run.name = "e"\ndata.source = "letters"\nenvironment.episode = "echo"\n'
    )
    commands = []
    for number in range(len(BROKEN)):
        commands += [f"audit demo --environment.rewards made_{number}", f"hello-{number}"]
    commands += ["audit demo --environment.rewards loud", "--help", "explain demo", "hello you"]
    commands += [f"train e.toml {TINY}"]
    found = outputs({**installed, "PYTHONPATH": path}, folder, commands)
    return dict(zip(commands, found, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("text", BROKEN)
def test_a_package_that_cannot_be_imported_is_named(
    text: str, answers: dict[str, tuple[int, str]]
) -> None:
    """Other names still work, and so do all commands."""
    number, reason = list(BROKEN).index(text), BROKEN[text]
    package = f"of the package broken-{number}"
    code, said = answers[f"audit demo --environment.rewards made_{number}"]
    assert code == 2 and f"rewards 'made_{number}' {package}" in said and reason in said
    code, said = answers[f"hello-{number}"]
    assert code == 2 and f"verbs 'hello-{number}' {package}" in said and reason in said
    assert answers["--help"][0] == 0 and f"  hello-{number}" in answers["--help"][1]
    assert answers["explain demo"][0] == 0 and answers["hello you"] == (0, "hello you\n")


def test_a_name_of_two_packages_is_refused_when_it_is_used(
    answers: dict[str, tuple[int, str]],
) -> None:
    code, said = answers["audit demo --environment.rewards loud"]
    assert code == 2 and "rewards 'loud' is registered by" in said
    assert "my-tasks" in said and "other" in said
    assert answers["explain demo"][0] == 0


@pytest.mark.slow
def test_a_run_trains_on_its_tasks_in_its_environment(
    answers: dict[str, tuple[int, str]],
) -> None:
    code, said = answers[f"train e.toml {TINY}"]
    assert code == 0 and "finished: 1 of 1 steps" in said
