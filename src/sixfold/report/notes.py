"""Notes of a run, `notes.jsonl`: messages shown during the run that the report must repeat.

One JSON object per line: `step` (0 before the first), `warning` (true if something is wrong) and
`text`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..files.durable import write_text_atomic

FILE = "notes.jsonl"


@dataclass(frozen=True)
class Note:
    """A line for the user.

    A `warning` means that something is wrong; the line then says what to try.
    """

    step: int
    text: str
    warning: bool = False


class Notes:
    """Shows notes and stores them. The file is written as a whole, so deleting it loses none.

    Args:
        show: prints a line on the screen.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self._path = folder / FILE
        self._show = show
        self._lines: list[str] | None = None

    def cut_after(self, step: int | None) -> None:
        """Drop the notes after `step` (None: all notes). A resumed run creates them again."""
        kept = [] if step is None else [n for n in read_notes(self._path) if n.step <= step]
        self._lines = [*map(_line, kept)]
        write_text_atomic(self._path, "".join(self._lines))

    def add(self, step: int, text: str, warning: bool = False) -> None:
        """Show a line, with its step unless that is 0, and add it to the file."""
        self._show(f"step {step}: {text}" if step else text)
        if self._lines is None:
            self._lines = [*map(_line, read_notes(self._path))]
        self._lines.append(_line(Note(step, text, warning)))
        write_text_atomic(self._path, "".join(self._lines))


def read_notes(path: Path) -> list[Note]:
    """The notes in file order; empty if there is no file.

    A line that is not a note is skipped: a crash may have truncated it.
    """
    notes = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ()
    ):
        try:
            entry = json.loads(line)
            notes.append(Note(int(entry["step"]), str(entry["text"]), bool(entry.get("warning"))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return notes


def _line(note: Note) -> str:
    return json.dumps(asdict(note)) + "\n"  # ASCII: model text may contain lone surrogates
