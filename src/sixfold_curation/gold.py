"""Stage `gold`: find reference answers that their own row contradicts. No model, no recipe.

It can judge rows with a worked solution, bare arithmetic or options. Whether the answer of another
row is right shows only when somebody solves the task.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from fractions import Fraction
from typing import ClassVar, NamedTuple

from sixfold_environments.maths.choices import choice
from sixfold_environments.maths.extraction import final_answer, last_box
from sixfold_environments.maths.numbers import exact_number
from sixfold_environments.maths.spelling import normalise

from .stage import Context, Decision, Health, Record, Rows, Stage
from .text import plain

MOST_WRONG = 0.01
"""Share of wrong answers, of those that could be checked, from which there is an alarm."""
REASONS = ("placeholder", "wrong_sum", "no_such_option", "solution_differs", "false_calculation")

_PLACEHOLDER = re.compile(
    r"[\s(\[\"'*]*(?:\?+|\.{2,}|-{2,}|—|_+|n/a|tbd|todo|notfound|no answer|to be determined"
    r"|not (?:available|found|given|provided|applicable|known|stated|specified)"
    r"|see (?:the )?(?:solution|above|below|explanation|figure|text))[\s)\]\"'*.!]*",
    re.IGNORECASE,
)
_SUM = re.compile(
    r"\s*(?:(?:what is|calculate|compute|evaluate|find(?: the value of)?|work out|simplify)\b)?"
    r"\s*(?P<sum>[-(\d][-\d\s+*/^().]*)\s*(?:[=?.:]+\s*(?P<rest>\D*))?"
)
_OTHER_ARITHMETIC = re.compile(
    r"\b(?:round\w*|nearest|decimals?|places|mod|modulo|remainder|quotient|integer|whole|floor"
    r"|ceil\w*|base|binary|octal|hexadecimal|digits?|percent\w*|estimate|approximat\w*)\b"
)
"""Words after which plain arithmetic does not decide."""
_OPTION = re.compile(r"(?:^|[\s(])\(?([A-J])\s*[).:]", re.MULTILINE)
_LEAST_OPTIONS = 3
_ENDING = re.compile(r"=\s*(\\?\$?\s*-?\d[\d,]*(?:\.\d+)?(?:\s+[A-Za-z]{3,})?)\s*\$?\s*\.?\s*\Z")
_MARKED = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
"""Calculations as in GSM8K: <<48/2=24>>."""
_EQUATION = re.compile(
    r"(?<![\w.+*/^=<>|%()\\{}$-])(?<!\d,)(?P<left>[(\d][\d.()]*(?:\s*[-+*/]\s*[\d.()]+){1,40})\s*="
    r"\s*(?P<right>-?\d+(?:\.\d+)?)(?![\d.]*\d|[\w^%!/*{(\\]|,\d|[^\S\n]\d"
    r"|\s*(?:[-+*/^%(]|[ap]\.?m\b|o.?clock))"
)
_GOES_ON = re.compile(
    r"(?:(?:[^\s\w.,;:!?]|(?<![A-Za-z])[A-Za-z]|\b(?:of|sqrt|root|log|ln|lg|exp|sin|cos|tan))\s*"
    r"|\d[^\S\n]+)\Z"
)
"""Text before an equation that belongs to it, so that the rest alone says something else: the 3 of
3 4/5, the sqrt of sqrt 16, the 20% of of 20% of 50.
"""
_WITH_UNIT = re.compile(r"(?:\\?\$)?\s*(?P<value>.*?\d[^A-Za-z\s]*)(?:\s+(?P<unit>[A-Za-z]{3,}))?")
_SCALES = frozenset(("hundred", "thousand", "million", "billion", "dozen", "percent", "squared"))
_NAMED = re.compile(r"[A-Za-z]\w?\s*=\s*(?=[^=]*$)")
_LONGEST = 200
_MOST_BITS = 4000
"""Of a power: larger ones take long."""
_NEAR = 8


class Gold(Stage):
    """Drop rows whose reference answer is wrong by what the row itself says.

    - placeholder: the answer is "N/A", "see solution" or the like.
    - wrong_sum: the prompt is bare arithmetic with another result.
    - no_such_option: the answer is a letter that no option of the prompt has.
    - solution_differs: the worked solution ends with another number or option.
    - false_calculation: the worked solution has an equation of numbers that is false.

    Answers that cannot be compared as numbers or options are not judged.

    Args:
        solution: column with the worked solution.
    """

    kind: ClassVar[str] = "gold"

    solution: str = "solution"

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        found: Counter[str] = Counter()
        checked = 0
        for record in rows:
            solution = record.fields.get(self.solution)
            text = solution if isinstance(solution, str) else ""
            verdicts = [*_verdicts(record, text)]
            checked += bool(verdicts)
            wrong = next((one for one in verdicts if one.note), None)
            if wrong:
                found[wrong.reason] += 1
                yield Decision(record, False, wrong.reason, wrong.note)
            else:
                yield Decision(record)
        return _health(found, checked, len(rows))


class Verdict(NamedTuple):
    """A check that applies to a row.

    Args:
        reason: name of what it looks for.
        note: what is wrong, or "".
    """

    reason: str
    note: str


def _verdicts(record: Record, solution: str) -> Iterator[Verdict]:
    answer, prompt = record.answer.strip(), record.prompt
    if len(answer) > _LONGEST:
        return
    if _PLACEHOLDER.fullmatch(answer):
        yield Verdict("placeholder", f"the answer is {answer!r}")
        return
    value = _sum(prompt)
    stated = _number(answer)
    if value is not None and stated:
        wrong = not _same(stated, Stated(str(value), value, ""))
        yield Verdict("wrong_sum", f"the answer is {answer!r}, and the sum {value}" * wrong)
    letters = "".join(sorted(set(_OPTION.findall(prompt))))
    named = choice(normalise(last_box(answer) or answer))
    if named and len(letters) >= _LEAST_OPTIONS and "ABCDEFGHIJ".startswith(letters):
        wrong = named.letter not in letters
        note = f"the answer is {named.letter}, and the options are {', '.join(letters)}"
        yield Verdict("no_such_option", note * wrong)
    ending = _ending(solution)
    if ending and (same := _agree(answer, ending)) is not None:
        note = f"the answer is {answer!r}, and the solution ends with {ending!r}"
        yield Verdict("solution_differs", note * (not same))
    if solution:
        yield Verdict("false_calculation", _false_calculation(solution))


def _ending(solution: str) -> str:
    """The final answer of a worked solution, or ""."""
    if not solution:
        return ""
    if answer := final_answer(solution).answer:
        return answer.strip()
    found = _ENDING.search(solution)
    return found[1].strip() if found else ""


class Stated(NamedTuple):
    """A number as it is stated.

    Args:
        text: its digits.
        value: its value.
        unit: the word behind it, or "".
    """

    text: str
    value: Fraction
    unit: str


def _number(text: str) -> Stated | None:
    """The number that an answer states. None if it is no number, or has a scale such as million."""
    text = _NAMED.sub("", normalise(last_box(text) or text), count=1).strip().rstrip(" .")
    found = _WITH_UNIT.fullmatch(text.removesuffix("%").removesuffix("\\"))
    if not found or (found["unit"] or "").casefold() in _SCALES:
        return None
    value = exact_number(found["value"])
    return None if value is None else Stated(found["value"], value, found["unit"] or "")


def _same(one: Stated, other: Stated) -> bool:
    """Whether two numbers are equal, up to rounding and percent."""
    if one.unit and other.unit and one.unit.rstrip("s") != other.unit.rstrip("s"):
        return True  # 2 hours and 120 minutes
    return any(
        _rounds(left, right) or left.value in (100 * right.value, right.value / 100)
        for left, right in ((one, other), (other, one))
    )


def _rounds(short: Stated, exact: Stated) -> bool:
    """Whether a number is another one, rounded or cut to its digits."""
    places = len(short.text.partition(".")[2]) if "." in short.text else 0
    if short.value == exact.value:
        return True
    if exact.value.denominator == 1 or "/" in short.text or "\\" in short.text:
        return False
    return abs(short.value - exact.value) < Fraction(1, 10**places)


def _agree(answer: str, ending: str) -> bool | None:
    """Whether two answers are the same number or option. None if they are not comparable."""
    one, other = _number(answer), _number(ending)
    if one and other:
        return _same(one, other)
    options = [choice(normalise(last_box(text) or text)) for text in (answer, ending)]
    if options[0] and options[1]:
        return options[0].letter == options[1].letter
    return None


def _sum(prompt: str) -> Fraction | None:
    """The value of a prompt that is nothing but arithmetic. None for another prompt."""
    if len(prompt) > _LONGEST:
        return None
    text = plain(prompt)
    found = _SUM.fullmatch(text)
    if not found or not re.search(r"\d[)\s]*[-+*/^]", found["sum"]):
        return None
    return None if _OTHER_ARITHMETIC.search(found["rest"] or "") else _calculated(found["sum"])


def _false_calculation(solution: str) -> str:
    """The first equation of numbers in a worked solution that is false, or ""."""
    text = plain(solution)
    for left, right in _MARKED.findall(text):
        if (note := _falsified(left, right)) or "<<" not in text:
            return note
    if _OTHER_ARITHMETIC.search(text):
        return ""
    text = _MARKED.sub(" ", text)
    for found in _EQUATION.finditer(text):
        start = found.start()
        goes_on = _GOES_ON.search(text, max(0, start - _NEAR), start)
        if not goes_on and (note := _falsified(*found.groups())):
            return note
    return ""


def _falsified(left: str, right: str) -> str:
    value, stated = _calculated(left), _number(right)
    if value is None or not stated or _same(stated, Stated("", value, "")):
        return ""
    return f"the solution says {left.strip()} = {right.strip()}"


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _calculated(text: str) -> Fraction | None:
    """Value of an expression of numbers. None if it is none."""
    text = text.strip().rstrip(".").replace("^", "**")
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, text: str) -> Fraction:
    """Value of a part of an expression.

    Raises:
        ValueError: it is no arithmetic, or too large.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(text[node.col_offset : node.end_col_offset])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, text)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow) and right.denominator == 1 and 0 <= right <= _MOST_BITS:
            bits = (abs(left.numerator) | left.denominator).bit_length()
            if bits * right <= _MOST_BITS:
                return Fraction(left ** int(right))
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"no arithmetic: {ast.dump(node)[:40]}")


def _health(found: Counter[str], checked: int, total: int) -> Health:
    wrong = found.total()
    share = wrong / checked if checked else float("nan")
    named = ", ".join(f"{count} {name}" for name, count in found.most_common())
    alarm = ""
    if checked and share >= MOST_WRONG:
        alarm = (
            f"{wrong:,} of {checked:,} answers that could be checked are wrong ({named}): so will"
            " be those that could not. Measure pass rates with a strong model"
        )
    figures = {**{name: found[name] for name in REASONS}, "rows": total, "rows checked": checked}
    return Health("share of checked answers that are wrong", share, alarm, figures)
