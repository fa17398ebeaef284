"""`environment.episode`: which objects are environments of several turns."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from sixfold.environment.calculator import Calculator
from sixfold.environment.episodes import check_episode, load_episode
from sixfold.errors import UserError
from sixfold.types import Task

MINE = """
from sixfold.environment.episode import Action, End, Observation

class Base:
    async def start(self):
        return Observation(text="hi")

class Mine(Base):
    def __init__(self, task):
        self.task = task

    async def step(self, action):
        return End(reward=1.0)

class Blocking(Mine):
    def step(self, action):
        return End(reward=1.0)

class Without(Base):
    def __init__(self, task): ...

class Other(Mine):
    def __init__(self, task, seed): ...
"""


def test_names_files_and_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    assert load_episode("calculator") is Calculator
    assert load_episode("sixfold.environment.calculator:Calculator") is Calculator
    assert load_episode(f"{tmp_path / 'mine.py'}:Mine").__name__ == "Mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("calculater", "calculator"),
        ("no/such.py:Mine", "no/such.py"),
        ("no_such_module:Mine", "no_such_module"),
        ("{}:Mien", "Mine"),
        ("{}:Blocking", "step"),
        ("{}:Without", "step"),
        ("{}:Other", "seed"),
        ("{}:", "path/to/file.py:class"),
    ],
)
def test_what_is_no_environment(spec: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(UserError, match=named):
        load_episode(spec.format(tmp_path / "mine.py"))


def test_functions_that_make_episodes() -> None:
    check_episode(partial(Calculator), "environment")
    check_episode(lambda task: Calculator(task), "environment")

    async def made_later(task: Task) -> Calculator:
        return Calculator(task)

    for wrong in (3, lambda: None, made_later):
        with pytest.raises(UserError, match="environment"):
            check_episode(wrong, "environment")
