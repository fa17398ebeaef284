"""Files of a run that another program deletes, renames or replaces while the run goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sixfold.checkpoint.listing import list_checkpoints
from sixfold.errors import RunFailed
from sixfold.files.folder import MARKER, open_run
from sixfold.report.notes import read_notes

from .processes import metrics
from .test_failed_steps import STEPS, TRAINER, at_call, train

COLLATE = "sixfold.controller.loop.collate"
"""Called once per step, between rollout and trainer."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == 0
    return folder / "r"


def weights(checkpoint: Path) -> dict[str, list[float]]:
    tensors = load_file(checkpoint / "model" / "model.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def deletes(*paths: Path) -> Callable[[], None]:
    def action() -> None:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return action


def test_every_file_deleted_in_a_step_is_complete_at_the_end(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files that gain lines, the recipe, the lock, and the folders of rollouts and
    checkpoints.
    """
    run = tmp_path / "r"
    names = ["metrics.jsonl", "notes.jsonl", "metrics.csv", "recipe.toml", MARKER]
    gone = [run / name for name in (*names, "rollouts", "checkpoints")]
    with at_call(monkeypatch, COLLATE, 3, deletes(*gone)):
        assert train(tmp_path, log__to='["csv"]') == 0
    assert metrics(run) == metrics(whole)
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + STEPS
    ours, theirs = (
        {note.text for note in read_notes(folder / "notes.jsonl")} for folder in (run, whole)
    )
    assert theirs <= ours
    more = " ".join(ours - theirs)
    assert "metrics.jsonl was deleted" in more and "recipe.toml was deleted" in more
    assert [p.name for p in sorted((run / "rollouts").iterdir())] == [
        f"step-{step:06d}.jsonl.zst" for step in (3, 4, 5)
    ]
    last = f"checkpoints/step-{STEPS:06d}"
    assert weights(run / last) == weights(whole / last)
    assert open_run(run).last_step() == STEPS and (run / MARKER).is_file()


def test_sft_metrics_deleted_during_sft_are_complete(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_call(monkeypatch, f"{TRAINER}.train_step", 3, deletes(tmp_path / "r" / "sft.jsonl")):
        assert train(tmp_path, run__steps=0) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "r/sft.jsonl").open()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize("moment", [3, "sft"])
def test_a_deleted_run_folder_ends_the_run_and_its_last_step_is_saved(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: int | str,
) -> None:
    run = tmp_path / "r"
    where, number = (COLLATE, moment) if isinstance(moment, int) else (f"{TRAINER}.train_step", 2)
    with at_call(monkeypatch, where, number, deletes(run)), pytest.raises(RunFailed) as error:
        train(tmp_path)
    said = str(error.value)
    assert f"{run} was deleted during the run" in said
    name = "step-000002" if isinstance(moment, int) else "sft-000002"
    assert f"{name}" in said and f"--resume {run}" in said
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [name]
    assert train(tmp_path, resume=True) == 0
    last = f"checkpoints/step-{STEPS:06d}"
    assert weights(run / last) == weights(whole / last)
    assert metrics(run) == metrics(whole)


def test_a_renamed_run_folder_gets_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "r", tmp_path / "renamed"
    with (
        at_call(monkeypatch, COLLATE, 3, lambda: os.rename(old, new)),
        pytest.raises(RunFailed) as error,
    ):
        train(tmp_path)
    said = str(error.value)
    assert f"{old} was renamed to {new}" in said and f"--resume {new}" in said
    assert not old.exists()
    assert list_checkpoints(new / "checkpoints")[-1].name == "step-000002"
    assert [record["step"] for record in metrics(new)] == [1, 2]


def test_another_folder_in_its_place_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "r"

    def replace() -> None:
        shutil.rmtree(run)
        run.mkdir()
        (run / "mine.txt").write_text("x")

    with (
        at_call(monkeypatch, COLLATE, 3, replace),
        pytest.raises(RunFailed, match="was deleted during the run"),
    ):
        train(tmp_path)
    assert [path.name for path in run.iterdir()] == ["mine.txt"]
