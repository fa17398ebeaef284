"""`sixfold diff` shows only differences, and reads the files of a killed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.cli.diff import compare_runs


def make_run(
    folder: Path,
    recipe: str,
    *,
    environment: object = None,
    summary: object = None,
    metrics: str = "",
) -> Path:
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe)
    for name, content in (("environment.json", environment), ("summary.json", summary)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if metrics:
        (folder / "metrics.jsonl").write_text(metrics)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    a = make_run(
        tmp_path / "a",
        '[run]\nname = "a"\nseed = 0\n[trainer]\nlearning_rate = 1e-6\n[model.scratch]\nlayers'
        " = 4\n",
        environment={
            "versions": {"torch": "2.13.0", "python": "3.11.7"},
            "git_revision": "aaaa",
            "started": "1",
        },
        summary={"heldout_after": 0.953125, "seconds": 201},
        metrics=(
            '{"step": 1, "reward/mean": 0.25, "eval/accuracy": 0.5}\n{"step": 2, "reward/mean":'
            ' 0.75, "h": [1, 2]}\n{"step": 3, "rew'
        ),
    )
    b = make_run(
        tmp_path / "b",
        '[run]\nname = "b"\nseed = 0\nold_knob = 3\n[trainer]\nlearning_rate ='
        " 2e-6\n[model.scratch]\nlayers = 4\n",
        environment={
            "versions": {"torch": "2.14.0", "python": "3.11.7"},
            "git_revision": "bbbb",
            "started": "2",
        },
        metrics='{"step": 1, "reward/mean": 0.5}\n',
    )
    return a, b


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of one table, without its head."""
    block = next(part for part in text.split("\n\n") if part.startswith(title))
    return [line.split() for line in block.splitlines()[2:]]


def test_what_differs_is_shown_and_the_rest_is_not(runs: tuple[Path, Path]) -> None:
    text = compare_runs(*runs)
    assert text.startswith(f"A: {runs[0]}\nB: {runs[1]}\n")
    assert rows(text, "settings that differ") == [
        ["run.name", "a", "b"],
        ["trainer.learning_rate", "1e-06", "2e-06"],
        ["run.old_knob", "-", "3"],
    ]
    assert rows(text, "environment that differs") == [
        ["versions.torch", "2.13.0", "2.14.0"],
        ["git_revision", "aaaa", "bbbb"],
    ]


def test_final_numbers_are_the_newest_of_each_and_stand_side_by_side(
    runs: tuple[Path, Path],
) -> None:
    assert rows(compare_runs(*runs), "final numbers that differ") == [
        ["heldout_after", "0.953125", "-"],
        ["seconds", "201", "-"],
        ["step", "2", "1"],
        ["reward/mean", "0.75", "0.5"],
        ["eval/accuracy", "0.5", "-"],
    ]


def test_a_run_does_not_differ_from_itself(runs: tuple[Path, Path]) -> None:
    text = compare_runs(runs[0], runs[0])
    assert (
        "settings that differ: none" in text
        and "environment that differs: none" in text
        and "final numbers that differ: none" in text
    )


def test_no_row_shows_the_same_text_twice(runs: tuple[Path, Path]) -> None:
    """Even for values that differ only in the eighth digit, or after 48 characters."""
    long = "x" * 60
    for run, last, value in ((runs[0], "a", 0.123456789), (runs[1], "b", 0.123456780)):
        (run / "recipe.toml").write_text(f'[run]\nname = "{long}{last}{long}"\nrate = {value}\n')
    found = rows(compare_runs(*runs), "settings that differ")
    assert [row[0] for row in found] == ["run.name", "run.rate"] and all(
        left != right for _, left, right in found
    )
    assert found[1][1:] == ["0.123456789", "0.12345678"]


def test_equal_numbers_are_no_rows(runs: tuple[Path, Path]) -> None:
    (runs[1] / "summary.json").write_text('{"heldout_after": 0.953125, "seconds": 200}')
    keys = [row[0] for row in rows(compare_runs(*runs), "final numbers that differ")]
    assert "seconds" in keys and "heldout_after" not in keys


def test_the_command_prints_it_and_refuses_what_is_no_run(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs[0]), str(runs[1])]) == 0
    assert capsys.readouterr().out == compare_runs(*runs) + "\n"
    assert main(["diff", str(runs[0]), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"sixfold: error: {tmp_path} is not a run: it holds no recipe.toml"
    )
    (runs[1] / "summary.json").write_text("{")
    assert main(["diff", str(runs[0]), str(runs[1])]) == 2
    assert "summary.json cannot be read as JSON" in capsys.readouterr().err
