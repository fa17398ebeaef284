r"""Rewards for mathematics: 1 if the final answer of a completion equals the task's, otherwise 0.

`extraction` finds the answer, `spelling` gives it one spelling. `numbers`, `units`, `choices`,
`times`, `intervals` and `equations` handle what is not algebra. `algebra` asks the CAS about the
rest.

Invariants: no answer makes the check fail: an answer that raises, or takes too long, is wrong. An
equivalent answer earns 1 (1/2, 0.5 and \frac{1}{2} are equal). An approximation of an exact gold
earns 0, a restatement of the question earns 0, and text of the model is never executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from sixfold.checks.limits import OutOfTime
from sixfold.environment.grade import Grade, right_or_wrong
from sixfold.types import Task

from ..text.marks import forged_turn, hidden_message
from .algebra import Budget, equal_by_algebra
from .choices import same_choice
from .echoes import echoes
from .equations import is_name, split_at, stated_value
from .extraction import Policy, final_answer, last_box
from .intervals import region, same_region
from .numbers import exact_number, number_in_base
from .spelling import normalise
from .times import same_time
from .units import Quantity, ordinal, quantity, same_size, same_unit

MAX_ANSWER_CHARACTERS = 2000
MAX_PARTS = 50

_SET = "\\{\\}"
_MEMBER = re.compile(r"\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"(?=.{3})[A-Za-z]+(?:[ '-][A-Za-z]+)*|[A-J]|[Nn][Oo]")
_GAP = re.compile(r"(?<=\d) (?=[A-Za-z\\(])|(?<=[^\w\s]) | (?=[^\w\s])")
"""Spaces without a meaning: beside a sign, or between a number and its unit."""
_RATIO = re.compile(r"\d+(?:\.\d+)?\s*:\s*\d+(?:\.\d+)?")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\lor(?![A-Za-z])|(?<![A-Za-z\\])or(?![A-Za-z])")
_BASE = re.compile(r"\bbase\b|binary|octal|hexadecimal|ternary|\d_", re.IGNORECASE)
_RATIO_IN_WORDS = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*(?=\d)")
_NO_SOLUTION = re.compile(
    r"\\emptyset|\\\{\s*\\\}"
    r"|(?:\\text\s*\{\s*)?(?:there (?:is|are) )?(?:the empty set|empty set|none"
    r"|no (?:real |integer )?(?:solutions?|roots?|such \w+)(?: exists?)?)\s*\}?\.?",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"(?<![A-Za-z])(?:or|maybe|possibly|perhaps|either|probably)(?![A-Za-z])|\\l?vee|\\lor|\?",
    re.IGNORECASE,
)


def math_grade(completion: str, task: Task) -> Grade:
    """1 if the final answer of `completion` equals `task.answer`, otherwise 0.

    The answer is in the last box; without a box, in answer tags or after "the answer is".
    An answer that cannot be checked within the limits earns 0. Most answers are decided as text
    or as exact numbers. The rest goes to a CAS, with limits on what it computes.

    Raises:
        ValueError: for a task without an answer.
        BadReference: if the CAS fails on the task's answer.
    """
    return _grade(completion, task, Policy())


def math_boxed_grade(completion: str, task: Task) -> Grade:
    """As `math_grade`, but only a box has the answer."""
    return _grade(completion, task, Policy(box_required=True))


def math_strict_grade(completion: str, task: Task) -> Grade:
    """The strictest form, to measure held-out answers by.

    As `math_boxed_grade`, but all boxes must have the same content, and digits must be ASCII.
    """
    return _grade(completion, task, Policy(box_required=True, one_answer=True, ascii_digits=True))


def _grade(completion: str, task: Task, policy: Policy) -> Grade:
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no reference answer")
    gold = normalise(last_box(str(task.answer)) or str(task.answer))
    if forged := forged_turn(completion):
        return Grade(0.0, "rejected", f"the completion spells {forged}")
    if hidden_message(completion):
        return Grade(0.0, "rejected", "the completion has invisible characters that spell a text")
    try:
        found = final_answer(completion, policy)
        if found.answer is None:
            return Grade(0.0, "rejected", found.problem)
        if len(found.answer) > MAX_ANSWER_CHARACTERS:
            return Grade(0.0, "wrong_answer", f"over {MAX_ANSWER_CHARACTERS} characters")
        return _compare(normalise(found.answer), gold, task.prompt_text)
    except OutOfTime:
        return Grade(0.0, "timeout", "the comparison took too long")
    except (
        ArithmeticError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        return Grade(0.0, "wrong_answer", f"cannot be compared: {type(error).__name__}")


def _compare(answer: str, gold: str, prompt: str) -> Grade:
    if answer == gold or not answer or not gold:
        return right_or_wrong(answer == gold and bool(gold))
    number, wanted = exact_number(answer), exact_number(gold)
    if number is not None and wanted is not None and number != wanted:  # most wrong answers
        return right_or_wrong(False)
    chosen = same_choice(answer, gold, prompt)
    if chosen is not None:
        return right_or_wrong(chosen)
    if number_in_base(answer) and not number_in_base(gold) and not _BASE.search(prompt):
        return right_or_wrong(False)  # 12_3 is five
    if echoes(answer, gold, prompt):
        return Grade(0.0, "rejected", "repeats the question instead of working it out")
    if number is not None and wanted is not None:
        return right_or_wrong(True)
    if _equivalent(answer, gold, Budget(), normalise(prompt) if "=" in answer else ""):
        return right_or_wrong(True)
    if _list_parts(gold) is None and (_SEVERAL.search(answer) or _list_parts(answer)):
        return Grade(0.0, "rejected", "several answers, or an answer in doubt")
    return right_or_wrong(False)


def _equivalent(answer: str, gold: str, budget: Budget, prompt: str = "") -> bool:
    """True if two normalised answers are equal as text, lists, quantities, or by algebra."""
    if answer == gold or _GAP.sub("", answer) == _GAP.sub("", gold):
        return True
    for same in (
        same_time(answer, gold),
        _same_ordinal(answer, gold),
        _same_base(answer, gold),
        same_region(answer, gold, partial(_equivalent, budget=budget)),
        same_matrix(answer, gold, partial(_equivalent, budget=budget)),
        _same_emptiness(answer, gold),
    ):
        if same is not None:
            return same
    if _RATIO.fullmatch(gold):
        answer = _RATIO_IN_WORDS.sub(":", answer)
    if "=" in answer or "=" in gold:
        return _same_equations(answer, gold, budget, prompt)
    return _same_values(answer, gold, budget)


def _same_equations(answer: str, gold: str, budget: Budget, prompt: str) -> bool:
    """True if two answers are equal, of which at least one has an equation."""
    given, wanted = stated_value(answer, prompt), stated_value(gold)
    if given and "=" not in gold:
        wanted_value = gold
    elif given and wanted and given.name.replace(" ", "") == wanted.name.replace(" ", ""):
        wanted_value = wanted.value
    elif wanted and "=" not in answer and is_name(wanted.name):
        return _same_values(answer, wanted.value, budget)
    else:
        return _same_values(answer, gold, budget)
    return _same_values(given.value, wanted_value, budget) and all(
        _equivalent(other, given.value, budget) for other in given.others
    )


def _same_values(answer: str, gold: str, budget: Budget) -> bool:
    """True if two answers are equal as words, lists, quantities, or by algebra."""
    answer, gold = _without_member(answer, gold)
    gold_words = _words(gold)
    if gold_words is not None:
        return _words(answer) == gold_words
    answer_parts, gold_parts = _list_parts(answer), _list_parts(gold)
    if answer_parts and gold_parts:
        return _same_lists(answer_parts, gold_parts, budget)
    if answer_parts and not answer_parts[0] and region(gold) is not None:
        return False  # the endpoints of an interval are not the interval
    return _same_measure(quantity(answer), quantity(gold), budget)


def _same_base(answer: str, gold: str) -> bool | None:
    """True if both are the same number in the same base. None if none names a base.

    A number without a base is read in the other's.
    """
    left, right = number_in_base(answer), number_in_base(gold)
    if left is None and right is None:
        return None
    left = left or number_in_base(f"{answer}_{{{right[1]}}}" if right else "")
    right = right or number_in_base(f"{gold}_{{{left[1]}}}" if left else "")
    return left is not None and left == right


def _same_emptiness(answer: str, gold: str) -> bool | None:
    """True if both say that nothing solves the problem. None if the reference does not."""
    if not _NO_SOLUTION.fullmatch(gold):
        return None
    return _NO_SOLUTION.fullmatch(_MEMBER.sub("", answer)) is not None


def _same_ordinal(answer: str, gold: str) -> bool | None:
    """True if both are the same ordinal, as words or digits.

    None if one of them is not an ordinal.
    """
    left, right = ordinal(answer, words=True), ordinal(gold, words=True)
    return None if left is None or right is None else left == right


def _same_measure(answer: Quantity, gold: Quantity, budget: Budget) -> bool:
    """True if two numbers or expressions with units are equal.

    Degrees, cents, and the units of `sizes` are converted.
    """
    units = {answer.unit, gold.unit}
    if units == {"$", "¢"} and answer.value is not None and gold.value is not None:
        return answer.value * (100 if answer.unit == "$" else 1) == gold.value * (
            100 if gold.unit == "$" else 1
        )
    if units == {"°", "rad"} or (
        "°" in units and "" in units and "\\pi" in answer.body + gold.body
    ):
        return equal_by_algebra(_in_radians(answer), _in_radians(gold), budget)
    if answer.unit and gold.unit and not same_unit(answer.unit, gold.unit):
        return same_size(answer, gold)
    if answer.value is not None and gold.value is not None:
        return _same_quantity(answer, gold)
    if "%" in units:
        return answer.unit == gold.unit and equal_by_algebra(answer.body, gold.body, budget)
    return equal_by_algebra(answer.body, gold.body, budget)


def _in_radians(angle: Quantity) -> str:
    return rf"\frac{{{angle.body}}}{{180}}\pi" if angle.unit == "°" else angle.body


def _same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """True if the values are equal.

    If only one side is a percentage, it equals the hundredth (50% = 0.5). It also equals the bare
    number, as in 50 for 50%, but only above 1: 0.5% is not the ratio 0.5.
    """
    assert answer.value is not None and gold.value is not None
    if (answer.unit == "%") == (gold.unit == "%"):
        return answer.value == gold.value
    percentage, bare = (
        (answer.value, gold.value) if answer.unit == "%" else (gold.value, answer.value)
    )
    return percentage == bare * 100 or (percentage == bare and abs(bare) > 1)


def _without_member(answer: str, gold: str) -> tuple[str, str]:
    r"""Both sides, without `x \in` if only one of them has it."""
    if bool(_MEMBER.match(answer)) != bool(_MEMBER.match(gold)):
        return _MEMBER.sub("", answer), _MEMBER.sub("", gold)
    return answer, gold


def _words(text: str) -> str | None:
    r"""The words of an answer that is a name or an option (`\text{Evelyn}`, `(C)`), or None.

    The case of letters counts only for options.
    """
    text, wrapped = _TEXT.subn(r"\1", text)
    text = " ".join(text.split()).rstrip(".")
    option = re.fullmatch(r"\(\s*([A-Za-z])\s*\)", text)
    if option:
        return option[1]
    if not _WORDS.fullmatch(text) and not (wrapped and re.fullmatch(r"[A-Za-z][A-Za-z '-]*", text)):
        return None
    return text.casefold() if len(text) > 1 else text


def _list_parts(text: str) -> tuple[str, list[str]] | None:
    """Split an enumeration: ("()", ["1", "2"]) for (1,2), ("", [...]) without brackets.

    None if there is no comma at the top level.
    """
    kind, inside = "", text
    for opening, closings in (("(", ")]"), ("[", ")]"), ("\\{", ("\\}",))):
        for closing in closings:
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and len(text) > len(opening + closing)
            ):
                kind, inside = opening + closing, text[len(opening) : -len(closing)]
    if _unbalanced(inside):  # the outer brackets are not a pair: (1,2) \cup (3,4)
        return None
    alternatives = _OR.split(inside)
    if len(alternatives) > 1 and all("=" in part for part in alternatives):
        return "", [part.strip() for part in alternatives]  # x = 1 or x = 2
    separator = "," if len(split_at(inside, ",")) > 1 else ";"
    parts = [both for part in split_at(inside, separator) for both in _both_signs(part.strip())]
    if kind == _SET and not inside.strip():
        return None
    is_list = (len(parts) > 1 and exact_number(inside) is None) or kind == _SET
    return (kind, parts) if is_list and "\\begin" not in text else None


def _unbalanced(text: str) -> bool:
    """True if a bracket closes that did not open."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return True
    return False


def _both_signs(part: str) -> list[str]:
    r"""`1+\sqrt2` and `1-\sqrt2` for `1\pm\sqrt2`."""
    if part.count("\\pm") != 1:
        return [part]
    return [part.replace("\\pm", sign).strip().removeprefix("+") for sign in "+-"]


def _same_lists(answer: tuple[str, list[str]], gold: tuple[str, list[str]], budget: Budget) -> bool:
    """Compare pairs and intervals in order, sets and bare lists in any order.

    A set is not a pair, and [1,2] is not (1,2). Repeated members of a set count once.
    """
    (answer_kind, answers), (gold_kind, golds) = answer, gold
    if (answer_kind and gold_kind and answer_kind != gold_kind) or max(
        len(answers), len(golds)
    ) > MAX_PARTS:
        return False
    if gold_kind == _SET:
        matches = [
            {number for number, other in enumerate(golds) if _equivalent(part, other, budget)}
            for part in answers
        ]
        return all(matches) and set().union(*matches) == set(range(len(golds)))
    if len(answers) != len(golds) and answer_kind != _SET:
        return False
    if gold_kind:
        return len(answers) == len(golds) and all(
            _equivalent(a, g, budget) for a, g in zip(answers, golds, strict=True)
        )
    missing = list(golds)
    for part in answers:
        match = next((g for g in missing if _equivalent(part, g, budget)), None)
        if match is not None:
            missing.remove(match)
        elif answer_kind != _SET or not any(_equivalent(part, g, budget) for g in golds):
            return False
    return not missing


_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\s*\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}\s*(?:\{[lcr| ]+\})?"
    r"(?P<body>.*)\\end\s*\{(?P=kind)\}\s*[\])]?"
)
_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")
MAX_ENTRIES = 100


def same_matrix(answer: str, gold: str, equal: Callable[[str, str], bool]) -> bool | None:
    """True if two matrices have the same shape and equal entries. None unless both are matrices.

    Args:
        gold: normalised reference answer.
    """
    left, right = _rows(answer), _rows(gold)
    if left is None or right is None:
        return None
    if [len(row) for row in left] != [len(row) for row in right]:
        return False
    return all(
        equal(a, b)
        for mine, theirs in zip(left, right, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def _rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if match is None or "\\begin" in match["body"]:
        return None
    rows = _ROW.split(match["body"])
    if len(rows) > 1 and not rows[-1].strip():
        rows.pop()
    entries = [[entry.strip() for entry in row.split("&")] for row in rows]
    return entries if sum(map(len, entries)) <= MAX_ENTRIES else None
