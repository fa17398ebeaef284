"""`sixfold diff` shows only differences, and reads the files of a killed run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.commands.diff import compare_runs
from sixfold.errors import UserError
from sixfold.report.loggers import read_metrics


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
    assert re.search(r"^final numbers that differ: 5 \(list them with --all\)$", text, re.M)
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
    assert rows(compare_runs(*runs, numbers=True), "final numbers that differ") == [
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


def test_no_row_shows_the_same_text_twice(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even for values that differ only in the eighth digit, or after 48 characters."""
    monkeypatch.setenv("COLUMNS", "120")
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
    keys = [row[0] for row in rows(compare_runs(*runs, numbers=True), "final numbers that differ")]
    assert "seconds" in keys and "heldout_after" not in keys


def test_the_command_prints_it_and_refuses_what_is_no_run(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs[0]), str(runs[1])]) == 0
    assert capsys.readouterr().out == compare_runs(*runs) + "\n"
    assert main(["diff", str(runs[0]), str(runs[1]), "--all"]) == 0
    assert capsys.readouterr().out == compare_runs(*runs, numbers=True) + "\n"
    assert main(["diff", str(runs[0]), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"sixfold: error: {tmp_path} is not a run: it holds no recipe.toml"
    )
    (runs[1] / "summary.json").write_text("{")
    assert main(["diff", str(runs[0]), str(runs[1])]) == 2
    assert "summary.json cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (b'{"step": 1, "a": 1}\nnonsense\n{"step": 3, "a": 2}\n', "line 2 is not JSON"),
        (b"5\n", "line 1 is not a step"),
        (b'{"step": 1}\n[1, 2]\n', "line 2 is not a step"),
        (b'{"step": 1}\n\xff\xfe\n', "line 2 is not JSON"),
        (b'{"step": 1}\n' + b"[" * 100_000 + b"\n", "line 2 is not JSON"),
    ],
)
def test_a_damaged_log_is_refused_as_by_every_other_reader(
    damaged: bytes, words: str, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (runs[1] / "metrics.jsonl").write_bytes(damaged)
    with pytest.raises(UserError, match=words):
        read_metrics(runs[1] / "metrics.jsonl")
    assert main(["diff", *map(str, runs)]) == 2
    told = capsys.readouterr().err
    assert words in told and len(told.splitlines()) == 1 and len(told) < 400


def heldout(run: Path, values: dict[str, float], rule: str = "mine >= 1") -> None:
    (run / "heldout.json").write_text(json.dumps(values))
    (run / "summary.json").write_text(json.dumps({"heldout_metric": rule}))


def test_the_paired_test_on_common_tasks_comes_first(runs: tuple[Path, Path]) -> None:
    """Nine common tasks: B solves six more. McNemar: 2 / 2**6."""
    common = [f"t{n}" for n in range(9)]
    heldout(runs[0], {name: float(n < 2) for n, name in enumerate(common)} | {"mine": 1.0})
    heldout(runs[1], {"other": 1.0} | {name: float(n < 8) for n, name in enumerate(common)})
    text = compare_runs(*runs)
    first, second = text.split("\n\n")[1:3]
    assert second.startswith("settings that differ")
    assert first.splitlines()[0] == "held-out tasks in common: 9 (of 10 and 10)"
    assert "A solved   22.2%" in first and "B solved   88.9%" in first
    assert "B minus A  +66.7 points" in first
    assert "B better on 6 tasks, worse on 0" in first
    assert "p = 0.031 (McNemar, exact)" in first


@pytest.mark.parametrize(
    ("rules", "values", "reason"),
    [
        (("x >= 1", "x >= 2"), ({"a": 1.0}, {"a": 1.0}), "count as solved what differs"),
        (("x >= 1", "x >= 1"), ({"a": 1.0}, {"b": 1.0}), "none in common (of 1 and 1)"),
        (("x >= 1", "x >= 1"), ({"a": 1.0}, {}), "b has no heldout.json"),
    ],
)
def test_tasks_that_cannot_be_compared(
    runs: tuple[Path, Path],
    rules: tuple[str, str],
    values: tuple[dict[str, float], dict[str, float]],
    reason: str,
) -> None:
    for run, rule, found in zip(runs, rules, values, strict=True):
        heldout(run, found, rule)
    first = " ".join(compare_runs(*runs).split("\n\n")[1].split())
    assert reason in first and f"sixfold eval {runs[0]} {runs[1]} --against {runs[0]}" in first


@pytest.mark.parametrize("columns", [40, 80])
def test_rows_keep_to_the_width_of_the_terminal(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (runs[0] / "recipe.toml").write_text(f'[rollout]\nstop = "{"x" * 30}"\n')
    lines = compare_runs(*runs, numbers=True).splitlines()[2:]
    assert [line for line in lines if len(line) > columns and "/" not in line] == []
