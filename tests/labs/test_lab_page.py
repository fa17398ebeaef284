"""The page of a lab: self-contained, escaped, and with the outcomes of one control at a time."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from typing import Any

import pytest

from sixfold.labs.catalogue import find
from sixfold.labs.combinations import Combinations, Part, Words, combined
from sixfold.labs.lab import Control, Lab, Outcome, Setting, Table
from sixfold.labs.page import ControlPage, page_of, render_controls
from sixfold.labs.text import shown, written


def render(lab: Lab, settings: dict[str, Setting]) -> str:
    return render_controls(page_of(lab), settings)


def page(name: str, **given: Any) -> str:
    lab = find(name)
    return render(lab, lab.settings(given))


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    parsed: dict[str, Any] = json.loads(found[1])
    return parsed


def test_every_control_has_its_sweep_with_the_others_as_given() -> None:
    lab = find("kl-anchor")
    given = lab.settings({"beta": 0.2, "steps": 100})
    held = data(render(lab, given))
    moving = dict(zip(["beta", "eta", "steps"], held["controls"], strict=True))
    assert held["command"] == "sixfold lab kl-anchor --beta 0.2 --steps 100"
    for name, control in moving.items():
        assert control["shown"][control["at"]] == written(given[name])
        assert control["outcomes"][control["at"]] is None
        for text, outcome in zip(control["shown"], control["outcomes"], strict=True):
            value = type(lab.control(name).default)(float(text))
            expected = lab(**{**given, name: value}).values
            held_values = (outcome or held["usual"])["values"]
            assert [text for _, text in held_values] == [shown(v) for v in expected.values()]


def test_each_state_names_the_command_that_computes_it() -> None:
    lab = find("rollouts")
    held = data(page("rollouts", temperature=0.5))
    k = held["controls"][0]
    last = k["commands"][-1].split()
    assert last[:3] == ["sixfold", "lab", "rollouts"]
    options = dict(zip(last[3::2], last[4::2], strict=True))
    settings = {o.strip("-"): lab.control(o.strip("-")).parse(v) for o, v in options.items()}
    assert settings == {"k": 16, "temperature": 0.5}
    expected = [shown(value) for value in lab(**settings).values.values()]
    assert [text for _, text in k["outcomes"][-1]["values"]] == expected


def test_the_page_says_that_one_control_moves_at_a_time_and_gives_the_general_command() -> None:
    text = " ".join(page("rollouts").split())
    assert "One control moves at a time" in text
    assert "sixfold lab rollouts --k VALUE --temperature VALUE --seed VALUE" in text


@pytest.mark.parametrize("name", ["rollouts", "verifier", "controller", "loss-assembly"])
def test_the_page_runs_only_its_own_script_and_loads_nothing(name: str) -> None:
    text = page(name)
    policy = html.unescape(re.search(r'Security-Policy"\s+content="([^"]*)"', text)[1])  # type: ignore[index]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|fetch\(|import\(", text)


def test_text_of_the_user_cannot_leave_its_place() -> None:
    hostile = "</script><script>alert(1)</script>\u202e12"
    text = page("verifier", response=hostile)
    assert "<script>alert" not in text
    assert "\u202e" not in text
    assert len(re.findall(r"<script", text)) == 2
    assert "alert(1)" in data(text)["command"]


def test_the_first_outcome_is_in_the_page_without_scripts() -> None:
    text = page("length-bias")
    for cell in ("GRPO", "0.05", "0.0025", "Dr. GRPO"):
        assert f"<td>{cell}</td>" in text


def test_curves_are_thinned_but_keep_their_ends() -> None:
    held = data(page("kl-anchor", steps=1000))
    chart = next(f for f in held["usual"]["figures"] if f["kind"] == "chart")
    points = chart["curves"][0]["points"]
    assert len(points) <= 121
    assert (points[0][0], points[-1][0]) == (1, 1000)


def test_controls_outside_the_sweep_are_not_moved() -> None:
    assert "source" in [control.name for control in find("grpo-group").controls]
    assert len(data(page("grpo-group"))["controls"]) == 4


@pytest.mark.parametrize(
    "name", ["dapo-ablation", pytest.param("gradient-noise", marks=pytest.mark.slow), "grpo-rloo"]
)
def test_the_page_is_of_moderate_size(name: str) -> None:
    text = page(name)
    assert data(text)["usual"]["values"]
    assert len(text) < 1_500_000


def halves(*, a: int, b: int) -> Outcome:
    return Outcome({"product": a * b}, tables=(Table("Parity", ("of",), [[a * b % 2]]),))


def last(*, c: int) -> Outcome:
    return Outcome({"last": c}, tables=(Table("Parity", ("of",), [[c % 2]]),), lines=(f"c is {c}",))


def test_parts_are_held_for_combinations_of_their_own_controls() -> None:
    moving = [(Control(name, 2, name, low=1, high=3), (1, 2, 3)) for name in ("a", "b", "c")]
    words = (
        Words((), lambda: "lab"),
        Words(("b",), lambda b: f"--b {b}" if b != 2 else ""),
        Words(("a", "c"), lambda a, c: f"{a}/{c}"),
    )
    page = Combinations((Part(("a", "b"), halves), Part(("c",), last)), words)
    held: Any = combined(page, moving, {"a": 2, "b": 2, "c": 2}, lambda found: dict(found.values))
    first, second = held["parts"]
    assert (first["controls"], second["controls"]) == ([0, 1], [2])
    # The last control varies fastest; 1 x 2 and 2 x 1 are held once.
    products = [held["outcomes"][place]["product"] for place in first["found"]]
    assert products == [1, 2, 3, 2, 4, 6, 3, 6, 9]
    assert len(held["outcomes"]) == 6 + 3
    assert [part["controls"] for part in held["words"]] == [[], [1], [0, 2]]
    assert [held["texts"][place] for place in held["words"][1]["found"]] == ["--b 1", "", "--b 3"]

    outcome = page.run(a=3, b=1, c=2)
    assert outcome.values == {"product": 3, "last": 2} and outcome.lines == ("c is 2",)
    assert [(table.title, table.rows) for table in outcome.tables] == [("Parity", [[1], [0]])]
    assert page.command({"a": 3, "b": 2, "c": 1}) == "lab 3/1"


def test_the_page_says_that_controls_combine() -> None:
    controls = (Control("c", 2, "c", low=1, high=3),)
    every = Combinations((Part(("c",), last),), (Words(("c",), lambda c: f"lab {c}"),))
    page = ControlPage(
        "n", "t", "x", controls, every.run, every.command, "lab C", ("end", "."), every
    )
    text = render_controls(page, {"c": 2})
    assert "The controls combine" in text and "One control moves" not in text
    assert "c is 2" in text and "c is 3" not in text  # other outcomes are packed
