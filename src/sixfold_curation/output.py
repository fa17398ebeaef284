"""The files of a finished data set.

OUT/train.jsonl (or .parquet)   the rows
OUT/held.jsonl                  rows that a stage holds, to be tried again
OUT/provenance.jsonl.zst        what became of every row that was read, and why
OUT/report.html, OUT/README.md  the report, and the card
OUT/summary.json                settings, counts, health, and hashes of the files. Written last
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from sixfold.data.files import unread_rows
from sixfold.errors import UserError
from sixfold.files.durable import (
    disk_errors,
    faultpoint,
    fsync_path,
    write_json_atomic,
    write_text_atomic,
)

from .card import render_card
from .page import render_report
from .pipeline import Result, Step
from .rows_on_disk import LineWriter, StoredRows, json_text, packed_lines, read_lines, record_of
from .settings import Curation
from .sources import file_hash
from .stage import Record

SUMMARY, PROVENANCE, HELD = "summary.json", "provenance.jsonl.zst", "held.jsonl"
_FILES = ("train.jsonl", "train.parquet", HELD, PROVENANCE, "report.html", "README.md")
_GROUP = 10_000
"""Rows of a row group of Parquet."""


def write_data_set(curation: Curation, steps: Sequence[Step], results: Sequence[Result]) -> Path:
    """Write the files of a data set, unless they are there.

    Returns:
        The file with its rows.

    Raises:
        UserError: no row is left, or the disk refuses.
    """
    out, settings = curation.out, curation.settings
    if not results[-1].kept:
        most = max(results, key=lambda one: one.rows - one.kept)
        raise UserError(
            f"no row is left: stage {most.name!r} drops {most.rows - most.kept} of {most.rows}. Its"
            f" decisions: {steps[results.index(most)].decisions}"
        )
    key = hashlib.sha256(
        json_text([steps[-1].key, settings.format, settings.name]).encode()
    ).hexdigest()
    rows = out / f"train.{settings.format}"
    if _is_written(out, key):
        return rows
    with disk_errors(f"cannot write {out}"):
        # Without the summary, nobody takes a mixture of old and new files for a data set.
        (out / SUMMARY).unlink(missing_ok=True)
        for name in _FILES:
            faultpoint("curation.cleared")
            (out / name).unlink(missing_ok=True)
    final = StoredRows(steps[-1].rows, results[-1].kept)
    if settings.format == "parquet":
        from .parquet import write_parquet

        write_parquet(rows, final, _GROUP)
    else:
        with LineWriter(rows) as written:
            for fields in final.fields_as_json():
                written.write_line(fields)
    _write_held(out / HELD, steps, results)
    with LineWriter(out / PROVENANCE) as written:
        for story in stories(steps, results):
            written.write(story)
    write_text_atomic(out / "report.html", render_report(settings, results))
    write_text_atomic(out / "README.md", render_card(settings, results))
    files = {name: file_hash(out / name) for name in _FILES if (out / name).is_file()}
    summary = {
        "key": key,
        "settings": settings.model_dump(mode="json", exclude={"out"}),
        "stages": [asdict(result) for result in results],
        "files": files,
    }
    with disk_errors(f"cannot write {out}"):
        write_json_atomic(out / SUMMARY, summary)
        fsync_path(out)
    return rows


def _is_written(out: Path, key: str) -> bool:
    try:
        summary = json.loads((out / SUMMARY).read_text())
        return summary["key"] == key and all(
            file_hash(out / name) == digest for name, digest in summary["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return False


def _write_held(path: Path, steps: Sequence[Step], results: Sequence[Result]) -> None:
    """Rows that stages hold, in the order of the sources. No file if there are none."""
    held = [(step, one.held) for step, one in zip(steps, results, strict=True) if one.held]
    if not held:
        return
    streams = [StoredRows(step.held, count) for step, count in held]
    with LineWriter(path) as written:
        for record in heapq.merge(*streams, key=attrgetter("number")):
            written.write(record.fields)


def stories(steps: Sequence[Step], results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """What became of every row that was read, in the order of the sources.

    Args:
        steps: the stages.
        results: what they have done.
    """
    later = [
        _labelled(step.name, step.decisions, result.decisions)
        for step, result in zip(steps[1:], results[1:], strict=True)
    ]
    decisions = heapq.merge(*later, key=itemgetter(0))
    upcoming = next(decisions, None)
    is_left = np.zeros(results[0].decisions, dtype=bool)
    is_left[np.asarray(StoredRows(steps[-1].rows, results[-1].kept).numbers)] = True
    for number, identity, source, where, reason, note in read_lines(
        steps[0].decisions, results[0].decisions
    ):
        told = []
        if reason:
            told.append(_told(steps[0].name, reason == "renamed", reason, note))
        while upcoming is not None and upcoming[0] == number:
            told.append(upcoming[1])
            upcoming = next(decisions, None)
        yield _story(identity, source, where, told, bool(is_left[number]))


def _labelled(name: str, path: Path, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, identity, kept, reason, note in read_lines(path, count):
        yield number, {**_told(name, kept, reason, note), "id": identity}


def _told(stage: str, kept: bool, reason: str, note: str) -> dict[str, Any]:
    return {"stage": stage, "kept": kept, "reason": reason, "note": note}


def _story(
    identity: str, source: str, where: str, told: Sequence[Mapping[str, Any]], is_left: bool
) -> dict[str, Any]:
    """A line of the provenance.

    Args:
        identity: the id of the row when it was read.
        source: label of its source.
        where: its place.
        told: decisions about it, in order.
        is_left: whether the data set has the row, under this id or another one.
    """
    last = None if is_left else next(one for one in reversed(told) if not one["kept"])
    fate = "kept" if last is None else "held" if last["reason"].startswith("held") else "dropped"
    ended = {} if last is None else {key: last[key] for key in ("stage", "reason", "note")}
    decisions = [
        {key: value for key, value in one.items() if key != "id" or value != identity}
        for one in told
    ]
    story = {"id": identity, "source": source, "where": where, "fate": fate, **ended}
    return {**story, "decisions": decisions}


class WrittenRows:
    """The rows of a finished data set. Each iteration reads them anew.

    Args:
        out: folder of the data set.

    Raises:
        UserError: it holds no finished data set.
    """

    def __init__(self, out: Path) -> None:
        summary = _summary(out)
        self._path = out / f"train.{summary['settings']['format']}"
        self._count: int = summary["stages"][-1]["kept"]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        for read in unread_rows(self._path):
            row = read()
            yield record_of(row.number, row.where, row.fields)


def _summary(out: Path) -> dict[str, Any]:
    """The summary of a finished data set."""
    try:
        found: dict[str, Any] = json.loads((out / SUMMARY).read_text())
    except FileNotFoundError as error:
        raise UserError(f"{out} holds no finished data set: run `sixfold data` first") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{out / SUMMARY} is damaged ({error}): run `sixfold data` again"
        ) from error
    return found


def explain(out: Path, identity: str) -> dict[str, Any]:
    """The line of a row in the provenance of a finished data set.

    Args:
        out: folder of the data set.
        identity: the row's id when it was read, or one that a stage gave it or a copy of it.

    Raises:
        UserError: there is no such row, or no finished data set.
    """
    path = out / PROVENANCE
    _summary(out)
    named = json_text({"id": identity})[1:-1].encode()
    for line in packed_lines(path):
        if named in line:  # perhaps in a text that a note quotes
            story: dict[str, Any] = json.loads(line)
            if identity in (story["id"], *(one.get("id") for one in story["decisions"])):
                return story
    ids = [json.loads(line)["id"] for line in islice(packed_lines(path), 3)]
    raise UserError(f"{path} has no row {identity!r}. Ids look like {', '.join(ids)}")
