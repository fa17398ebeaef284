"""A run whose held-out completions are scored once more by a stricter verifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import tiny_recipe

STRICT = "def refuse(completion, task):\n    return 0.0\n"


def paid(completion: str, task: Task) -> float:
    return 1.0


@pytest.mark.slow
def test_the_gap_to_the_strict_verifier_is_measured_and_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text(STRICT)
    settings = tiny_recipe(
        tmp_path,
        run__name="r",
        run__steps=2,
        sft__steps=0,
        eval__every=1,
        eval__strict=f"{tmp_path / 'strict.py'}:refuse",
    )
    recipe = parse_recipe('run.name = "r"', "test", settings)
    tasks = [Task(f"s{n}", f"{n}+1=", answer=n + 1) for n in range(20)]
    assert train_run(recipe, tasks=tasks[4:], heldout=tasks[:4], reward=paid) == 0
    steps = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    assert [step["heldout/strict"] for step in steps] == [0.0, 0.0]
    assert [step["heldout/strict_gap"] for step in steps] == [1.0, 1.0]
    assert {step["reward/mean"] for step in steps} == {1.0}
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["heldout_after_strict"] == 0.0 and summary["heldout_after_strict_gap"] == 1.0
