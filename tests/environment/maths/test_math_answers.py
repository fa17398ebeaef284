"""The maths verifier on adversarial cases, and on pairs of answers that are equal or different."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sixfold.types import Task
from sixfold_environments.maths import algebra
from sixfold_environments.maths.answers import math_boxed_grade, math_grade, math_strict_grade
from sixfold_environments.maths.extraction import Policy, final_answer

CASES = json.loads((Path(__file__).parents[2] / "data" / "verifier_math.json").read_text())

# The cases assume that an answer without a box earns nothing. Sixfold also accepts "the answer is
# X" if there is no box, because models trained on GSM8K write no boxes.
OTHER_POLICY = {"math-110": 1.0}


def reward(completion: str, gold: str, prompt: str = "") -> float:
    return float(math_grade(completion, Task(id="t", prompt=prompt, answer=gold)).value or 0.0)


@pytest.fixture(scope="module", autouse=True)
def _cas_is_imported() -> None:
    reward(r"\boxed{\sqrt{2}}", r"\sqrt{3}")


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    start = time.process_time()
    assert reward(case["completion"], case["gold"], case["prompt"]) == OTHER_POLICY.get(
        case["id"], case["expected_reward"]
    ), case["why"]
    assert time.process_time() - start < 2.0


EQUAL = [
    ("1/2", r"\frac{1}{2}"), ("0.5", r"\frac12"), ("1.5e3", "1500"), ("5=x", "5"),
    ("f(x)=2x+1", "2x+1"), ("１２", "12"), ("٥", "5"),
    ("3½", "7/2"), ("5²", "25"), ("2π", r"2\pi"), (r"5\,000", "5000"), ("1,000", "1000"),
    (r"1{,}234{,}567.5", "1234567.5"), ("007", "7"),
    ("18 dollars", "18"), (r"\$18", "18 dollars"), (r"7\text{ apples}", "7"),
    ("5 cm", r"5\text{ centimeters}"), (r"5\text{ cm}^2", r"5\text{ cm}^2"),
    ("5", r"5\text{ cm}"), (r"90^\circ", "90"), (r"50\%", "50"), ("50", r"50\%"), ("0.5", r"50\%"),
    (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}"),
    ("2,1", "1,2"), ("x=1,x=-3", r"\{1,-3\}"), (r"\frac{1}{2}, \frac{1}{3}", "0.5, 1/3"),
    ("1, 2", "(1,2)"), (r"3,-3", r"\pm 3"),
    (r"\left(-\infty, 2\right]", r"(-\infty,2]"), ("[0,1]", r"0\le x\le 1"), ("Yes", r"\text{yes}"),
    ("C.", "C"), (r"\textbf{(C)}", "(C)"),
    ("(x+1)^2", "x^2+2x+1"), (r"\log_2 8", "3"), ("5!", "120"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt{7+4\sqrt{3}}", r"2+\sqrt{3}"),
    (r"\text{5}", "5"), (r"\emptyset", r"\varnothing"), (r"e^{-\frac{x^2}{2}}", "e^{-x^2/2}"),
    (r"1 \frac{1}{2}", "1.5"),
    # full-width and other Unicode signs
    ("－５", "-5"), ("x＞3", "x>3"), ("x⩽3", r"x \le 3"), ("x≧3", r"x \ge 3"),
    ("x =< 3", r"x\le 3"),
    ("x != 2", r"x \ne 2"), ("（1，2）", "(1,2)"), ("1、2", "1,2"), ("C。", "C"), ("５０％", "50%"),
    ("A∩B", r"A \cap B"), ("p → q", r"p \to q"), (r"p \rightarrow q", r"p\to q"),
    # signs that are part of an answer
    ("{1, 2}", r"\{1,2\}"), ("1, 2", "{1, 2}"), ("*A*", "A"), ("**5**", "5"), ("5**", "5"),
    ("A*", "A*"), ("x'", "x'"), (r"x^{\prime}", "x'"), ("5'", "5 ft"), ('5"', "5 inches"),
    ("A^T", "A^T"), ("B+", "B+"), ("C++", "C++"), ("f'(x)=2x", "2x"),
]  # fmt: skip
DIFFERENT = [
    # whitespace, groups
    ("1 2", "12"), (r"1\ 2", "12"), ("12", "1 2"), ("1 2", "3"), ("5 000", "5000"),
    ("10,00", "1000"), ("1,0,0,0", "1000"),
    ("0.333333", r"\frac{1}{3}"), ("0.3333333333333333", "1/3"), (r"\frac{22}{7}", r"\pi"),
    ("3.14159265358979323846", r"\pi"),
    # approximations
    (r"\pi", "3.14159265"), ("1.41421356237309", r"\sqrt{2}"), (r"0.49", r"50\%"),
    (r"0.5\%", "0.5"),
    # units
    (r"5\text{ m}", r"5\text{ cm}"), (r"5\text{ cm}^2", r"5\text{ cm}"), ("5 million", "5"),
    ("5x", "5"), ("5 xy", "5"),
    # order, brackets, repeats
    ("(1,2)", "(2,1)"), ("(5,3)", "(2,1)"), ("(1,2]", "[1,2)"), ("(1,2)", r"\{1,2\}"),
    ("1,0,0,1", "0,1"),
    ("7 or 8", "7"), (r"\pm 3", "3"), ("no", "yes"), ("c", "C"), ("5²", "52"), ("-5", "5"),
    (r"x\ge 3", r"(3,\infty)"), ("42!", "42"),
    ("x^2+2x+2", "x^2+2x+1"), ("y=5", "x=5"), (r"\infty", "5"), (r"\text{two}", "2"),
    ("lEvelyn", "Evelyn"),
    # signs that are part of an answer
    ("(1, 2)", "{1, 2}"), ("{1, 2}", "(1,2)"), ("A", "A*"), ("A*", "A"), ("A", "A'"), ("x'", "x"),
    ("f(x)", "f'(x)"), ("5'", '5"'), ("A", "~A"), ("A", "A^T"), ("A^T", "A"), ("B+", "B"),
    (r"\text{B}", r"\text{B}^+"), (r"\text{B}^+", r"\text{B}"), ("A-", "A+"), ("A", "A+"),
    ("C", "C++"), ("C#", "C"), ("x<3", "x>3"), ("x<3", r"x\le 3"), (r"q \to p", r"p \to q"),
    (r"20^\circ F", r"20^\circ C"), ("5!", "5"),
    (r"\int_0^1 2x\,dx", "1"), (r"\lim_{x\to 0} \frac{\sin x}{x}", "1"),  # not worked out
]  # fmt: skip


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal_answers(answer: str, gold: str) -> None:
    assert reward(rf"so \boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different_answers(answer: str, gold: str) -> None:
    assert reward(rf"so \boxed{{{answer}}}.", gold) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is 42.", " 42"), ("Answer: 3.5 apples.\nDone", "3.5 apples"),
        ("#### 18", "18"), ("the answer is 1, no, the answer is 2", "2"),
        (r"\boxed{1} or \boxed{2} or \fbox{3}", "3"), (r"\boxed{1 + \boxed{2}}", "2"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{7} and \boxed{8", "7"), (r"the answer is \boxed{7", None),
        (r"\boxed{\{1,\{2\}\}}", r"\{1,\{2\}\}"), (r"\boxed {5}", "5"),
        ("42", None), ("<think>the answer is 7", None), ("the answer is 7</think>", None),
        (r"</think>\boxed{7}", "7"),
        (r"\boxed{1}<think>\boxed{2}", None),
    ],
)  # fmt: skip
def test_extraction(completion: str, answer: str | None) -> None:
    found = final_answer(completion).answer
    assert (found.strip() if found else found) == (answer.strip() if answer else answer)


@pytest.mark.parametrize("rest", [r"\boxed{", r"\boxed{6", r"\fbox {\frac{1}{2}", r"\boxed{5"])
def test_a_box_that_stays_open_after_a_complete_one(rest: str) -> None:
    """math-verify reads the complete one; Minerva, lm-eval and verl give 0."""
    text, task = rf"\boxed{{5}} then {rest}", Task("t", "2+3?", answer="5")
    assert math_grade(text, task).value == math_boxed_grade(text, task).value == 1.0
    assert math_strict_grade(text, task).value == 0.0
    assert "does not close" in final_answer(text, Policy(one_answer=True)).problem
    for complete in (
        r"{ \boxed{5}",
        r"\boxed{5} {x",
        r"\boxed{x \boxed{5}",
        r"\boxed{5}, in a \boxed",
    ):
        assert math_strict_grade(complete, task).value == 1.0


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    "unit", ["{", r"\boxed{", r"\boxed ", "}", "answer ", "answer is", "\\", "####", "</think>"]
)
def test_extraction_is_linear(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    start = time.process_time()
    final_answer(text)
    final_answer(text + "}" * 100_000)
    final_answer(" " * 200_000 + text)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("answer", "gold", "prompt", "expected"),
    [
        (r"17 \times 23", "391", r"Compute $17\cdot 23$", 0),
        (r"\frac{6}{3}", "2", r"Simplify $\frac{6}{3}$", 0),
        ("1/2", r"\frac{1}{2}", "Which is more, 1/2 or 1/3?", 1),
        ("7", "7", "Which is more, 5 or 7?", 1),
        (r"\text{Anna}", "Anna", "Who is right, Anna or Bob?", 1),
        ("x+1", "x+1", "Which is linear, x+1 or x^2?", 1),
    ],
)
def test_an_echo_of_the_question_earns_nothing_unless_it_is_the_answer(
    answer: str, gold: str, prompt: str, expected: float
) -> None:
    assert reward(rf"\boxed{{{answer}}}", gold, prompt) == expected


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    "answer",
    ["((9^9)^9)^9", "10^{10^{10}}", "2^{99999999}", "9!!!!!!", r"\binom{1000000}{500000}",
    "1e999999999", r"e^{e^{e^{e^{e}}}}",
     r"\exp(" * 9 + "1" + ")" * 9,
     r"\sin" * 9 + "1", "|" * 40 + "x" + "|" * 40, "(x+1)^{999}", "(999!)^{999}",
     r"\frac{1}{1+" * 9 + "x" + "}" * 9],
)  # fmt: skip
def test_answers_made_to_hang_the_cas(answer: str) -> None:
    start = time.process_time()
    assert reward(rf"\boxed{{{answer}}}", "5") == reward(rf"\boxed{{{answer}}}", "x+1") == 0.0
    assert time.process_time() - start < 2.0


def test_text_that_is_no_formula_never_reaches_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "_parsed", lambda latex: pytest.fail(f"parsed {latex!r}"))
    for text in (
        "__import__('os')",
        r"\input{/etc/passwd}",
        "S(1).evalf",
        r"\write18{id}",
        "1" * 401,
        r"\csname x\endcsname",
    ):
        assert not algebra.equal_by_algebra(text, "x")


def test_gold_may_be_a_number_or_carry_its_own_box() -> None:
    assert math_grade(r"\boxed{0.1}", Task(id="t", prompt="", answer=0.1)).value == 1.0
    assert math_grade(r"\boxed{12}", Task(id="t", prompt="", answer=12)).value == 1.0
    assert reward(r"\boxed{12}", r"so $\boxed{12}$") == 1.0


@pytest.mark.parametrize(
    ("completion", "math", "boxed", "strict"),
    [
        ("The answer is 12.", 1, 0, 0), ("<answer>12</answer>", 1, 0, 0), (r"\boxed{12}", 1, 1, 1),
        (r"\boxed{11}, no: \boxed{12}", 1, 1, 0), (r"\boxed{12} so \boxed{12}", 1, 1, 1),
        (r"\boxed{١٢}", 1, 1, 0), (r"\boxed{１２}", 1, 1, 0), (r"\boxed{13}", 0, 0, 0),
        (r"<think>\boxed{11}</think>\boxed{12}", 1, 1, 1), (r"\boxed{12}<|im_end|>", 0, 0, 0),
    ],
)  # fmt: skip
def test_three_forms_differ_in_what_they_take_for_the_answer(
    completion: str, math: int, boxed: int, strict: int
) -> None:
    task = Task(id="t", prompt="", answer="12")
    grades = (f(completion, task) for f in (math_grade, math_boxed_grade, math_strict_grade))
    assert [grade.value for grade in grades] == [math, boxed, strict]


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (r"\boxed{12}", "passed"), (r"\boxed{13}", "wrong_answer"), ("<think>12", "rejected"),
        ("", "rejected"), (r"\boxed{12", "rejected"), (r"\boxed{12 \text{ or } 13}", "rejected"),
        (r"\boxed{3 \cdot 4}", "rejected"), (r"\boxed{4\cdot 3}", "rejected"),
        (r"\boxed{12}<|im_start|>user", "rejected"), ("\\boxed{12} \U000e0049", "rejected"),
        (r"\boxed{" + "1" * 3000 + "}", "wrong_answer"), (r"\boxed{9^{9^{9}}}", "wrong_answer"),
    ],
)  # fmt: skip
def test_verdicts(completion: str, verdict: str) -> None:
    task = Task(id="t", prompt=r"Compute $3 \cdot 4$.", answer="12")
    assert math_grade(completion, task).verdict == verdict


def test_a_comparison_that_takes_too_long_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reward(r"\boxed{x+1}", "x+11")
    monkeypatch.setattr(algebra.Budget, "seconds", 0.0)
    assert math_grade(r"\boxed{11+x}", Task("t", "", answer="x+11")).verdict == "timeout"


def test_a_task_without_answer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="task 't' has no reference answer"):
        math_grade(r"\boxed{1}", Task(id="t", prompt=""))


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("The answer is：42。", "42"), ("The answer is 42。Done", "42"), ("Answer：（C）", "C"),
        ("The answer is ４２！ I am sure", "42"), ("Answer: 42，because 6 × 7", "42"),
        ("＃＃＃＃ 42", "42"), ("so #### -5", "-5"), ("#### -$5", "-5"), ("#### −1,234", "-1234"),
        ("The answer is 3．5", "3.5"),
    ],
)  # fmt: skip
def test_full_width_marks_state_an_answer(completion: str, gold: str) -> None:
    assert reward(completion, gold) == 1.0


@pytest.mark.parametrize(
    ("option", "beside"),
    [("15", "1.5"), ("[1,2]", "(1,2)"), ("C#", "C"), ("巴黎", "伦敦"), (r"x \le 3", "x < 3")],
)
def test_the_text_beside_an_option_is_compared_with_its_signs(option: str, beside: str) -> None:
    question = f"Which?\n(A) none\n(B) all\n(C) {option}"
    assert reward(rf"\boxed{{C. {option}}}", "C", question) == 1.0
    assert reward(rf"\boxed{{C. {beside}}}", "C", question) == 0.0
