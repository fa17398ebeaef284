"""The card of a data set: README.md in the form of the Hugging Face hub."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sixfold.report.untrusted import one_line

from .licence import hub_id
from .page import value_text
from .pipeline import Result
from .settings import Settings

_NO_LICENCE = "(none)"


def render_card(settings: Settings, results: Sequence[Result]) -> str:
    """The card: a header that `datasets` reads, then what the rows are and how they were chosen.

    Args:
        settings: settings of the recipe.
        results: what each stage has done. The first one has the counts of the sources.
    """
    first, last = results[0], results[-1]
    read, kept, sources = Counter[str](), Counter[str](), Counter[str]()
    for _, licence, rows in first.origins:
        read[licence or _NO_LICENCE] += rows
    for source, licence, rows in last.origins:
        kept[licence or _NO_LICENCE] += rows
        sources[source] += rows
    parts = [
        _header(settings, last.kept, kept),
        f"# {settings.name}",
        f"{last.kept:,} rows, chosen from {first.rows:,}. `provenance.jsonl.zst` has what became of"
        " each row that was read, and why. `report.html` has examples of what was dropped.",
        "## Sources",
        _table(
            ("source", "origin", "data", "form", "rows", "read", "kept"),
            [
                (s.label, s.origin, s.data, row["form"], row["rows"], row["read"], sources[s.label])
                for s, row in zip(settings.sources, first.figures["sources"], strict=True)
            ],
        ),
        _table(
            ("licence", "read", "kept"),
            [(name, rows, kept[name]) for name, rows in read.most_common()],
        ),
        "## Stages",
        _table(
            ("stage", "rows in", "rows out", "health", "value", "alarm"),
            [(r.name, r.rows, r.kept, r.metric, value_text(r.value), r.alarm) for r in results],
        ),
        "## Columns",
        "`id`, `prompt`, `answer`, `source`, `origin`, `licence`, and further columns of the"
        " sources. A column of a source that has one of these names is `original_` and the name.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(settings: Settings, rows: int, licences: Counter[str]) -> str:
    found = {hub_id(name) for name in licences}
    known = sorted(found) if all(found) else ["other"]
    data = f"train.{settings.format}"
    lines = [
        "---",
        f"pretty_name: {json.dumps(settings.name)}",
        f"license: {json.dumps(known)}",
        f"size_categories: [{json.dumps(_size(rows))}]",
        "configs:",
        "- config_name: default",
        f"  data_files: [{{split: train, path: {data}}}]",
        "---",
    ]
    return "\n".join(lines)


def _size(rows: int) -> str:
    """Size category of the hub."""
    steps = [(1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K")]
    steps += [(1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M")]
    return next((name for most, name in steps if rows < most), "n>10M")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else one_line(str(value), 300)
    return text.replace("|", "\\|").replace("<", "&lt;")
