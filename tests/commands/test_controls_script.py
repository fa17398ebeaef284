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

from sixfold.commands.plan_page import plan_page
from sixfold.commands.plan_question import PlanQuestion
from sixfold.labs.catalogue import find
from sixfold.labs.lab import Outcome, Setting
from sixfold.labs.page import page_of, render_controls
from sixfold.labs.text import shown
from sixfold.planning.hardware import parse_cluster

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
    check(first, page.run(**settings), page.command(settings))
    for (control, index), seen in zip(moves, later, strict=True):
        settings[page.controls[control].name] = values[control][index]
        check(seen, page.run(**settings), page.command(settings))
    changed = [name for name, value in settings.items() if value != asked.settings[name]]
    assert len(changed) > 3


def test_a_control_of_a_lab_sets_the_others_back() -> None:
    lab = find("kl-anchor")
    given = lab.settings({"beta": 0.2, "steps": 100})
    page = page_of(lab)
    moving = [control for control in lab.controls if len(control.swept()) > 1]
    moves = [(place, 0) for place in range(len(moving))]
    first, *later = visited(render_controls(page, given), moves)
    check(first, lab(**given), page.command(given))
    for control, seen in zip(moving, later, strict=True):
        settings = given | {control.name: control.swept()[0]}
        check(seen, lab(**settings), page.command(settings))
