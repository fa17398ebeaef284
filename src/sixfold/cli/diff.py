"""`sixfold diff RUN_A RUN_B`: differences in settings, versions, code and final numbers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..report.run_record import dotted
from .parsing import VerbParser, run_folder

_ABSENT = "-"


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "diff", "Show how two runs differ: settings, versions, code and final numbers."
    )
    arguments.add_argument("run_a", metavar="RUN_A", help="folder of a run")
    arguments.add_argument("run_b", metavar="RUN_B", help="folder of another run")
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and print."""
    given, _ = parser().parse(argv)
    print(compare_runs(run_folder(given.run_a), run_folder(given.run_b)))
    return 0


def compare_runs(a: Path, b: Path) -> str:
    """Comparison of two runs as text. Settings that this release does not know are compared too."""
    numbers = [
        {**dotted(_json(run / "summary.json")), **_last_metrics(run / "metrics.jsonl")}
        for run in (a, b)
    ]
    parts = [
        _table("settings that differ", _differing(_settings(a), _settings(b))),
        _table("environment that differs", _differing(_environment(a), _environment(b))),
        _table("final numbers that differ", _differing(*numbers)),
    ]
    return "\n\n".join([f"A: {a}\nB: {b}", *parts])


def _settings(run: Path) -> dict[str, Any]:
    path = run / "recipe.toml"
    try:
        return dotted(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from error


def _environment(run: Path) -> dict[str, Any]:
    """Versions, revision, machine and command. The start time is left out: it always differs."""
    return {
        key: value
        for key, value in dotted(_json(run / "environment.json")).items()
        if key != "started"
    }


def _json(path: Path) -> dict[str, Any]:
    """JSON object in a file. Empty if the run has not written the file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _last_metrics(path: Path) -> dict[str, Any]:
    """Newest value of each number in metrics.jsonl. Lines cut short by a kill are skipped."""
    newest: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            newest |= json.loads(line)
        except ValueError:
            continue
    return {key: value for key, value in newest.items() if isinstance(value, (int, float))}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, value in A, value in B) as text, for keys whose values differ."""
    pairs = ((key, a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in dict.fromkeys([*a, *b]))
    return [(key, *_shown_apart(left, right)) for key, left, right in pairs if left != right]


def _shown_apart(a: object, b: object) -> tuple[str, str]:
    """Two different values as two different texts.

    If their short forms are equal, the texts are shown in full or from the first difference on.
    """
    if _shown(a) != _shown(b):
        return _shown(a), _shown(b)
    texts = json.dumps(a), json.dumps(b)
    start = next(
        (i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts))
    )
    if start <= 24 or isinstance(a, float):
        return texts
    return tuple("..." + text[start - 12 : start + 30] for text in texts)  # type: ignore[return-value]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    text = json.dumps(text) if not text.isprintable() else text
    return text if len(text) <= 48 else text[:45] + "..."


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return f"{title}: none"
    widths = [max(len(row[i]) for row in [*rows, ("", "A", "B")]) for i in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [("", "A", "B"), *rows]
    ]
    return "\n  ".join([title, *lines])
