"""The page of a lab: self-contained, escaped, with the outcomes of all combinations of controls."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import random
import re
import zlib
from typing import Any

import pytest

from sixfold.pages.combinations import Combinations, Part, Words, combined
from sixfold.pages.lab import Control, Lab, Outcome, Setting, Table
from sixfold.pages.page import ControlPage, _positions, _spread, _values, page_of, render_controls
from sixfold.pages.text import shown
from sixfold_labs.catalogue import LABS, find


def render(lab: Lab, settings: dict[str, Setting]) -> str:
    return render_controls(page_of(lab), settings)


def page(name: str, **given: Any) -> str:
    lab = find(name)
    return render(lab, lab.settings(given))


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="data">(.*?)</script>', text, re.S)
    assert found
    parsed: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return parsed


def held_values(held: dict[str, Any], places: tuple[int, ...]) -> list[str]:
    """Values that the page shows at these positions of its controls."""
    (part,) = held["parts"]
    at = 0
    for control, place in zip(held["controls"], places, strict=True):
        at = at * len(control["shown"]) + place
    return [text for _, text in held["outcomes"][part["found"][at]]["values"]]


def test_the_page_holds_the_outcome_and_the_command_of_every_combination() -> None:
    lab = find("grpo-rloo")
    given = lab.settings({"k": 5, "accuracy": 0.45})
    held = data(render(lab, given))
    names = ["k", "accuracy", "seed"]
    assert [c["shown"][c["at"]] for c in held["controls"]] == ["5", "0.45", "0"]
    ranges = [range(len(control["shown"])) for control in held["controls"]]
    states = list(itertools.product(*ranges))
    assert len(held["parts"][0]["found"]) == len(states) > 1000
    for places in random.Random(1).sample(states, 40):
        texts = [c["shown"][at] for c, at in zip(held["controls"], places, strict=True)]
        values = {n: lab.control(n).parse(t) for n, t in zip(names, texts, strict=True)}
        expected = lab(**values).values.values()
        assert held_values(held, places) == [shown(value) for value in expected]
        words = ["sixfold lab grpo-rloo"]
        defaults = {"k": "4", "accuracy": "0.5", "seed": "0"}
        words += [f"--{n} {t}" for n, t in zip(names, texts, strict=True) if t != defaults[n]]
        said = [
            held["texts"][part["found"][places[part["controls"][0]] if part["controls"] else 0]]
            for part in held["words"]
        ]
        assert " ".join(text for text in said if text) == " ".join(words)


@pytest.mark.parametrize("name", sorted(LABS))
def test_combinations_are_bounded_and_positions_keep_both_ends_and_the_given_value(
    name: str,
) -> None:
    lab = find(name)
    rng = random.Random(name)
    given = lab.settings({c.name: rng.choice(c.swept()) for c in lab.controls if c.swept()})
    shown_page = page_of(lab)
    positions = _positions(shown_page, given)
    assert math.prod(len(values) for _, values in positions) <= max(shown_page.most, 16384)
    for control, values in positions:
        every = _values(control, given)
        assert given[control.name] in values and set(values) <= set(every)
        assert values == sorted(values, key=every.index)
        if control.numeric and len(values) > 2:
            assert {values[0], values[-1]} == {every[0], every[-1]}
        elif not control.numeric:
            assert values == every


def test_a_given_value_between_the_positions_replaces_the_nearest_one() -> None:
    assert _spread([0, 1, 2, 3, 4, 5, 6, 7, 8], 3, 4) == [0, 4, 8]
    assert _spread([0, 1, 2, 3, 4, 5, 6, 7, 8], 3, 7) == [0, 7, 8]
    assert _spread([0, 1, 2, 3, 4, 5, 6, 7, 8], 3, 8) == [0, 4, 8]
    assert _spread([0, 1, 2, 3, 4, 5, 6, 7, 8], 2, 5) == [0, 5]
    assert _spread([0, 1, 2], 5, 1) == [0, 1, 2]


@pytest.mark.nightly
def test_numbers_are_shown_with_their_units() -> None:
    text = " ".join(page("weight-sync", network=100.0).split())
    for label in ("70 billion</output>", "100 GB/s</output>", "60 s</output>"):
        assert label in text
    assert "40 %</output>" in " ".join(page("signal-density", policy=40).split())


@pytest.mark.nightly
def test_the_page_says_that_the_controls_combine_and_gives_the_general_command() -> None:
    text = " ".join(page("rollouts").split())
    assert "The controls combine" in text
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
    assert any("alert(1)" in words for words in data(text)["texts"])


def test_the_first_outcome_is_in_the_page_without_scripts() -> None:
    text = page("length-bias")
    for cell in ("GRPO", "0.05", "0.0025", "Dr. GRPO"):
        assert f"<td>{cell}</td>" in text


@pytest.mark.nightly
def test_curves_are_thinned_but_keep_their_ends() -> None:
    held = data(page("kl-anchor", steps=1000))
    charts = [f for o in held["outcomes"] for f in o["figures"] if f["kind"] == "chart"]
    curves = [chart["curves"][0]["points"] for chart in charts]
    assert max(map(len, curves)) <= 121
    assert (1, 1000) in {(points[0][0], points[-1][0]) for points in curves}


def test_controls_outside_the_sweep_are_not_moved() -> None:
    assert "source" in [control.name for control in find("grpo-group").controls]
    assert len(data(page("grpo-group"))["controls"]) == 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["dapo-ablation", pytest.param("gradient-noise", marks=pytest.mark.slow), "grpo-rloo"]
)
def test_the_page_is_of_moderate_size(name: str) -> None:
    text = page(name)
    assert data(text)["outcomes"][0]["values"]
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
    page = ControlPage("n", "t", "x", controls, every, "lab C", ("end", "."), 9)
    text = render_controls(page, {"c": 2})
    assert "The controls combine" in text and "One control moves" not in text
    assert "c is 2" in text and "c is 3" not in text  # other outcomes are packed
