"""The script of pages with controls, run by Node.js: it shows what Python computes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sixfold.pages.lab import Outcome, Setting
from sixfold.pages.page import _positions, page_of, render_controls
from sixfold.pages.text import shown
from sixfold_labs.catalogue import find
from sixfold_planning.hardware import parse_cluster
from sixfold_planning.page.html import plan_page
from sixfold_planning.page.question import PlanQuestion

NODE = shutil.which("node")
HARNESS = Path(__file__).with_name("page_in_node.js")

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")


def visited(page: str, moves: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """What a page shows at first, and after each move (control, number of the value)."""
    assert NODE is not None
    held = re.search(r'<script type="([^"]*)" id="data">(.*?)</script>', page, re.S)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert held
    given = {"type": held[1], "data": held[2], "script": script, "moves": moves}
    done = subprocess.run(
        [NODE, str(HARNESS)], input=json.dumps(given), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(seen) == 1 + len(moves)
    return seen


def check(seen: dict[str, Any], expected: Outcome, command: str) -> None:
    """What is shown is the outcome, cell by cell."""
    assert seen["command"] == command
    assert seen["values"] == [
        [name.replace("_", " "), shown(value)] for name, value in expected.values.items()
    ]
    assert seen["tables"] == [
        [table.title, [[shown(cell) for cell in row] for row in table.rows]]
        for table in expected.tables
    ]
    assert seen["lines"] == list(expected.lines)
    assert [text for text in seen["figures"] if text] == [f.title for f in expected.figures]


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize(
    ("target", "gpus", "steps"), [("gsm8k", "1xL4", 60), ("70B", "8xH100", 30)]
)
def test_sliders_of_a_plan_combine(target: str, gpus: str, steps: int) -> None:
    asked = PlanQuestion(target, [], parse_cluster(gpus), "", None, 0.5, 0.8)
    page = plan_page(asked)
    values = [
        [*control.swept()] if control.choices else sorted({*control.swept(), control.default})
        for control in page.controls
    ]
    random = Random(1)
    moved = [random.randrange(len(values)) for _ in range(steps)]
    moves = [(control, random.randrange(len(values[control]))) for control in moved]
    first, *later = visited(render_controls(page, asked.settings), moves)
    settings: dict[str, Setting] = dict(asked.settings)
    check(first, page.found.run(**settings), page.found.command(settings))
    for (control, index), seen in zip(moves, later, strict=True):
        settings[page.controls[control].name] = values[control][index]
        check(seen, page.found.run(**settings), page.found.command(settings))
    changed = [name for name, value in settings.items() if value != asked.settings[name]]
    assert len(changed) > 3


@pytest.mark.parametrize("name", ["length-bias", "grpo-rloo", "framework-selector"])
def test_controls_of_a_lab_combine(name: str) -> None:
    lab = find(name)
    page, random = page_of(lab), Random(2)
    settings = lab.settings({})
    moving = [(control, values) for control, values in _positions(page, settings) if values[1:]]
    moved = [random.randrange(len(moving)) for _ in range(20)]
    moves = [(place, random.randrange(len(moving[place][1]))) for place in moved]
    first, *later = visited(render_controls(page, settings), moves)
    check(first, lab(**settings), page.found.command(settings))
    for (place, index), seen in zip(moves, later, strict=True):
        control, values = moving[place]
        settings[control.name] = values[index]
        check(seen, lab(**settings), page.found.command(settings))
    assert len([n for n, value in settings.items() if value != lab.settings({})[n]]) > 1
