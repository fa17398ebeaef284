"""Classes of answers that a comparison of texts gets wrong, each with right and similar wrong
answers. Also hostile answers.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sixfold.checks.limits import OutOfTime, blame_answer, cpu_limit, on_blame
from sixfold.types import Task
from sixfold_environments.maths import algebra
from sixfold_environments.maths.algebra import BadReference
from sixfold_environments.maths.answers import math_grade, math_strict_grade
from sixfold_environments.maths.constants import same_value

CLASSES: dict[str, dict[str, list[list[str]]]] = json.loads(
    (Path(__file__).parents[2] / "data" / "answer_classes.json").read_text()
)


def reward(completion: str, gold: str, prompt: str = "") -> float:
    return float(math_grade(completion, Task(id="t", prompt=prompt, answer=gold)).value or 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_right_answers_are_accepted(name: str) -> None:
    assert [case for case in CLASSES[name]["right"] if reward(*case) != 1.0] == []


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", CLASSES)
def test_wrong_answers_that_look_alike_are_refused(name: str) -> None:
    assert [case for case in CLASSES[name]["wrong"] if reward(*case) != 0.0] == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("C. Paris", 1.0),
        (r"\textbf{(C) } Paris", 1.0),
        ("C. London", 0.0),
        ("B. Paris", 0.0),
        ("(C) Paris or (B) London", 0.0),
    ],
)
def test_the_text_of_an_option_must_be_that_of_the_question(answer: str, expected: float) -> None:
    prompt = "What is the capital of France?\n(A) Rome\n(B) London\n(C) Paris"
    assert reward(rf"\boxed{{{answer}}}", "C", prompt) == expected


def test_money_and_times_of_the_question_are_no_echo_but_expressions_are() -> None:
    assert (
        reward(r"\boxed{\$5}", "5", r"Is it \$5 or \$6?")
        == reward(r"\boxed{3:30 PM}", "15:30", "At 3:30 PM or at 4?")
        == 1.0
    )
    assert reward(r"\boxed{\frac{6}{3}}", "2", r"Simplify $\frac{6}{3}$") == 0.0


@pytest.mark.mostly_slow(6)
@pytest.mark.parametrize("gold", ["5", "x+1", r"\{1,2\}", "2<x<5"])
@pytest.mark.parametrize(
    "answer",
    [r"\binom{e}{999}", r"\exp(\cot(\arcsin(0)))", r"\frac{1}{\sin(\pi)}", r"\tan(\frac{\pi}{2})",
    r"\log(0)", r"\ln(\ln(1))", r"\binom{x}{999}",
     r"999^{999}", r"\sqrt[999]{999}", r"\binom{999}{500}", r"i!", r"\csc\sinh10^{9}",
     "(1,2)" + r"\cup (1,2)" * 40, "\\{" + "9," * 49 + "9\\}"],
)  # fmt: skip
def test_an_answer_that_the_cas_fails_on_is_wrong(answer: str, gold: str) -> None:
    start = time.process_time()
    assert reward(rf"\boxed{{{answer}}}", gold) == 0.0
    assert time.process_time() - start < 3.0


LONG = [
    (r"\sqrt{", 300, "5", "}"), ("(", 5000, "5", ")"), (r"\frac{", 500, "1}{2", "}"),
    ("1", 100_000, "", ""), ("0.", 1, "3" * 100_000, ""), ("x+", 5000, "x", ""),
    ("-", 20_000, "5", ""), ("", 20_000, "5", "!"), (r"\text{", 2000, "5", "}"), ("|", 2001, "",
    ""),
    (" ", 300_000, "6", ""), ("\u200b", 100_000, "1", ""), ("½", 50_000, "", ""),
    (r"\,", 100_000, "", ""), ("1&", 3000, "1", ""), ("1,", 5000, "1", ""), ("1=", 3000, "6", ""),
    (r"[1,2]\cup", 2000, "[1,2]", ""), (r"x=1\text{ or }", 2000, "x=2", ""), ("1:", 30_000, "", ""),
    (r"\%", 50_000, "", ""), ("$", 50_000, "", ""), (r"\log(", 40, "5", ")"), ("1/", 3000, "1", ""),
    ("(A)", 5000, "", ""), ("3:30", 10_000, "", ""), ("3rd", 20_000, "", ""), (r"\circ", 20_000,
    "5", ""),
    ("x>", 10_000, "", ""), ("|x|<", 5000, "", ""), ("(x+1)*", 500, "1", ""), (r"\{", 3000, "",
    r"\}"),
]  # fmt: skip


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("strict", [False, True])
def test_answers_that_are_long_or_deep_are_refused_at_once(strict: bool) -> None:
    grade = math_strict_grade if strict else math_grade
    for opening, times, inside, closing in LONG:
        answer = opening * times + inside + closing * times
        start = time.process_time()
        assert grade(rf"\boxed{{{answer}}}", Task("t", "", answer="5")).value == 0.0, opening
        assert time.process_time() - start < 0.5, opening


ATOMS = [
    "0",
    "9",
    "999",
    "e",
    "x",
    "i",
    r"\pi",
    r"\infty",
    "10^{9}",
    "0.5",
    "٣",
    "²",
    "½",
    "𝟗",
    "1e999",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "",
    "3:30",
    "€",
]
FUNCTIONS = [r"\sin", r"\tan", r"\cot", r"\ln", r"\exp", r"\arcsin", r"\arctan", r"\sinh"]
FORMS = [
    r"\frac{%s}{%s}",
    r"\binom{%s}{%s}",
    "%s^{%s}",
    r"\sqrt[%s]{%s}",
    "%s+%s",
    "%s,%s",
    "(%s)!%s",
    r"\{%s,%s\}",
    "|%s|%s",
    r"x<%s \text{ or } x>%s",
    "{%s%s",
    "%s=%s",
]


def hostile(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(ATOMS)
    if rng.random() < 0.3:
        return f"{rng.choice(FUNCTIONS)}({hostile(rng, depth - 1)})"
    return (
        rng.choice(FORMS)
        % (hostile(rng, depth - 1), hostile(rng, depth - 1))
        * rng.choice((1, 1, 1, 8))
    )


@pytest.mark.slow
def test_no_hostile_answer_raises_or_takes_long_or_much_memory() -> None:
    rng = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = 0.0
    for _ in range(120):
        answer, gold = (
            hostile(rng, rng.randrange(6)),
            rng.choice(("5", "x+1", r"\frac{\pi}{3}", "(1,2)", "x>3", "C", "3:30 PM", "i")),
        )
        start = time.process_time()
        reward(rf"\boxed{{{answer}}}", gold)
        slowest = max(slowest, time.process_time() - start)
    assert slowest < 2.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_reference_that_the_cas_fails_on_is_a_failure_of_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(latex: str) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(algebra, "_parsed", fails)
    algebra._parsed_gold.cache_clear()
    with pytest.raises(BadReference, match="x\\+7"):
        reward(r"\boxed{x+8}", "x+7")


def test_an_answer_that_never_ends_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    reward(r"\boxed{x+1}", "x+9")

    def spins(answer: Any, gold: Any) -> bool:
        while True:
            with suppress(Exception):  # as a library would
                sum(range(100))

    monkeypatch.setattr(algebra, "_equal", spins)
    monkeypatch.setattr(algebra.Budget, "seconds", 0.1)
    assert reward(r"\boxed{x+2}", "x+9") == 0.0


@pytest.mark.slow
def test_time_limit_ends_and_leaves_no_timer() -> None:
    with pytest.raises(OutOfTime), cpu_limit(0.05):
        while True:
            pass
    with cpu_limit(5.0):
        pass
    start = time.process_time()
    while time.process_time() - start < 0.1:
        pass


@pytest.mark.slow
def test_time_of_other_threads_does_not_count() -> None:
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()  # without the lock of the interpreter

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    try:
        with cpu_limit(0.4):
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                sum(range(1000))
        with pytest.raises(OutOfTime), cpu_limit(0.05):
            while True:
                sum(range(1000))
    finally:
        done.set()
        for worker in workers:
            worker.join()


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_collection_spends_the_time_of_a_check(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError), cpu_limit(5.0):
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_blame_reaches_the_caller() -> None:
    told: list[int] = []
    on_blame(lambda: told.append(1))
    try:
        reward(r"\boxed{7}", "8")
        assert told == []
        reward(r"\boxed{x+3}", "x+4")
        assert told == [1]
        blame_answer()
    finally:
        on_blame(lambda: None)
    assert told == [1, 1]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("exp(I*pi)", "-1", True), ("cos(pi/5)", "(1+sqrt(5))/4", True),
        ("sin(pi/12)", "(sqrt(6)-sqrt(2))/4", True), ("sqrt(2)**2", "2", True),
        ("5*exp(I*atan(Rational(4, 3)))", "3+4*I", True), ("1/(sqrt(2)-sqrt(2))", "1", False),
        ("tan(pi/2)", "1", False),
        ("pi", "314159265358979323846264338327950288419716939937510/10**50", False),
        ("(-1)**Rational(1, 2)", "I", True), ("x", "1", None),
        ("exp(10**7)", "exp(10**7)", False), ("floor(pi)", "3", None), ("log(8, 2)", "3", True),
        ("factorial(5)", "120", True),
    ],
)  # fmt: skip
def test_values_of_constants(left: str, right: str, expected: bool | None) -> None:
    import sympy

    with sympy.evaluate(False):
        names = {
            name: getattr(sympy, name)
            for name in (
                "exp",
                "pi",
                "I",
                "cos",
                "sin",
                "tan",
                "atan",
                "sqrt",
                "log",
                "factorial",
                "floor",
                "Rational",
            )
        }
        a, b = (sympy.parse_expr(text, local_dict=names, evaluate=False) for text in (left, right))
    assert same_value(a, b) is expected
