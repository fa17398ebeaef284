"""The built-in tool `calculator`."""

from __future__ import annotations

from ..calculator import CalculatorError, calculate
from .observation import ToolError
from .tool import tool


@tool
def calculator(expression: str) -> int:
    """Compute an expression of integers, +, - and *, without brackets.

    Args:
        expression: for example 12+45*7.
    """
    try:
        return calculate(expression)
    except CalculatorError as error:
        problems = {"size": "the expression has too many or too long numbers"}
        problem = problems.get(error.kind, "write integers with +, - and * between them")
        raise ToolError(problem, "wrong_argument") from error
