"""Rewrite test files so that asserts report values, which the trusted side compares."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .compare import Rules
from .task_tests import TestsError

REPORT = "__sixfold_report__"
"""Name of the harness's function that takes the id of an assert and a value."""

_RULES = Rules(as_python=True)


@dataclass
class ReportingFile:
    """A test file with asserts that report.

    Attributes:
        source: the rewritten source, without the literals that asserts compare with.
        expected: id of an assert -> ("value", literal) or ("truth", flag).
        required: test -> ids of the asserts that it always reaches.
    """

    source: str
    expected: dict[str, tuple[str, Any]] = field(default_factory=dict)
    required: dict[str, set[str]] = field(default_factory=dict)

    def as_expected(self, key: str, value: Any) -> bool:
        """True if an assert reported the expected value.

        Args:
            value: JSON of `wire`.
        """
        kind, expected = self.expected.get(key, ("", None))
        if kind == "truth":
            return value is expected
        return kind == "value" and _RULES.same(expected, value)


def reporting(source: str, flipped: frozenset[int]) -> ReportingFile:
    """Rewrite a test file.

    Args:
        flipped: numbers of asserts whose truth is negated.

    Raises:
        TestsError: if the file does not compile.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(f"a test file does not compile: {error}") from error
    reporter = _Reporter(flipped)
    tree = ast.fix_missing_locations(reporter.visit(tree))
    required = {
        name: {key for node in function.body if (key := _report_id(node)) is not None}
        for name, function in _tests(tree)
    }
    return ReportingFile(ast.unparse(tree), reporter.expected, required)


def _tests(tree: ast.Module) -> Iterable[tuple[str, ast.FunctionDef]]:
    """Tests of a module by name, as `test_name` or `Class::test_name`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}::{inner.name}", inner


def _report_id(node: ast.stmt) -> str | None:
    """The id of a report, if the statement is one."""
    match node:
        case ast.Expr(ast.Call(ast.Name(id=name), [ast.Constant(str(key)), _], [])):
            return key if name == REPORT else None
    return None


class _Reporter(ast.NodeTransformer):
    """Replaces asserts by reports.

    Attributes:
        expected: as in `ReportingFile`.
    """

    def __init__(self, flipped: frozenset[int]) -> None:
        self._flipped = flipped
        self.expected: dict[str, tuple[str, Any]] = {}

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """`assert a == literal` sends a; other asserts send their truth."""
        match node.test:
            case ast.Compare(left, [ast.Eq()], [right]):
                return self._equal(node, left, right)
        return self._truth(node, node.test, True)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """The same for assertEqual, assertTrue and assertFalse of unittest."""
        match node.value:
            case ast.Call(ast.Attribute(ast.Name("self"), "assertEqual"), [left, right, *_], []):
                return self._equal(node, left, right)
            case ast.Call(ast.Attribute(ast.Name("self"), "assertTrue"), [test, *_], []):
                return self._truth(node, test, True)
            case ast.Call(ast.Attribute(ast.Name("self"), "assertFalse"), [test, *_], []):
                return self._truth(node, test, False)
        return node

    def _equal(self, node: ast.stmt, left: ast.expr, right: ast.expr) -> ast.stmt:
        for value, literal in ((left, right), (right, left)):
            try:
                expected = ast.literal_eval(literal)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
            return self._report(node, ("value", expected), value)
        return self._truth(node, ast.Compare(left, [ast.Eq()], [right]), True)

    def _truth(self, node: ast.stmt, test: ast.expr, wanted: bool) -> ast.stmt:
        negated: ast.expr = ast.UnaryOp(ast.Not(), test)
        if len(self.expected) in self._flipped:
            return self._report(node, ("truth", not wanted), negated)
        return self._report(node, ("truth", wanted), ast.UnaryOp(ast.Not(), negated))

    def _report(self, node: ast.stmt, expected: tuple[str, Any], value: ast.expr) -> ast.stmt:
        key = str(len(self.expected))
        self.expected[key] = expected
        call = ast.Call(ast.Name(REPORT, ast.Load()), [ast.Constant(key), value], [])
        return ast.copy_location(ast.Expr(call), node)
