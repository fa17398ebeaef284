"""Answers that votes count as equal, and those that they count as different."""

from __future__ import annotations

import pytest

from sixfold_environments.maths.stated import answer_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,234", "1234.0"),
        ("12,345,678", "12345678"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("5.10", "5.1"),
        ("3/8", " 3/8."),
    ],
)
def test_forms_of_one_answer_are_equal(one: str, other: str) -> None:
    assert answer_of(rf"\boxed{{{one}}}") == answer_of(one) == answer_of(other)


@pytest.mark.parametrize(
    "forms",
    [
        (r"\frac{1}{2}", "0.5", "1/2", r"\dfrac12", "$0.50$", r"\tfrac{2}{4}"),
        ("C", "(C)", r"\text{C}", "C. Paris", r"\textbf{(C)}", "Option C"),
        ("x + 1", "X + 1", "$x + 1$", "x+1"),
        ("(2, 3)", "(2,3)", "( 2 , 3 )"),
    ],
)
def test_ways_to_write_one_answer_are_equal(forms: tuple[str, ...]) -> None:
    assert len({answer_of(rf"\boxed{{{form}}}") for form in forms}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("C", "D"),
        ("(C)", "C+"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("1,2", "12"),
        ("1, 234", "1234"),
        ("x 1", "x1"),
        ("1,23", "123"),
        ("3/8", "8"),
        ("1" * 30 + "1", "1" * 30 + "2"),
        ("1e1000000", "1e2000000"),  # beyond the exponents of decimal
    ],
)
def test_different_answers_are_different(one: str, other: str) -> None:
    assert answer_of(rf"\boxed{{{one}}}") != answer_of(rf"\boxed{{{other}}}")
