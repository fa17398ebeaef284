"""Calculator: an episode in which the policy writes calls and reads their results.

The policy writes `c(45*7)`. Its reply stops at the bracket, the environment computes the value, and
`=315#` continues the policy's own turn. A reply without a call is the final answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ..errors import UserError
from ..types import Task
from .arithmetic import arithmetic_grade
from .episode import Action, End, Observation

OPEN, CLOSE = "c(", ")"
OPERATORS = "+-*"

MAX_DIGITS = 18
MAX_NUMBERS = 16
"""Limits of one call. So a result has at most 288 digits."""

_EXPRESSION = re.compile(rf"-?[0-9]+(?:[{re.escape(OPERATORS)}]-?[0-9]+)*")
_NUMBER = re.compile(rf"(?:(?<=[{re.escape(OPERATORS)}])|\A)-?[0-9]+")


class CalculatorError(ValueError):
    """A call that cannot be computed.

    Attributes:
        kind: "call" (a bracket without a call), "syntax", or "size" (too many or too long numbers).
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def calculate(expression: str) -> int:
    """Value of an expression of integers, +, - and *, without brackets.

    Raises:
        CalculatorError: the expression is malformed or too large.
    """
    text = expression.replace(" ", "")
    if not _EXPRESSION.fullmatch(text):
        raise CalculatorError("syntax")
    numbers = _NUMBER.findall(text)
    if len(numbers) > MAX_NUMBERS or any(len(n.lstrip("-")) > MAX_DIGITS for n in numbers):
        raise CalculatorError("size")
    operators = [text[found.end()] for found in _NUMBER.finditer(text) if found.end() < len(text)]
    total, product = 0, int(numbers[0])
    for operator, number in zip(operators, map(int, numbers[1:]), strict=True):
        if operator == "*":
            product *= number
        else:
            total, product = total + product, number if operator == "+" else -number
    return total + product


class Calculator:
    """Episode with a calculator. The reward is 1 if the last integer of the last reply is right.

    A malformed call is answered by `=error KIND#` and counts as a tool error.

    Args:
        task: its answer is an integer.
    """

    own_errors = tuple(f"=error {kind}#" for kind in ("call", "syntax", "size"))

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> Observation:
        """The task's prompt."""
        prompt = self._task.prompt
        if isinstance(prompt, str):
            return Observation(text=prompt, stops=(CLOSE,))
        return Observation(messages=prompt, stops=(CLOSE,))

    async def step(self, action: Action) -> Observation | End:
        """Answer a call, or grade the final answer."""
        if action.stopped_by != CLOSE:
            return End(reward=arithmetic_grade(action.text, self._task))
        _, opened, expression = action.text.rpartition(OPEN)
        event = {"kind": "tool_call", "tool": "calculator", "arguments": expression}
        try:
            if not opened:
                raise CalculatorError("call")
            value = str(calculate(expression))
        except CalculatorError as error:
            return Observation(
                text=f"=error {error.kind}#",
                stops=(CLOSE,),
                events=({**event, "error": error.kind},),
                tool_errors=1,
            )
        return Observation(text=f"={value}#", stops=(CLOSE,), events=({**event, "result": value},))


def calculator_tasks(count: int, *, numbers: int, digits: int, seed: int) -> list[Task]:
    """Different expressions of random numbers. The same arguments give the same list.

    Args:
        count: number of tasks.
        numbers: numbers per expression.
        digits: maximum digits per number.
        seed: random seed.

    Raises:
        UserError: if fewer than `count` expressions exist.
    """
    possible = 10 ** (digits * numbers) * len(OPERATORS) ** (numbers - 1)
    if count > possible:
        raise UserError(
            f"data.calculator: {count} tasks need {count} different expressions of {numbers}"
            f" numbers of {digits} digits, but only {possible} exist. Raise data.calculator.digits"
        )
    rng = random.Random(f"calculator/{numbers}/{digits}/{seed}")
    drawn: dict[str, Task] = {}
    while len(drawn) < count:
        terms = [str(rng.randrange(10**digits)) for _ in range(numbers)]
        operators = [rng.choice(OPERATORS) for _ in terms[1:]]
        task = _task(terms, operators)
        drawn.setdefault(task.id, task)
    return list(drawn.values())


def worked_calls(terms: Sequence[str], operators: Sequence[str]) -> tuple[str, ...]:
    """Replies that solve an expression: a call for each operation, then the answer.

    Products come first. 12+45*7 gives `c(45*7)`, `c(12+315)` and `327`.
    """
    terms, operators = list(terms), list(operators)
    replies = []
    while operators:
        at = operators.index("*") if "*" in operators else 0
        call = f"{terms[at]}{operators.pop(at)}{terms[at + 1]}"
        replies.append(f"{OPEN}{call}{CLOSE}")
        terms[at : at + 2] = [str(calculate(call))]
    return (*replies, terms[0])


def _task(terms: Sequence[str], operators: Sequence[str]) -> Task:
    expression = terms[0] + "".join(
        operator + term for operator, term in zip(operators, terms[1:], strict=True)
    )
    return Task(
        id=f"calculator-{expression}",
        prompt=f"{expression}=",
        answer=calculate(expression),
        trace=worked_calls(terms, operators),
        source="calculator",
    )
