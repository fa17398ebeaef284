r"""Reward for mathematics: 1 if the final answer of a completion equals the task's, otherwise 0.

`extraction` finds the answer. `numbers` converts it to normalised text and exact numbers.
`choices`, `times` and `intervals` handle options, times of day and sets of reals.
`algebra` asks the CAS about the rest.

Invariants: no answer makes the check fail: an answer that raises, or takes too long, is wrong. An
equivalent answer earns 1 (1/2, 0.5 and \frac{1}{2} are equal). An approximation of an exact gold
earns 0, a restatement of the question earns 0, and text of the model is never executed.
"""

from __future__ import annotations

import re
from functools import partial

from ...types import Task
from ..limits import OutOfTime
from .algebra import Budget, equal_by_algebra
from .choices import same_choice
from .extraction import final_answer, last_box
from .intervals import region, same_region
from .numbers import Quantity, exact_number, normalise, ordinal, quantity, same_unit
from .times import same_time, time_of_day

MAX_ANSWER_CHARACTERS = 2000
MAX_PARTS = 50

_SET = "\\{\\}"
_ASSIGNMENT = re.compile(r"\\?[A-Za-z]+(?:_\w)?(?:\([A-Za-z]\))?\s*=\s*(?P<value>[^=]+)")
_REVERSED = re.compile(r"(?P<value>[^=A-Za-z]*\d[^=A-Za-z]*)=\s*[A-Za-z]")
_MEMBER = re.compile(r"\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*|[A-J]")
_WORKED_OUT = re.compile(r"[+-]?[\d.,]+|\\?[A-Za-z]+")
_MULTIPLICATION = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|×|·")


def math_reward(completion: str, task: Task) -> float:
    """1.0 if the final answer of `completion` equals `task.answer`, otherwise 0.0.

    An answer that cannot be checked within the limits earns 0.0. Most answers are decided as text
    or as exact numbers. The rest goes to a CAS, with limits on what it computes.

    Raises:
        ValueError: for a task without an answer.
        BadReference: if the CAS fails on the task's answer.
    """
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no reference answer")
    gold = normalise(last_box(str(task.answer)) or str(task.answer))
    try:
        answer = final_answer(completion)
        if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        answer = normalise(answer)
        if answer == gold or not answer or not gold:
            return float(answer == gold and bool(gold))
        number, wanted = exact_number(answer), exact_number(gold)
        if number is not None and wanted is not None:  # most checks end here
            return float(number == wanted and not _echoes(answer, gold, task.prompt_text))
        return float(_accepts(answer, gold, task.prompt_text))
    except OutOfTime:
        return 0.0
    except (
        ArithmeticError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        MemoryError,
    ):
        return 0.0


def _accepts(answer: str, gold: str, prompt: str) -> bool:
    chosen = same_choice(answer, gold, prompt)
    if chosen is not None:
        return chosen
    return not _echoes(answer, gold, prompt) and _equivalent(answer, gold, Budget())


def _equivalent(answer: str, gold: str, budget: Budget) -> bool:
    """True if two normalised answers are equal as text, lists, quantities, or by algebra."""
    if answer == gold:
        return True
    same = same_time(answer, gold)
    if same is None:
        same = _same_ordinal(answer, gold)
    if same is None:
        same = same_region(answer, gold, partial(_equivalent, budget=budget))
    if same is not None:
        return same
    answer, gold = _unassigned(answer, gold)
    gold_words = _words(gold)
    if gold_words is not None:
        return _words(answer) == gold_words
    answer_parts, gold_parts = _list_parts(answer), _list_parts(gold)
    if answer_parts and gold_parts:
        return _same_lists(answer_parts, gold_parts, budget)
    if answer_parts and not answer_parts[0] and region(gold) is not None:
        return False  # the endpoints of an interval are not the interval
    return _same_measure(quantity(answer), quantity(gold), budget)


def _same_ordinal(answer: str, gold: str) -> bool | None:
    """True if both are the same ordinal, as words or digits.

    None if one of them is not an ordinal.
    """
    left, right = ordinal(answer, words=True), ordinal(gold, words=True)
    return None if left is None or right is None else left == right


def _same_measure(answer: Quantity, gold: Quantity, budget: Budget) -> bool:
    """True if two numbers or expressions with units are equal.

    Only degrees and cents are converted.
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
        return False
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


def _unassigned(answer: str, gold: str) -> tuple[str, str]:
    r"""Both sides, without `x =` or `x \in` if only one of them has it."""
    if bool(_MEMBER.match(answer)) != bool(_MEMBER.match(gold)):
        answer, gold = _MEMBER.sub("", answer), _MEMBER.sub("", gold)
    if "=" in answer and "=" not in gold:
        return _value_of(answer), gold
    if "=" in gold and "=" not in answer:
        return answer, _value_of(gold)
    return answer, gold


def _value_of(text: str) -> str:
    match = _ASSIGNMENT.fullmatch(text) or _REVERSED.fullmatch(text)
    return match["value"].strip() if match else text


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
    parts, depth, start = [], 0, 0
    for position, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:  # the outer brackets are not a pair: (1,2) \cup (3,4)
            return None
        if character == "," and depth == 0:
            parts.append(inside[start:position].strip())
            start = position + 1
    parts.append(inside[start:].strip())
    is_list = (len(parts) > 1 and exact_number(inside) is None) or kind == _SET
    return (kind, parts) if is_list and "\\begin" not in text else None


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


def _echoes(answer: str, gold: str, prompt: str) -> bool:
    """True if the answer is an expression of the question that still has to be worked out.

    A decimal counts as worked out, with or without a unit.
    """
    if not prompt or _WORKED_OUT.fullmatch(answer):
        return False
    squashed = _squashed(answer)
    if (
        squashed == _squashed(gold)
        or squashed not in _squashed(normalise(prompt))
        or _TEXT.fullmatch(answer)
    ):
        return False
    return not (_WORKED_OUT.fullmatch(quantity(answer).body) or time_of_day(answer))


def _squashed(text: str) -> str:
    """Text without spaces, with one multiplication sign and one spelling of fractions.

    Only for finding echoes, never for equality.
    """
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", _MULTIPLICATION.sub("*", text))
    return re.sub(r"[\s{}$]", "", text)
