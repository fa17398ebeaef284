"""Texts that the audit scores: right answers in several forms, and wrong answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from sixfold.types import Task

from .trials import Answer

FORMS = (
    "{answer}",
    "\\boxed{{{answer}}}",
    "<answer>{answer}</answer>",
    "The answer is {answer}.",
    "#### {answer}",
    "#{answer}",
    "```\n{answer}\n```",
)
"""Forms of a final answer. The audit uses the form with the highest reward.

The last form is for programs and patches. A code block without a tag counts as the task's language.
"""

_INTEGER = re.compile(r"[+-]?\d{1,15}")
_DECIMAL = re.compile(r"[+-]?\d{1,15}\.\d{1,9}")

_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")

Variant = Callable[[str], str | None]
"""Rewrites an answer in another form. Returns None if the answer has no such form."""


@dataclass(frozen=True)
class Right:
    """A task with its right answer.

    Attributes:
        answer: the final answer alone; "" if the task has only a worked solution.
        text: the text that should earn full marks.
    """

    task: Task
    answer: str
    text: Answer


def answer_of(task: Task) -> str:
    """The reference answer as text, or "" if the task has none. Of several, the first."""
    answer = task.answer
    if isinstance(answer, list | tuple) and answer and isinstance(answer[0], str | int | float):
        answer = answer[0]
    return (
        ""
        if answer is None
        else answer
        if isinstance(answer, str)
        else json.dumps(answer, default=str)
    )


def worked_solution(task: Task) -> Answer:
    """The worked solution: one text, or the replies of an episode. Empty if there is none."""
    return task.trace or ""


def in_form(form: str, answer: str) -> str:
    return form.format(answer=answer)


def frequent_answers(tasks: Sequence[Task], count: int) -> list[str]:
    """The most frequent answers, most frequent first. Each of them belongs to several tasks."""
    counts = Counter(answer for task in tasks if (answer := answer_of(task)))
    return [answer for answer, number in counts.most_common(count) if number > 1]


def other_answer(task: Task, tasks: Sequence[Task], number: int) -> str | None:
    """An answer of another task that is wrong for this task. None if there is none.

    Args:
        number: index in `tasks` after which the search begins.
    """
    own = answer_of(task)
    for step in range(1, len(tasks)):
        other = answer_of(tasks[(number + step) % len(tasks)])
        if other and not _alike(own, other):
            return other
    return None


def near_misses(answer: str) -> list[str]:
    """Wrong numbers that are close to an integer or look like it. Empty for other answers."""
    if not _INTEGER.fullmatch(answer):
        return []
    value = int(answer)
    return [str(wrong) for wrong in (value + 1, -value, 10 * value + 1) if wrong != value]


def paraphrases(right: Right) -> list[str]:
    """The right answer with other words around it. Every verifier should accept it.

    Empty for the replies of an episode, because other words would be other actions.
    """
    text = right.text
    if not isinstance(text, str):
        return []
    return [
        f"Let me work through this.\n\nFirst I read the question again.\n\n{text}",
        f"{text}\n",
        f"I am confident about this.\n{text}",
    ]


def _decimal(answer: str) -> str | None:
    return f"{answer}.0" if _INTEGER.fullmatch(answer) else None


def _fraction(answer: str) -> str | None:
    if not _DECIMAL.fullmatch(answer):
        return None
    value = Fraction(answer)
    return f"{value.numerator}/{value.denominator}"


def _with_commas(answer: str) -> str | None:
    if not _INTEGER.fullmatch(answer) or abs(int(answer)) < 1000:
        return None
    return f"{int(answer):,}"


def _change_case(change: Callable[[str], str]) -> Variant:
    """Variant with another case. None for LaTeX and code, where the case has a meaning."""

    def variant(answer: str) -> str | None:
        made = change(answer)
        plain = all(c.isalnum() or c in " -'.,:" for c in answer)
        return made if plain and made != answer else None

    return variant


VARIANTS: MappingProxyType[str, Variant] = MappingProxyType(
    {
        "capitals": _change_case(str.upper),
        "lower case": _change_case(str.lower),
        "spaces around": lambda answer: f" {answer} ",
        "a line break before": lambda answer: f"\n{answer}",
        "bold": lambda answer: f"**{answer}**",
        "dollar signs": lambda answer: f"${answer}$",
        "a full stop": lambda answer: f"{answer}.",
        "a decimal": _decimal,
        "a fraction": _fraction,
        "thousands separators": _with_commas,
    }
)
"""Forms of an answer that a reader would accept, by name."""


def _alike(a: str, b: str) -> bool:
    """True if two answers may mean the same."""
    if a.strip().casefold() == b.strip().casefold():
        return True
    try:
        return _fraction_of(a) == _fraction_of(b)
    except (ValueError, ZeroDivisionError):
        return False


def _fraction_of(answer: str) -> Fraction:
    """Value of a number or a LaTeX fraction.

    Raises:
        ValueError: if it is neither.
    """
    plain = _LATEX_FRACTION.sub(r"\1\2/\3", answer.replace(" ", "").replace("$", ""))
    return Fraction(plain.replace(",", ""))
