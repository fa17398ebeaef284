"""`sixfold diff RUN_A RUN_B`: which run is better, and how settings, code and numbers differ."""

from __future__ import annotations

import json
import shutil
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli.parsing import VerbParser, argument, option, run_folder
from ..errors import UserError
from ..evaluation.statistics import paired_test
from ..files.folder import one_stage
from ..report.loggers import read_metrics
from ..report.numbers import p_value, percent, points
from ..report.run_record import flatten

_ABSENT = "-"


@dataclass(frozen=True, kw_only=True)
class Options:
    run_a: str = argument("folder of a run")
    run_b: str = argument("folder of another run")
    all: bool = option("also list the final numbers that differ", False)


PARSER = VerbParser(
    "diff",
    "Show which of two runs is better on the held-out tasks that both have, by a paired test,\n"
    "and how their settings, versions and code differ.",
    Options,
)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    a, b = (one_stage(run_folder(run)) for run in (given.run_a, given.run_b))
    print(compare_runs(a, b, numbers=given.all))
    return 0


def compare_runs(a: Path, b: Path, *, numbers: bool = False) -> str:
    """Comparison of two runs as text. Settings that this release does not know are compared too.

    Args:
        a: folder of a run.
        b: folder of the other one.
        numbers: list the final numbers that differ.
    """
    newest = [
        {**flatten(_json(run / "summary.json")), **_last_metrics(run / "metrics.jsonl")}
        for run in (a, b)
    ]
    final = _differing(*newest)
    parts = [
        _heldout(a, b),
        _table("settings that differ", _differing(_settings(a), _settings(b))),
        _table("environment that differs", _differing(_environment(a), _environment(b))),
        _table("final numbers that differ", final)
        if numbers or not final
        else f"final numbers that differ: {len(final)} (list them with --all)",
    ]
    return "\n\n".join([f"A: {a}\nB: {b}", *parts])


def _heldout(a: Path, b: Path) -> str:
    """Paired test of the final weights on the held-out tasks that both runs have."""
    values = [_json(run / "heldout.json") for run in (a, b)]
    rules = [_json(run / "summary.json").get("heldout_metric") for run in (a, b)]
    common = [key for key in values[0] if key in values[1]]
    counts = " and ".join(f"{len(found)}" for found in values)
    reason = ""
    for run, found in zip((a, b), values, strict=True):
        reason = reason or ("" if found else f"{run} has no heldout.json")
    if not reason and rules[0] != rules[1]:
        reason = f"they count as solved what differs (A: {rules[0]}, B: {rules[1]})"
    if not reason and not common:
        reason = f"the runs have none in common (of {counts})"
    if reason:
        return textwrap.fill(
            f"held-out tasks: not compared, as {reason}. On the same tasks: sixfold eval {a} {b}"
            f" --against {a}",
            _width(),
            break_long_words=False,
            break_on_hyphens=False,
        )
    ours, theirs = ([found[key] for key in common] for found in values)
    test = paired_test(theirs, ours)
    low, high = (points(end) for end in test.difference[1:])
    return "\n  ".join(
        [
            f"held-out tasks in common: {len(common)} (of {counts})",
            f"A solved   {percent(sum(ours) / len(ours))}",
            f"B solved   {percent(sum(theirs) / len(theirs))}",
            f"B minus A  {points(test.difference.mean)} points ({low} to {high})",
            f"B better on {test.wins} tasks, worse on {test.losses}",
            f"{p_value(test.p_value)} ({test.test})",
        ]
    )


def _settings(run: Path) -> dict[str, Any]:
    path = run / "recipe.toml"
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from error


def _environment(run: Path) -> dict[str, Any]:
    """Versions, revision, machine and command. The start time is left out: it always differs."""
    return {
        key: value
        for key, value in flatten(_json(run / "environment.json")).items()
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
    """Newest value of each number in metrics.jsonl. A last line cut short by a kill is skipped."""
    newest: dict[str, Any] = {}
    for record in read_metrics(path):
        newest |= record
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
    """Rows of key and both values. If they are too wide, the values stand below their key."""
    if not rows:
        return f"{title}: none"
    widths = [max(len(row[i]) for row in [*rows, ("", "A", "B")]) for i in range(3)]
    if sum(widths) + 6 <= _width():
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [("", "A", "B"), *rows]
        ]
    else:
        lines = [line for key, a, b in rows for line in (key, f"  A: {a}", f"  B: {b}")]
    return "\n  ".join([title, *lines])


def _width() -> int:
    return shutil.get_terminal_size().columns
