"""The report's view of the data: faults with a remedy, buckets, and tasks that moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sixfold.commands import report
from sixfold.report.curriculum_view import MOVES, data_view
from sixfold.report.html import write_report
from sixfold.report.run_record import read_run

BUCKETS = {"hard": 0.25, "new": 0.0, "train": 0.5, "easy": 0.25}


def run_folder(folder: Path, decisions: list[dict[str, Any]], steps: int = 60) -> Path:
    folder.mkdir()
    (folder / "recipe.toml").write_text("[run]\nsteps = 60\n")
    shares = {f"data/{name}_frac": share for name, share in BUCKETS.items()}
    lines = [
        {"step": step, "reward/solved_frac": 0.99, **shares, "data/pool": 20, "data/spared": 0}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "curriculum.jsonl").write_text("".join(json.dumps(d) + "\n" for d in decisions))
    return folder


def decision(step: int, task: str, change: tuple[str, str], seen: list[int]) -> dict[str, Any]:
    return {"step": step, "moved": [[task, *change, 0.875]], "seen": {task: seen, "other": [1, 8]}}


def test_the_report_shows_who_moved_and_how_often_it_was_solved(tmp_path: Path) -> None:
    run = run_folder(
        tmp_path / "run",
        [
            decision(10, "t1", ("new", "train"), [3, 8]),
            decision(20, "t1", ("train", "easy"), [8, 8]),
        ],
    )
    found = data_view(read_run(run))
    assert found and [(m.step, m.task, m.change) for m in found.moves] == [
        (20, "t1", "train to easy"),
        (10, "t1", "new to train"),
    ]
    assert found.moves[0].history == "step 10: 3 of 8; step 20: 8 of 8"
    page = write_report(run).read_text()
    assert "Tasks by bucket" in page and "train to easy" in page and "87.5%" in page


def test_the_newest_moves_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    many = [decision(i, f"t{i}", ("new", "hard"), [0, 8]) for i in range(1, 61)]
    found = data_view(read_run(run_folder(tmp_path / "run", many)))
    assert found and found.moved == 60 and len(found.moves) == MOVES
    assert found.moves[0].step == 60 and found.moves[-1].step == 21


def test_a_symptom_is_shown_with_its_remedy_and_printed(tmp_path: Path, capsys: Any) -> None:
    run = run_folder(tmp_path / "run", [])
    assert report.run([str(run)]) == 0
    assert "data: pool solved: 99.0% of the samples" in capsys.readouterr().err
    page = (run / "report.html").read_text()
    assert "pool solved !" in page and "Measure the pass rates again" in page
    assert "length explosion !" not in page


def test_a_damaged_history_is_a_problem_of_the_report(tmp_path: Path) -> None:
    for text in ('{"step": 1}\n', '{"step": 1, "moved": [[1]], "seen": {}}\n', "[]\n", "{\n"):
        run = run_folder(tmp_path / f"run{len(text)}", [])
        (run / "curriculum.jsonl").write_text(text)
        assert any("curriculum.jsonl" in problem for problem in read_run(run).problems)
        assert write_report(run).is_file()
    (run / "curriculum.jsonl").write_text(json.dumps(decision(1, "a", ("new", "hard"), [0, 8])))
    assert read_run(run).curriculum == []  # a line that is not whole
