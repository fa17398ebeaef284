"""Properties of every lab in the catalogue: it runs, is deterministic, breaks where it says."""

from __future__ import annotations

import importlib
import math
from functools import cache

import pytest

from sixfold.pages.lab import Bars, Chart, Lab, Outcome, Timeline
from sixfold_labs.catalogue import LABS, find

NAMES = sorted(LABS)
SLOW = {"dpo-policy", "gradient-noise", "process-reward", "signal-density"}
"""Labs whose largest settings take long."""
ENDS = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES]


@cache
def usual(name: str) -> Outcome:
    return find(name)()


@pytest.mark.parametrize("name", NAMES)
def test_lab_fails_under_its_breaking_controls_only(name: str) -> None:
    lab = find(name)
    breaking = lab.breaking
    assert breaking.failed(lab(**breaking.breaks))
    assert not breaking.failed(lab(**breaking.safe))


@pytest.mark.parametrize("name", NAMES)
def test_equal_controls_give_equal_outcomes(name: str) -> None:
    assert find(name)() == usual(name)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_finite_and_tables_are_rectangular(name: str) -> None:
    outcome = usual(name)
    for value in outcome.values.values():
        for number in value if isinstance(value, list) else [value]:
            assert not isinstance(number, float) or math.isfinite(number)
    for table in outcome.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in outcome.figures:
        if isinstance(figure, Chart):
            assert all(curve.points for curve in figure.curves)
        elif isinstance(figure, Bars):
            assert len(figure.labels) == len(figure.values)
        else:
            assert isinstance(figure, Timeline)
            assert all(span.end >= span.start for span in figure.spans)


@pytest.mark.parametrize("name", NAMES)
def test_controls_are_documented_and_their_defaults_valid(name: str) -> None:
    lab = find(name)
    assert lab.name == name
    assert lab.title
    assert lab.about
    names = [control.name for control in lab.controls]
    assert len(set(names)) == len(names)
    for control in lab.controls:
        assert control.help
        assert control.check(control.default) == control.default
        assert all(control.check(value) == value for value in control.swept())
        if control.numeric:
            assert math.isfinite(control.low)
            assert math.isfinite(control.high)


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_every_range_run(name: str) -> None:
    lab = find(name)
    for control in lab.controls:
        for value in control.swept()[:1] + control.swept()[-1:]:
            assert lab(**{control.name: value}).values


def test_every_module_lists_its_labs_in_the_catalogue() -> None:
    listed: list[str] = []
    for module in sorted(set(LABS.values())):
        labs: tuple[Lab, ...] = importlib.import_module(f"sixfold_labs.{module}").LABS
        listed += [lab.name for lab in labs]
    assert sorted(listed) == NAMES
