"""The tables of a run with stages: what they show, and what they leave out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from sixfold.report.staged import TABLE, render_staged, screen_tables, stage_tables


def row(stage: str, start: str, kind: str = "sft", **figures: Any) -> dict[str, Any]:
    return {"stage": stage, "kind": kind, "start": start, "sources": {}, "verdicts": {}, **figures}


ROWS = [
    row("base", "", "pretrain", seconds=61.0),
    row(
        "direct",
        "base",
        heldout=0.25,
        low=0.2,
        high=0.3,
        sources={"5 terms": 0.3, "6 terms": 0.2},
        verdicts={"passed": 0.25, "wrong_answer": 0.75},
    ),
    row("cot", "base", sources={"5 terms": 0.7, "6 terms": 0.45}, verdicts={"rejected": 0.125}),
    row("other", "base", sources={"4 terms": 1.0, "6 terms": 0.1}),
    row("rl", "cot", "rl", sources={"5 terms": 0.9, "6 terms": 0.8}),
]


def test_accuracy_by_source_has_the_differences_of_stages_with_one_kind_and_start() -> None:
    _, sources, _ = stage_tables(ROWS)
    assert sources.columns == ["stage", "5 terms", "6 terms", "4 terms"]
    assert sources.rows == [
        ["direct", "30.0%", "20.0%", "—"],
        ["cot", "70.0%", "45.0%", "—"],
        ["other", "—", "10.0%", "100.0%"],
        ["rl", "90.0%", "80.0%", "—"],
        ["cot - direct", "+40.0", "+25.0", "—"],
        ["other - direct", "—", "-10.0", "—"],
    ]


def test_shares_of_verdicts_have_a_table() -> None:
    *_, verdicts = stage_tables(ROWS)
    assert verdicts.columns == ["stage", "passed", "wrong_answer", "rejected"]
    assert verdicts.rows == [
        ["direct", "25.0%", "75.0%", "0.0%"],
        ["cot", "0.0%", "0.0%", "12.5%"],
    ]


def test_rows_of_earlier_releases_and_of_one_source_have_the_stage_table_alone() -> None:
    old = {"stage": "a", "kind": "sft", "heldout": 0.5, "low": 0.4, "high": 0.6, "seconds": 61.0}
    (table,) = stage_tables([old, row("b", "a")])
    assert table.columns == ["stage", "kind", "held-out", "95% interval", "time"]
    assert table.rows == [
        ["a", "sft", "50.0%", "40.0 to 60.0%", "1:01"],
        ["b", "sft", "—", "—", "—"],
    ]


def test_a_loss_on_conversations_has_a_column() -> None:
    (table,) = stage_tables([row("a", "", loss=1.25)])
    assert (table.columns, table.rows) == (
        ["stage", "kind", "held-out loss"],
        [["a", "sft", "1.25"]],
    )


def test_page_and_screen_show_all_tables_and_the_result_of_the_pre_flight(tmp_path: Path) -> None:
    (tmp_path / TABLE).write_text(json.dumps([*ROWS[1:3], row("<i>", "cot")]))
    for name in ("direct", "cot", "<i>"):
        stage = tmp_path / "stages" / name
        stage.mkdir(parents=True)
        (stage / "metrics.jsonl").touch()
    lines = [
        {"step": 0, "text": "pre-flight: 55% of 50 rollouts solved", "warning": False},
        {"step": 0, "text": "something else", "warning": False},
    ]
    (stage / "notes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render_staged(tmp_path)
    for shown in ("by source", "by verdict", "+40.0", "12.5%", "55% of 50 rollouts", "&lt;i&gt;"):
        assert shown in page
    assert "something else" not in page and "<i>" not in page
    screen = io.StringIO()
    Console(file=screen, width=120).print(screen_tables(tmp_path))
    assert "cot - direct" in screen.getvalue() and "12.5%" in screen.getvalue()
