"""Rows for tests of stages that use a training recipe."""

from __future__ import annotations

from typing import Any

from sixfold_curation.stage import Record


def rows_of(fields: list[dict[str, Any]], source: str = "made") -> list[Record]:
    """Rows with these columns. A missing `id` is the position, a missing `answer` is empty."""
    made = []
    for number, one in enumerate(fields):
        source = one.get("source", source)
        name = str(one.get("id", f"{source}/{number}"))
        whole = {"answer": "", **one, "id": name, "source": source}
        texts = str(whole["prompt"]), str(whole["answer"])
        made.append(Record(number, name, source, f"{source}: row {number}", *texts, whole))
    return made
