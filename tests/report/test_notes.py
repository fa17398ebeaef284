"""Notes are shown, kept, and cut where a resumed run makes them again."""

from __future__ import annotations

from pathlib import Path

from sixfold.report.notes import Note, Notes, read_notes


def test_notes_are_shown_and_kept(tmp_path: Path) -> None:
    shown: list[str] = []
    notes = Notes(tmp_path, shown.append)
    notes.add(0, "pre-flight: fine")
    notes.add(7, "too \ud800 slow", warning=True)
    assert shown == ["pre-flight: fine", "step 7: too \ud800 slow"]
    assert read_notes(tmp_path / "notes.jsonl") == [
        Note(0, "pre-flight: fine"),
        Note(7, "too \ud800 slow", True),
    ]
    assert read_notes(tmp_path / "absent.jsonl") == []


def test_a_resume_keeps_what_was_said_before_its_checkpoint(tmp_path: Path) -> None:
    notes = Notes(tmp_path, lambda line: None)
    for step in (0, 4, 5, 9):
        notes.add(step, f"at {step}")
    with (tmp_path / "notes.jsonl").open("a") as file:
        file.write('{"step": 10')
    notes.cut_after(5)
    notes.add(6, "again")
    assert [note.step for note in read_notes(tmp_path / "notes.jsonl")] == [0, 4, 5, 6]
    notes.cut_after(None)
    assert read_notes(tmp_path / "notes.jsonl") == []
