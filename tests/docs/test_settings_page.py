"""The pages that repeat what the code says are equal to it: settings, the table of algorithms, and
where their parts are.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import sixfold
from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.kl import KL
from sixfold.algorithm.method import ADVANTAGES, LOSSES
from sixfold.algorithm.zoo import ZOO
from sixfold.commands.algorithms import markdown_table
from sixfold.recipe.knobs import knobs

DOCS = Path(__file__).parents[2] / "docs"
ALGORITHMS = DOCS / "algorithms"
PACKAGE = Path(sixfold.__file__).parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choices(setting: str) -> tuple[str, ...]:
    """Values that a setting of [algorithm] accepts."""
    return knobs()[f"algorithm.{setting}"].choices


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row; an escaped bar is no border."""
    lines = [
        line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_settings_page_is_the_schema() -> None:
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert page == load("make_settings").page(), (
        "run: python docs/make_settings.py > docs/settings.md"
    )
    keys = [row[0].strip("`") for row in table_rows(page) if row[0] != "key"]
    assert keys == list(knobs())
    assert all(len(row) == 4 for row in table_rows(page))


def test_the_page_of_preference_losses_is_their_rows() -> None:
    page = (DOCS / "preference_losses.md").read_text(encoding="utf-8")
    assert page == load("make_preference_losses").page(), (
        "run: python docs/make_preference_losses.py > docs/preference_losses.md"
    )


def test_the_table_of_algorithms_is_the_one_that_the_command_prints() -> None:
    page = (ALGORITHMS / "README.md").read_text(encoding="utf-8")
    assert f"\n{markdown_table(list(ZOO.values()))}\n" in page, (
        "copy the output of: sixfold algorithms --format markdown"
    )


PARTS: dict[str, set[str]] = {
    "Advantages": set(ADVANTAGES),
    "Token losses": set(LOSSES),
    "Aggregation": set(AGGREGATIONS),
    "KL": {*choices("kl"), "kl_target"},
    "Entropy": {*choices("entropy_rule"), "entropy_bonus", "entropy_target"} - {"none"},
    "Correction": {*choices("correction")} - {"none"},
    "Shaping": {*choices("length_penalty"), "overlong_buffer", "whiten"} - {"none"},
}
"""Section of the page -> the choices that it must have a row for."""


@pytest.mark.parametrize("section", PARTS)
def test_every_part_has_its_row_and_is_where_the_row_says(section: str) -> None:
    page = (ALGORITHMS / "README.md").read_text(encoding="utf-8")
    rows = table_rows(page.partition(f"\n## {section}\n")[2].partition("\n## ")[0])[1:]
    assert sorted(row[0].strip("`") for row in rows) == sorted(PARTS[section])
    for row in rows:
        if section == "Aggregation":
            assert AGGREGATIONS[row[0].strip("`")].__name__ == row[-1].strip("`")
            continue
        places = re.findall(r"((?:`\w+`, )*`\w+`) in `([\w/.]+)`", row[-1])
        assert places, row
        for names, file in places:
            tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
            defined = {
                node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            }
            assert {name.strip("`") for name in names.split(", ")} <= defined, row


def test_every_estimator_of_the_kl_has_its_row() -> None:
    listed = {
        row[0].strip("`") for row in table_rows((ALGORITHMS / "kl.md").read_text(encoding="utf-8"))
    } - {"name"}
    assert listed == set(choices("kl")) == {*KL, "k3-unbiased"}
