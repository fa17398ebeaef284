"""SFT is never lost: it is saved during it and at its end, goes on bit for bit, and rewards are
tried before it begins.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sixfold.batch import Metrics
from sixfold.errors import UserError
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe
from sixfold.run.sft import SftStage
from sixfold.run.start import train_run
from sixfold.trainer.trainer import Trainer
from sixfold.types import Task

from .processes import start, tiny_recipe

# 1000 sums, so that there is a probe set; stop_at_accuracy out of reach, so that it is looked at
# and never ends SFT
SETTINGS: dict[str, Any] = {
    "run__name": "r",
    "run__steps": 0,
    "sft__steps": 12,
    "sft__stop_at_accuracy": 1.0,
    "data__arithmetic__digits": 2,
}


def flags(folder: Path, **overrides: Any) -> list[str]:
    settings = {
        **SETTINGS,
        "data__limit": 400,
        "checkpoint__every": 5,
        "checkpoint__keep": 9,
        "run__max_minutes": 9.0,
        **overrides,
    }
    return tiny_recipe(folder, **settings)


def recipe(folder: Path, **overrides: Any) -> Recipe:
    return parse_recipe('run.name = "r"', "test", flags(folder, **overrides))


def sft_log(run: Path) -> list[str]:
    return [line.split('"train/tok_s"')[0] for line in (run / "sft.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "checkpoints" / "step-000000" / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train_run(recipe(folder)) == 0
    return folder / "r"


def test_it_is_saved_during_sft_and_at_its_end(whole: Path) -> None:
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == [
        "sft-000005",
        "sft-000010",
        "sft-000012",
        "step-000000",
    ]
    assert any("heldout/accuracy" in line for line in sft_log(whole))


def test_it_learns_from_as_many_tasks_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[str] = set()
    step = SftStage._step

    def spied(self: SftStage, trainer: Trainer, tasks: list[Task], number: int) -> Metrics:
        used.update(task.id for task in tasks)
        return step(self, trainer, tasks, number)

    monkeypatch.setattr(SftStage, "_step", spied)
    assert train_run(recipe(tmp_path, sft__tasks=5, sft__stop_at_accuracy=0.0)) == 0
    assert len(used) == 5
    with pytest.raises(UserError, match=r"sft\.tasks = 401: only \d+ training tasks have"):
        train_run(recipe(tmp_path / "more", sft__tasks=401))


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("from_checkpoint", ["sft-000005", "sft-000010", "sft-000012"])
def test_it_goes_on_bit_for_bit_from_each_checkpoint(
    whole: Path, tmp_path: Path, from_checkpoint: str
) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole, run)
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name.replace("sft", "a") > from_checkpoint.replace("sft", "a"):
            shutil.rmtree(checkpoint)
    (run / "summary.json").unlink()
    assert train_run(recipe(tmp_path), resume=run) == 0
    ours, theirs = weights(run), weights(whole)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert sft_log(run) == sft_log(whole)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 12, 25, 40])
def test_a_kill_at_any_point_of_its_saves_loses_nothing(
    whole: Path, tmp_path: Path, number: int
) -> None:
    """Killed at the n-th fault point of the first process, for a spread of n; then resumed.

    The killed run has a process of its own: fault points are counted per process, and a thread that
    an earlier test has left behind would be counted too.
    """
    process = start(flags(tmp_path), tmp_path / "errors", fault=f"checkpoint.:{number}")
    process.join()
    assert process.exitcode == 137, (tmp_path / "errors").read_text()
    assert train_run(recipe(tmp_path), resume=tmp_path / "r") == 0
    ours, theirs = weights(tmp_path / "r"), weights(whole)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert sft_log(tmp_path / "r") == sft_log(whole)


@pytest.mark.slow
def test_a_failure_after_sft_does_not_cost_sft(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "sixfold.run.warm_up._preflight",
            lambda *work: (_ for _ in ()).throw(UserError("parity")),
        )
        with pytest.raises(UserError, match="parity"):
            train_run(recipe(tmp_path))
    before = sft_log(tmp_path / "r")
    assert len(before) == 12
    monkeypatch.setattr(
        "sixfold.run.sft.SftStage.run", lambda *a: pytest.fail("SFT was made again")
    )
    assert train_run(recipe(tmp_path), resume=tmp_path / "r") == 0
    assert sft_log(tmp_path / "r") == before


def always_fails(completion: str, task: Task) -> float:
    raise KeyError("reward_model")


def gives_text(completion: str, task: Task) -> str:
    return "good"


@pytest.mark.parametrize(
    ("reward", "said"),
    [(always_fails, "KeyError: 'reward_model'"), (gives_text, "returned str, not a number")],
)
def test_a_broken_reward_stops_the_run_before_anything(
    tmp_path: Path, reward: Callable[..., Any], said: str
) -> None:
    with pytest.raises(UserError, match=r"environment\.rewards: all \d+ checks") as error:
        train_run(recipe(tmp_path), reward=reward)
    assert said in str(error.value) and not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_reward_that_fails_on_some_answers_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wants_digits(completion: str, task: Task) -> float:
        return float(int(completion.split("#")[-1]) == task.answer)

    assert (
        train_run(
            recipe(tmp_path, sft__steps=1, sft__stop_at_accuracy=0.0, data__heldout=0),
            reward=wants_digits,
        )
        == 0
    )
    assert "checks of made-up completions failed" in capsys.readouterr().err


@pytest.mark.slow
def test_sft_may_be_shortened_while_it_lasts_and_not_after(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole, run)
    with pytest.raises(UserError, match=r"sft\.steps cannot change"):
        train_run(recipe(tmp_path, sft__steps=10), resume=run)
    for name in ("sft-000012", "step-000000"):
        shutil.rmtree(run / "checkpoints" / name)
    assert train_run(recipe(tmp_path, sft__steps=10), resume=run) == 0
    assert len(sft_log(run)) == 10


@pytest.mark.slow
def test_few_tasks_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They used to get no probe set, so that SFT learned all of them by heart and left nothing to
    RL.
    """
    tasks = [Task(f"t{n}", f"{n}+1=", answer=n + 1) for n in range(40)]
    few = recipe(tmp_path, sft__steps=30, sft__stop_at_accuracy=0.0001)
    assert train_run(few, tasks=tasks, reward=lambda completion, task: 1.0) == 0
    log = sft_log(tmp_path / "r")
    assert len(log) == 10 and '"heldout/accuracy": 1.0' in log[-1]
    said = " ".join(capsys.readouterr().err.split())
    assert "SFT ended after 10 of 30 steps: 100%" in said and "sft.stop_at_accuracy" in said
