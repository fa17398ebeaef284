"""Resumes of runs that save every step, were resumed before, or were moved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.run.start import train_run

from .processes import metrics, tiny_recipe

STEPS = 4


def train(folder: Path, **overrides: Any) -> Path:
    settings = {"run__name": "r", "run__steps": STEPS, "sft__steps": 0, "data__heldout": 0}
    given = tiny_recipe(folder, **{**settings, **overrides})
    assert train_run(parse_recipe('run.name = "r"', "test", given)) == 0
    return folder / "r"


def resume(run: Path, **overrides: Any) -> None:
    flags = [part for k, v in overrides.items() for part in (f"--{k.replace('__', '.')}", str(v))]
    assert train_run(load_recipe(str(run / "recipe.toml"), flags), resume=run) == 0


def assert_equal(ours: Path, theirs: Path) -> None:
    name = f"checkpoints/step-{STEPS:06d}"
    for file in ("model/model.safetensors", "trainer.safetensors"):
        mine, other = load_file(ours / name / file), load_file(theirs / name / file)
        assert mine.keys() == other.keys() and all(mine[key].equal(other[key]) for key in other)
    assert metrics(ours) == metrics(theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves only at its end."""
    return train(tmp_path_factory.mktemp("whole"), checkpoint__every=0)


@pytest.mark.nightly
def test_saving_every_step_changes_nothing(tmp_path: Path, whole: Path) -> None:
    """R11 in docs/reliability.md."""
    assert_equal(train(tmp_path, checkpoint__every=1), whole)


@pytest.mark.nightly
@pytest.mark.slow
def test_resume_of_a_resume_and_two_resumes_of_one_checkpoint(tmp_path: Path, whole: Path) -> None:
    """R10 in docs/reliability.md."""
    half = train(tmp_path, run__steps=1)
    shutil.copytree(half, tmp_path / "other")
    resume(half, run__steps=3)
    resume(half, run__steps=STEPS)
    assert_equal(half, whole)
    resume(tmp_path / "other", run__steps=STEPS)
    assert_equal(tmp_path / "other", whole)


@pytest.mark.nightly
@pytest.mark.slow
def test_run_that_was_moved_is_resumed_through_a_link(tmp_path: Path, whole: Path) -> None:
    """R15: the folder of the run is not at the path that its recipe names."""
    (tmp_path / "first").mkdir()
    half = train(tmp_path / "first", run__steps=2)
    moved = half.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved)
    resume(tmp_path / "link", run__steps=STEPS)
    assert_equal(moved, whole)
    assert not half.exists()
