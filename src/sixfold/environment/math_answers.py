"""The reward for mathematics: is the final answer of a completion equal to the task's?

Cast: `math_extraction` finds the answer, `math_numbers` makes text and exact numbers of it, `math_algebra` asks the CAS about the rest.
Invariants: an equivalent answer earns 1 (1/2, 0.5 and \\frac{1}{2} are one), an approximation of an exact gold earns 0, a restatement of
the question earns 0, and the text of the model is never run.
"""

from __future__ import annotations

import re

from sixfold.environment.math_algebra import equal_by_algebra
from sixfold.environment.math_extraction import final_answer, last_box
from sixfold.environment.math_numbers import Quantity, exact_number, normalise, quantity
from sixfold.types import Task

MAX_ANSWER_CHARACTERS = 2000

_ASSIGNMENT = re.compile(r"\\?[A-Za-z]+(?:_\w)?(?:\([A-Za-z]\))?\s*=\s*(?P<value>[^=]+)")
_REVERSED = re.compile(r"(?P<value>[^=A-Za-z]*\d[^=A-Za-z]*)=\s*[A-Za-z]")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*|[A-J]")
_MULTIPLICATION = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|×|·")


def math_reward(completion: str, task: Task) -> float:
    """1.0 if the final answer of `completion` equals `task.answer`, else 0.0.

    Most answers are settled as text or as exact numbers. The rest goes to a CAS, which can hang: score through `scorer.Environment`, which
    runs this in a process that it can kill. Raises ValueError for a task without an answer.
    """
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no answer to check against")
    answer = final_answer(completion)
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    gold = str(task.answer)
    return float(_accepts(normalise(answer), normalise(last_box(gold) or gold), task.prompt_text))


def _accepts(answer: str, gold: str, prompt: str) -> bool:
    if not answer or not gold:
        return False
    if answer == gold:
        return True
    return not _echoes(answer, gold, prompt) and _equivalent(answer, gold)


def _equivalent(answer: str, gold: str) -> bool:
    """Whether two normalised answers are the same: as text, as lists of answers, as quantities, then by algebra."""
    if answer == gold:
        return True
    answer, gold = _unassigned(answer, gold)
    gold_words = _words(gold)
    if gold_words is not None:
        return _words(answer) == gold_words
    answer_parts, gold_parts = _list_parts(answer), _list_parts(gold)
    if answer_parts and gold_parts:
        return _same_lists(answer_parts, gold_parts)
    left, right = quantity(answer), quantity(gold)
    if left.unit and right.unit and left.unit != right.unit and "%" not in (left.unit, right.unit):
        return False
    if left.value is not None and right.value is not None:
        return _same_quantity(left, right)
    if "%" in (left.unit, right.unit):
        return left.unit == right.unit and equal_by_algebra(left.body, right.body)
    return equal_by_algebra(left.body, right.body)


def _same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Equal values. A percentage is a hundredth, or the bare figure where one side speaks of per cent and the other need not: 50 for 50%.

    The bare figure counts only above 1: 0.5% is not the ratio 0.5.
    """
    assert answer.value is not None and gold.value is not None
    if (answer.unit == "%") == (gold.unit == "%"):
        return answer.value == gold.value
    percentage, bare = (answer.value, gold.value) if answer.unit == "%" else (gold.value, answer.value)
    return percentage == bare * 100 or (percentage == bare and abs(bare) > 1)


def _unassigned(answer: str, gold: str) -> tuple[str, str]:
    """Both sides without `x =` where only one of them has it."""
    if "=" in answer and "=" not in gold:
        return _value_of(answer), gold
    if "=" in gold and "=" not in answer:
        return answer, _value_of(gold)
    return answer, gold


def _value_of(text: str) -> str:
    match = _ASSIGNMENT.fullmatch(text) or _REVERSED.fullmatch(text)
    return match["value"].strip() if match else text


def _words(text: str) -> str | None:
    """The words of an answer that is a name or an option (`\\text{Evelyn}`, `(C)`), or None. Letters' case counts only for options."""
    text, wrapped = _TEXT.subn(r"\1", text)
    text = " ".join(text.split()).rstrip(".")
    option = re.fullmatch(r"\(\s*([A-Za-z])\s*\)", text)
    if option:
        return option[1]
    if not _WORDS.fullmatch(text) and not (wrapped and re.fullmatch(r"[A-Za-z][A-Za-z '-]*", text)):
        return None
    return text.casefold() if len(text) > 1 else text


def _list_parts(text: str) -> tuple[str, list[str]] | None:
    """An enumeration taken apart: ("()", ["1", "2"]) for (1,2), ("", [...]) without brackets; None if there is no comma at the top."""
    kind, inside = "", text
    for opening, closings in (("(", ")]"), ("[", ")]"), ("\\{", ("\\}",))):
        for closing in closings:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
                kind, inside = opening + closing, text[len(opening) : -len(closing)]
    parts, depth, start = [], 0, 0
    for position, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:  # the brackets at the ends are not a pair: (1,2) \cup (3,4)
            return None
        if character == "," and depth == 0:
            parts.append(inside[start:position].strip())
            start = position + 1
    parts.append(inside[start:].strip())
    is_list = (len(parts) > 1 and exact_number(inside) is None) or kind == "\\{\\}"
    return (kind, parts) if is_list and "\\begin" not in text else None


def _same_lists(answer: tuple[str, list[str]], gold: tuple[str, list[str]]) -> bool:
    """Pairs and intervals in order, sets and bare lists in any. A set is not a pair, and [1,2] is not (1,2)."""
    (answer_kind, answers), (gold_kind, golds) = answer, gold
    if (answer_kind and gold_kind and answer_kind != gold_kind) or len(answers) != len(golds) or len(golds) > 50:
        return False
    if gold_kind and gold_kind != "\\{\\}":
        return all(_equivalent(a, g) for a, g in zip(answers, golds, strict=True))
    missing = list(golds)
    for part in answers:
        match = next((g for g in missing if _equivalent(part, g)), None)
        if match is None:
            return False
        missing.remove(match)
    return True


def _echoes(answer: str, gold: str, prompt: str) -> bool:
    """Whether the answer is an expression of the question that is left to be worked out. A decimal is worked out wherever it stands."""
    if not prompt or re.fullmatch(r"[+-]?[\d.,]+|\\?[A-Za-z]+", answer):
        return False
    squashed = _squashed(answer)
    return squashed != _squashed(gold) and squashed in _squashed(normalise(prompt)) and not _TEXT.fullmatch(answer)


def _squashed(text: str) -> str:
    """For the search of echoes only: no spaces, one multiplication sign, one spelling of fractions. Never for equality."""
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", _MULTIPLICATION.sub("*", text))
    return re.sub(r"[\s{}$]", "", text)
