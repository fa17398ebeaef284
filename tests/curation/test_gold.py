"""Stage `gold`: answers that contradict their own row are found, and other forms of one are not."""

from __future__ import annotations

import pytest
from rows_of_curation import record

from sixfold_curation.gold import Gold
from sixfold_curation.stage import Decision, Health, decided

OPTIONS = "Which is prime?\n(A) 4\n(B) 7\n(C) 9\n(D) 15"
WRONG = {
    ("How many?", "N/A", ""): "placeholder",
    ("How many?", "(See the solution.)", ""): "placeholder",
    ("How many?", "?", ""): "placeholder",
    ("What is 17 + 25?", "43", ""): "wrong_sum",
    (r"Calculate $3 \times (4 - 10)$.", "-12", ""): "wrong_sum",
    ("Compute 2^10 - 1,000 = ? Show each step.", "25", ""): "wrong_sum",
    ("10 / 4 =", "2.4", ""): "wrong_sum",
    ("What is 2^13?", "8", ""): "wrong_sum",
    (OPTIONS, "E", ""): "no_such_option",
    (OPTIONS, r"\boxed{F}", ""): "no_such_option",
    (OPTIONS, "B", "9 is not prime, so the answer is (A)."): "solution_differs",
    ("How many?", "13", r"So there are \boxed{12} of them."): "solution_differs",
    ("How many?", "1,200", "He has 3 bags.\n#### 1300"): "solution_differs",
    ("Find x.", r"\frac{1}{3}", r"Hence $x = \boxed{\frac{1}{2}}$."): "solution_differs",
    ("How many?", "7 apples", "First 3 come, then 5: 3 + 5 = 8 apples."): "solution_differs",
    ("How many?", "25", "It is 48/2=<<48/2=25>>25.\n#### 25"): "false_calculation",
    ("How many?", "8", "It is <<2^13=8>>8.\n#### 8"): "false_calculation",
    ("How many?", "98", "Each has 12 * 8 = 98 seeds.\n#### 98"): "false_calculation",
}
RIGHT = [
    ("What is 17 + 25?", "42.0", ""),
    ("Compute 2^10 - 1,000 = ? Show each step.", "24", ""),
    ("What is 10 / 3?", "3.33", ""),
    ("What is 10 / 3? Round down to an integer.", "3", ""),
    ("What is 17 + 25 modulo 8?", "2", ""),
    ("What is 1 / 4?", "25%", ""),
    ("What is 1 / 2?", ".5", ""),
    ("How much?", "0.5", r"It is <<1/4=.25>>.25, and \boxed{.50}."),
    ("What is 2^13 - 4 * 3^2?", "8156", ""),
    ("How many?", "8192", "It is <<2^13=8192>>8192.\n#### 8192"),
    ("What is 5² + 3?", "28", ""),
    ("What is 10⁻² * 3½?", "0.035", ""),
    ("How many?", "25", "3² + 4² = 25\n#### 25"),
    ("How many?", "4", "3 4/5 + 1/5 = 4, √16 + 9 = 13, and 20% of 50 + 10 = 20.\n#### 4"),
    ("How many?", "4", r"Then $5000 + 5000 = 10\,000$, 3,5 + 1 = 4,5 and \log 100 + 1 = 3. #### 4"),
    ("When?", "2", "It ends at 11 + 3 = 2 PM.\n#### 2"),
    ("What is its domain?", "(-∞, ∞)", ""),
    ("What is the limit?", "-∞", ""),
    ("What is the symbol of sodium?", "Na", ""),
    ("What is 3 + 4 apples?", "12", ""),
    (OPTIONS, "B", "The answer is (B) 7."),
    (OPTIONS, "7", "The answer is B."),
    ("Vitamin A or B? The letter C.", "D", ""),
    ("How many?", "$1,200", r"\boxed{1200.00}"),
    ("How long?", "2 hours", "The answer is 120 minutes."),
    ("What share?", "0.25", r"\boxed{25\%}"),
    ("Find x.", "x = 5", r"Hence \boxed{5}."),
    ("Find x.", r"2\pi", r"It is $\boxed{6.28}$."),
    ("Find both.", "3, 5", r"\boxed{3} and \boxed{5}"),
    ("How many?", "72 clips", "In all 48+24 = <<48+24=72>>72 clips.\n#### 72"),
    ("How much?", "3.33", "Each gets 10 / 3 = 3.33 dollars.\n#### 3.33"),
    ("How many?", "9", "So x + 3 + 4 = 12, 3 + 4 = 7 + 2 = 9, 2*3 = 6x. The answer is 9."),
    ("What time?", "3", "On a clock, 7 + 8 = 3 (mod 12).\n#### 3"),
    ("In base 2?", "1000", "In binary 101 + 11 = 1000.\n#### 1000"),
    ("How many?", "20", "It is 2 + 3 * 4 + 6 = 20, or 50% - 30 = 20.\n#### 20"),
    ("Which symbol stands for sodium?", "Na", ""),
    ("Which sign?", "-", ""),
    ("What does it print?", "null", ""),
    ("Prove it.", "", "Let n = 1. Then 1 + 1 = 2."),
    ("Say it.", "Paris", "The answer is the city of Paris."),
]


def judged(rows: list[tuple[str, str, str]]) -> tuple[list[Decision], Health]:
    records = [
        record(at, prompt, answer, {"solution": solution} if solution else {})
        for at, (prompt, answer, solution) in enumerate(rows)
    ]
    return decided(Gold(), records)


def test_answers_that_contradict_their_row_are_named() -> None:
    decisions, health = judged([*WRONG])
    assert {case: d.reason for case, d in zip(WRONG, decisions, strict=True)} == WRONG
    assert not any(d.kept for d in decisions) and all(d.note for d in decisions)
    assert health.value == 1.0 and "5 wrong_sum" in health.alarm
    assert health.figures["rows checked"] == len(WRONG)


def test_other_forms_of_an_answer_are_kept() -> None:
    decisions, health = judged(RIGHT)
    assert [(RIGHT[d.record.number], d.note) for d in decisions if not d.kept] == []
    assert (health.value, health.alarm) == (0.0, "")
    assert 0 < health.figures["rows checked"] < len(RIGHT)


@pytest.mark.parametrize(
    "prompt",
    [
        "9^9^9^9 + 1",
        "(((((9^40)^40)^40)^40)^40)",
        "(" * 150 + "1 + 1",
        "1 / 0",
        "1" * 150 + "+ 1",
        "1 + " * 20_000,  # minutes, if every end of a sum is tried from every start
    ],
)
def test_hostile_arithmetic_ends(prompt: str) -> None:
    decisions, _ = judged([(prompt, "2", f"{prompt} = 5 <<{prompt}=5>>")])
    assert len(decisions) == 1
