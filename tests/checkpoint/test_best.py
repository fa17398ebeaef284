"""Checkpoints with the best held-out accuracy are kept besides the newest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sixfold.checkpoint.best import BestSteps
from sixfold.checkpoint.listing import list_checkpoints
from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import parse_recipe
from sixfold.run import step_log
from sixfold.run.start import train_run
from tests.run.processes import metrics, tiny_recipe


def test_the_best_steps_are_ordered_by_accuracy_and_then_by_age() -> None:
    best = BestSteps(2)
    for step, accuracy, among in (
        (999_999, 0.5, True),
        (1_000_000, 0.5, True),
        (1_000_001, 0.5, False),
        (1_000_002, 0.7, True),
        (1_000_003, 0.4, False),
    ):
        assert best.observe(step, {"heldout/accuracy": accuracy}) is among
    assert not best.observe(1_000_004, {"heldout/accuracy": None}) and not best.observe(7, {})
    paths = [Path(name) for name in ("sft-999999", "step-999999", "step-1000000", "step-1000001")]
    assert best.among(paths) == paths[1:3], "the best step of all has no checkpoint"
    assert best.record(paths) == {
        "best_checkpoint": {"checkpoint": "checkpoints/step-999999", "heldout/accuracy": 0.5}
    }
    assert BestSteps(0).record(paths) == {} and not BestSteps(0).observe(
        1, {"heldout/accuracy": 1.0}
    )


def test_the_evaluations_after_the_best_one_are_counted() -> None:
    best, waited = BestSteps(0), []
    for step, accuracy in enumerate((0.5, 0.4, 0.5, 0.6, 0.6, None, 0.7)):
        best.observe(step, {"heldout/accuracy": accuracy})
        waited.append(best.since)
    assert BestSteps(1).since == 0 and waited == [0, 1, 2, 0, 1, 1, 0]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoints_and_waits_for_a_better_one_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is evaluated every 2 steps and saved every 5. Steps 4 and 8 are the best."""
    accuracy = {
        2: 0.1,
        4: 0.9,
        6: 0.5,
        8: 0.6,
        10: 0.2,
        12: 0.3,
        14: 0.9,
        16: 0.95,
    } | dict.fromkeys(range(18, 61, 2), 0.99)
    evaluate = step_log.evaluate_policy

    def measured(*args: Any, **kwargs: Any) -> Any:
        found = evaluate(*args, **kwargs).metrics()
        found["heldout/accuracy"] = accuracy[steps_done() + 1]
        return SimpleNamespace(metrics=lambda: found, values=((1.0,),))

    def steps_done() -> int:
        return len(metrics(tmp_path / "r")) if (tmp_path / "r/metrics.jsonl").exists() else 0

    def train(steps: int, *, resume: bool = False, **more: Any) -> list[str]:
        settings = {"run.steps": steps, "eval.every": 2, "data.heldout": 4, "checkpoint.every": 5}
        flags = {"checkpoint.keep": 1, "checkpoint.keep_best": 2, **settings, **more}
        asked = {key.replace(".", "__"): value for key, value in flags.items()}
        recipe = parse_recipe(
            'run.name = "r"', "test", tiny_recipe(tmp_path, run__name="r", **asked)
        )
        assert train_run(recipe, resume=tmp_path / "r" if resume else None) == 0
        return [path.name for path in list_checkpoints(tmp_path / "r" / "checkpoints")]

    monkeypatch.setattr(step_log, "evaluate_policy", measured)
    assert train(7) == ["step-000004", "step-000006", "step-000007"]
    assert train(12, resume=True) == ["step-000004", "step-000008", "step-000012"]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    best = {"checkpoint": "checkpoints/step-000004", "heldout/accuracy": 0.9}
    assert summary["best_checkpoint"] == best
    assert main(["report", str(tmp_path / "r")]) == 0
    assert "checkpoints/step-000004" in (tmp_path / "r" / "report.html").read_text()
    assert train(50, resume=True, **{"run.patience": 5})[-1] == "step-000014"
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["ended"] == {
        "reason": "patience",
        "step": 14,
        "text": "14 of 50 steps, run.patience = 5 reached: the best held-out accuracy is 5"
        " evaluations old",
    }
    train(50, resume=True, **{"run.patience": 5})
    assert "already finished: 14 of 50 steps, run.patience = 5" in capsys.readouterr().err
    assert train(60, resume=True, **{"run.target_accuracy": 0.95})[-1] == "step-000016"
    ended = json.loads((tmp_path / "r" / "summary.json").read_text())["ended"]
    assert ended["reason"] == "target_accuracy" and ended["step"] == 16
    capsys.readouterr()
    train(60, resume=True, **{"run.target_accuracy": 0.95})
    assert "already finished: 16 of 60 steps, run.target_accuracy" in capsys.readouterr().err
    # A step that was logged after the newest checkpoint, by a process that was killed.
    log = tmp_path / "r" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 18, "heldout/accuracy": 0.99}\n')
    train(60, resume=True, **{"run.target_accuracy": 0.98})
    assert "already finished" not in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["--eval.every=0", "--data.heldout=0"])
@pytest.mark.parametrize("name", ["checkpoint.keep_best", "run.patience", "run.target_accuracy"])
def test_the_best_needs_evaluations(name: str, setting: str) -> None:
    recipe = parse_recipe('run.name = "x"', "x.toml", [f"--{name}=1", setting])
    with pytest.raises(UserError, match=rf"{re.escape(name)} = 1 .*eval\.every"):
        make_plan(recipe)
