"""metrics.csv says what metrics.jsonl says, whatever became of the process that wrote it."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.report.csv_logger import CsvLogger, columns
from sixfold.report.loggers import JsonlLogger, read_metrics, truncate_after
from sixfold.report.metric import Value
from sixfold.report.schema import METRICS

SINGLE = [metric.key for metric in METRICS if not metric.is_list and not metric.is_family]

STEPS: list[dict[str, Value]] = [
    {"train/loss": 0.1, "tokens_total": 7, "train/ratio_hist": [0, 1, 2]},
    {"train/loss": 1 / 3, "train/kl": math.nan},
    {"train/loss": -1e-300, "heldout/accuracy": 0.5, "reward/part/format, strict": 0.25},
    {"train/loss": math.inf, "reward/part/answer": 1.0, "reward/part/format, strict": 0.5},
]


def write(folder: Path, steps: range) -> None:
    """Log steps as a run does: to the lines, then to the table."""
    lines = JsonlLogger(folder / "metrics.jsonl")
    table = CsvLogger(folder / "metrics.csv", folder / "metrics.jsonl")
    for step in steps:
        lines.log(step, STEPS[step - 1])
        table.log(step, STEPS[step - 1])
    lines.close()
    table.close()


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def as_records(rows: list[dict[str, str]]) -> list[dict[str, float | None]]:
    """Cells as a data frame reads them: absent where empty; `nan` as JSON's null."""
    return [
        {k: None if math.isnan(float(v)) else float(v) for k, v in row.items() if v} for row in rows
    ]


def test_the_table_equals_the_lines(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert as_records(read(tmp_path)) == [
        {k: v for k, v in r.items() if k != "train/ratio_hist"} for r in records
    ]
    first = read(tmp_path)[0]
    assert first["tokens_total"] == "7" and first["train/loss"] == "0.1" and first["train/kl"] == ""
    assert [row["train/kl"] for row in read(tmp_path)] == ["", "nan", "", ""]


def test_the_columns_are_the_schemas_and_parts_join_at_their_place(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    assert list(read(tmp_path)[0]) == SINGLE, "before any part was seen"
    write(tmp_path, range(3, 5))
    header = list(read(tmp_path)[0])
    assert [key for key in header if key in SINGLE] == SINGLE and header[0] == "step"
    parts = ["reward/part/answer", "reward/part/format, strict"]
    at = header.index("reward/not_applicable_frac") + 1
    assert header[at : at + 2] == parts and len(header) == len(SINGLE) + 2
    assert "train/ratio_hist" not in header


def test_rows_are_appended_and_not_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(
        "sixfold.report.csv_logger.write_bytes_atomic",
        lambda path, data: (written.append(path), path.write_bytes(data)),
    )
    write(tmp_path, range(1, 5))
    assert len(written) == 3, "at the start, and for two parts that were new"


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_a_resume_from_any_step_leaves_the_table_of_a_run_that_was_never_stopped(
    tmp_path: Path, kept: int
) -> None:
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", range(1, 5))
    write(tmp_path, range(1, 5))
    truncate_after(tmp_path / "metrics.jsonl", kept)
    write(tmp_path, range(kept + 1, 5))
    assert (tmp_path / "metrics.csv").read_bytes() == (
        tmp_path / "whole" / "metrics.csv"
    ).read_bytes()


def test_a_crash_at_any_byte_of_either_file_mends_itself(tmp_path: Path) -> None:
    """Cut in the last row, or between the two files: opening it is enough."""
    write(tmp_path, range(1, 4))
    whole = (tmp_path / "metrics.csv").read_bytes()
    for cut in (*range(len(whole) - 30, len(whole)), 0):
        (tmp_path / "metrics.csv").write_bytes(whole[:cut])
        CsvLogger(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl")
        assert (tmp_path / "metrics.csv").read_bytes() == whole
    (tmp_path / "metrics.csv").unlink()  # csv was asked for at the resume
    CsvLogger(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.csv").read_bytes() == whole


@pytest.mark.parametrize("content", [None, b"", b"half a"])
def test_a_table_that_was_deleted_or_changed_is_written_again(
    tmp_path: Path, content: bytes | None
) -> None:
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", range(1, 3))
    lines = JsonlLogger(tmp_path / "metrics.jsonl")
    table = CsvLogger(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl")
    for step in (1, 2):
        for one in (lines, table):
            one.log(step, STEPS[step - 1])
        if step == 1 and content is None:
            (tmp_path / "metrics.csv").unlink()
        elif step == 1 and content is not None:
            (tmp_path / "metrics.csv").write_bytes(content)
    assert (tmp_path / "metrics.csv").read_bytes() == (
        tmp_path / "whole" / "metrics.csv"
    ).read_bytes()


def test_a_row_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    lines, table = (
        JsonlLogger(tmp_path / "metrics.jsonl"),
        CsvLogger(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl"),
    )
    for step in (1, 2):
        lines.log(step, {"train/loss": 0.5})
        table.log(step, {"train/loss": 0.5})
        assert [row["step"] for row in read(tmp_path)] == [str(s) for s in range(1, step + 1)]


def test_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(1, 2))
    table = CsvLogger(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.csv: no space left"):
        table.log(2, {"train/loss": 0.5})


def test_columns_without_rows_follow_the_schema() -> None:
    assert columns([]) == SINGLE
