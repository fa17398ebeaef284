"""Controls, settings and the catalogue: what is accepted, and what the errors say."""

from __future__ import annotations

import math

import pytest

from sixfold.errors import UserError
from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Setting
from sixfold_labs.catalogue import LABS, find

NUMBER = Control("learning_rate", 0.5, "rate", low=0.0, high=1.0, step=0.1)
COUNT = Control("count", 4, "number", low=1, high=100)
SWITCH = Control("mask", True, "switch")
CHOICE = Control("kind", "mean", "kind", choices=("mean", "sum"))
TEXT = Control("response", "12", "text")


def twice(*, count: int, mask: bool) -> Outcome:
    return Outcome({"twice": 2 * count if mask else None})


LAB = Lab(
    "twice", "title", "about", (COUNT, SWITCH), twice, Breaking({}, {}, "why", lambda outcome: True)
)


@pytest.mark.parametrize(
    ("control", "text", "value"),
    [
        (NUMBER, "0.25", 0.25),
        (NUMBER, "1", 1.0),
        (COUNT, "100", 100),
        (SWITCH, "off", False),
        (SWITCH, "TRUE", True),
        (CHOICE, "sum", "sum"),
        (TEXT, "on", "on"),
    ],
)
def test_a_control_reads_its_own_type(control: Control, text: str, value: Setting) -> None:
    parsed = control.parse(text)
    assert parsed == value
    assert type(parsed) is type(control.default)


@pytest.mark.parametrize(
    ("control", "text", "remedy"),
    [
        (NUMBER, "1.01", "0 to 1"),
        (NUMBER, "nan", "0 to 1"),
        (NUMBER, "inf", "0 to 1"),
        (NUMBER, "half", "0 to 1"),
        (COUNT, "0", "an integer, 1 to 100"),
        (COUNT, "2.5", "an integer, 1 to 100"),
        (COUNT, "1" * 6000, "an integer, 1 to 100"),
        (SWITCH, "maybe", "on or off"),
        (CHOICE, "men", "Did you mean 'mean'"),
        (CHOICE, "max", "mean or sum"),
    ],
)
def test_a_wrong_value_names_the_control_and_the_valid_values(
    control: Control, text: str, remedy: str
) -> None:
    with pytest.raises(UserError) as error:
        control.parse(text)
    assert control.option in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("value", [True, 1.0, "4", None, math.nan])
def test_a_python_value_of_another_type_is_refused(value: Setting) -> None:
    with pytest.raises(UserError, match="--count"):
        LAB(count=value)


def test_controls_that_are_not_given_have_their_defaults() -> None:
    assert LAB().values == {"twice": 8}
    assert LAB(count=50).values == {"twice": 100}
    assert LAB.settings({"mask": False}) == {"count": 4, "mask": False}


def test_an_unknown_control_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'count'"):
        LAB(cuont=3)


def test_an_unknown_lab_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'bandit'"):
        find("bandti")


def test_the_sweep_of_a_number_is_a_short_grid_with_both_ends_and_the_default() -> None:
    swept = COUNT.swept()
    assert len(swept) <= 27
    assert (swept[0], swept[-1]) == (1, 100)
    assert 4 in swept
    assert list(swept) == sorted(set(swept))
    assert NUMBER.swept() == tuple(i / 10 for i in range(11))
    assert SWITCH.swept() == (False, True)
    assert CHOICE.swept() == ("mean", "sum")


def test_a_value_that_is_not_a_number_is_not_read_as_one() -> None:
    with pytest.raises(TypeError, match="twice"):
        LAB(mask=False).number("twice")


def test_names_of_labs_are_those_of_the_command_line() -> None:
    assert all(name == name.lower() and "_" not in name for name in LABS)
