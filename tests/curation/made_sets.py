"""Recipes, sources and a stage for the tests of data sets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from sixfold.cli import main
from sixfold_curation.stage import Context, Decision, Health, Rows, Stage

KILLED = 137
STAGE = """
from sixfold_curation.stage import Decision, Health, Stage

class Exact(Stage):
    kind = "exact"
    lower: bool = False
    words: tuple[str, ...] = ()
    file: str = ""

    def decide(self, rows, context):
        seen = {}
        for row in rows:
            key = row.prompt.lower() if self.lower else row.prompt
            first = seen.setdefault(key, row.id)
            same = first != row.id
            yield Decision(row, not same, "duplicate" * same, f"same as {first}" * same)
        share = 1 - len(seen) / max(1, len(rows))
        return Health("share of duplicates", share, "many duplicates" if share > 0.5 else "")
"""


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_text(path: object, label: str = "made", **more: Any) -> str:
    """A table [[sources]]."""
    values = {"label": label, "data": str(path), "origin": "human", "licence": "mit"} | more
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join(["[[sources]]", *lines]) + "\n"


def write_recipe(folder: Path, *sources: str, stages: str = "", head: str = "") -> Path:
    """A recipe whose output is FOLDER/out."""
    path = folder / "set.toml"
    path.write_text(f'name = "made"\nout = "{folder}/out"\n{head}\n{"".join(sources)}\n{stages}')
    return path


def exact_stage(folder: Path, **settings: Any) -> str:
    """The table of a stage of a user's file."""
    path = folder / "own_stage.py"
    path.write_text(STAGE)
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(["[[stages]]", f'kind = "{path}:Exact"', 'name = "exact"', *lines]) + "\n"


def curate(recipe: Path, *arguments: str) -> int:
    return main(["data", str(recipe), *arguments])


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def provenance(out: Path) -> list[dict[str, Any]]:
    data = (out / "provenance.jsonl.zst").read_bytes()
    text = zstandard.ZstdDecompressor().decompressobj().decompress(data).decode()
    return [json.loads(line) for line in text.splitlines()]


def output_bytes(out: Path) -> dict[str, bytes]:
    """Every file of a data set, but for its work."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def killed_at(point: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked child that dies at its point-th fault point. False if it ended."""
    pid = os.fork()
    if pid == 0:
        os.environ["SIXFOLD_FAULT"] = f"curation.:{point}"
        code = action()
        os._exit(int(bool(code)))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


class Halved(Stage):
    """Keeps every second row, marks the others as held."""

    kind = "halved"

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        for at, row in enumerate(rows):
            yield Decision(row, at % 2 == 0, "held_odd" if at % 2 else "")
        return Health("share of rows", 0.5, figures={"table": [{"a": 1, "b": float("nan")}]})


def told(story: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one["stage"], one["reason"]) for one in story["decisions"]]
