"""The table of `sixfold eval`: one row per figure, with intervals, at any width."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sixfold.commands import eval as module
from sixfold.commands.eval import Evaluated, evaluate_checkpoints
from sixfold.evaluation.evaluate import Evaluation
from sixfold.evaluation.statistics import pass_at_k, wilson_interval
from sixfold.recipe.toml import parse_recipe
from sixfold.types import Group, Reward, Task, Trajectory

TASKS, SAMPLES = 24, 4
LONG = "/srv/experiments/arithmetic/2026-03/a_grpo_with_a_long_name"


def evaluation(solved: list[int]) -> Evaluation:
    """Groups with so many solved samples each."""
    groups = []
    for number, count in enumerate(solved):
        samples = [
            Trajectory.one_turn(
                str(number), place, [1], [2], [-1.0], [0], "stop",
                reward=Reward(
                    float(place < count), solved=place < count, score=float(place < count)
                ),
            )
            for place in range(SAMPLES)
        ]  # fmt: skip
        groups.append(Group(Task(str(number), "1+1="), samples))
    return Evaluation(groups)


SOLVED = {
    name: random.Random(seed).choices([0, 0, 0, 1, 2, 4], k=TASKS)
    for seed, name in enumerate(("runs/a_grpo", "runs/b_grpo", LONG))
}


def printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    columns: int,
    *paths: str,
    against: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Output and results.json of the command with recorded evaluations."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(module, "model_folder", lambda path, setting: path)
    monkeypatch.setattr(
        module,
        "_evaluate",
        lambda recipe, path, model: Evaluated(
            path, model, 3, 3, "mine >= 1", evaluation(SOLVED[path])
        ),
    )
    flags = [f"--eval.samples={SAMPLES}", "--eval.temperature=1"]
    recipe = parse_recipe('run.name = "run"', "test", flags)
    out = tmp_path / "out"
    assert evaluate_checkpoints(recipe, paths, against, out) == 0
    return capsys.readouterr().out, json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("paths", [("runs/a_grpo", "runs/b_grpo"), ("runs/a_grpo", LONG)])
def test_one_row_per_figure_at_any_width(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    columns: int,
    paths: tuple[str, str],
) -> None:
    text, _ = printed(monkeypatch, capsys, tmp_path, columns, *paths)
    tables = text.partition("mine >= 1")[2].partition("results and")[0]
    lines = [line.rstrip() for line in tables.splitlines() if line.strip()]
    assert [line for line in lines if len(line) > columns and LONG not in line] == []
    assert sum(line.startswith("pass@4 ") for line in lines) == (1 if columns == 80 else 2)
    cells = [cell for line in lines if line.startswith("solved ") for cell in line.split()[1:]]
    means = [100 * sum(SOLVED[path]) / TASKS / SAMPLES for path in paths]
    assert cells == [f"{mean:.1f}%" for mean in means]
    if LONG in paths:
        assert f"[2] {LONG}" in "".join(text.splitlines()).replace("  ", " ")
    else:
        assert all(any(path in line for line in lines) for path in paths)


def test_pass_at_k_has_its_interval_in_table_and_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, results = printed(monkeypatch, capsys, tmp_path, 80, "runs/a_grpo")
    (found,) = results["checkpoints"]
    counts = SOLVED["runs/a_grpo"]
    for k in (1, 2, 4):
        mean = sum(pass_at_k(SAMPLES, count, k) for count in counts) / TASKS
        low, high = found["pass_at_interval"][str(k)]
        assert found["pass_at"][str(k)] == pytest.approx(mean)
        assert 0 <= low < mean < high <= 1
        if k > 1:
            assert f"{100 * low:.1f}% to {100 * high:.1f}%" in text
    # A draw of all samples solves a task or does not: Wilson's interval.
    least, most = wilson_interval(sum(map(bool, counts)), TASKS)[1:]
    assert found["pass_at_interval"]["4"] == pytest.approx([least, most])


def test_a_baseline_that_is_also_listed_is_the_baseline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a, b = "runs/a_grpo", "runs/b_grpo"
    text, results = printed(monkeypatch, capsys, tmp_path, 80, a, b, against=a)
    (found,) = results["comparisons"]
    assert (found["checkpoint"], found["against"]) == (b, a)
    difference = (sum(SOLVED[b]) - sum(SOLVED[a])) / TASKS / SAMPLES
    assert found["difference"] == pytest.approx(difference) and difference != 0
    assert f"{b} minus {a}" in text and f"{a} minus {a}" not in text
