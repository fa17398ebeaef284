"""The pages that repeat what the code says are equal to it: settings, and the table of algorithms."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.kl import KL
from sixfold.algorithm.zoo import ZOO
from sixfold.recipe_io import knobs

DOCS = Path(__file__).parents[2] / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row; an escaped bar is no border."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_settings_page_is_the_schema() -> None:
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert page == load("make_settings").page(), "run: python docs/make_settings.py > docs/settings.md"
    keys = [row[0].strip("`") for row in table_rows(page) if row[0] != "key"]
    assert keys == list(knobs())
    assert all(len(row) == 4 for row in table_rows(page))


def test_the_table_of_algorithms_is_table_py() -> None:
    rows = table_rows((DOCS / "algorithms" / "README.md").read_text(encoding="utf-8"))
    listed = {re.sub(r"\[(\w+)\]\(.*\)", r"\1", row[0]): row[1:] for row in rows if len(row) == 9 and row[0] != "name"}
    expected = {
        a.name: ["yes" if a.group_baseline else "no", _clip(a.clip_low), _clip(a.clip_high), f"{a.beta:g}", a.kl, a.kl_in, a.aggregation, a.paper]
        for a in ZOO.values()
    }
    assert listed == expected
    for name in ZOO:
        assert (DOCS / "algorithms" / f"{name}.md").is_file()


def test_every_aggregation_and_every_estimator_has_its_row() -> None:
    listed = {row[0].strip("`") for row in table_rows((DOCS / "algorithms" / "README.md").read_text(encoding="utf-8"))}
    assert listed >= set(AGGREGATIONS)
    assert {row[0].strip("`") for row in table_rows((DOCS / "algorithms" / "kl.md").read_text(encoding="utf-8"))} >= set(KL)


def _clip(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
