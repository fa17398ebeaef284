"""Assert tests: `assert f(1, 2) == 3`, and programs such as HumanEval's `check(candidate)`.

Most asserts compare a call that has literal arguments with a literal. Those become function cases:
the candidate gets the call, and the trusted side compares. All other tests run in a separate
sandbox, without the candidate (`test_program`).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .task_tests import AssertCase, Call, FunctionCase, Tests, TestsError


class Program(NamedTuple):
    """Tests that run as a program.

    Attributes:
        setup: source that runs first.
        units: sources that pass or raise, one per case.
        names: functions and classes of the candidate that the tests use.
    """

    setup: str
    units: tuple[str, ...]
    names: tuple[str, ...]


def parsed_asserts(tests: Tests) -> tuple[FunctionCase, ...] | Program:
    """Parse assert tests: as function cases if all of them have that form, else as a program.

    Raises:
        TestsError: if the tests do not compile, assert nothing, or use no name of the candidate.
    """
    sources = [case.source for case in tests.cases if isinstance(case, AssertCase)]
    setup = _parse(tests.setup, "setup of the tests")
    units = [_parse(source, "a test") for source in sources]
    for unit in units:
        if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(unit)):
            raise TestsError(f"a test asserts nothing: {ast.unparse(unit)[:80]!r}")
    names = _names_of_candidate([setup, *units], tests.entry)
    if not names:
        raise TestsError("the tests never use the candidate's code")
    cases: list[FunctionCase] = []
    for unit in units:
        found = _function_cases(unit, names, tests.entry)
        if found is None:
            called = [
                _with_check(unit, source, tests.entry)
                for unit, source in zip(units, sources, strict=True)
            ]
            return Program(tests.setup, tuple(called), tuple(sorted(names)))
        cases += found
    return tuple(cases)


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(f"{what} does not compile: {error}") from error


def _with_check(unit: ast.Module, source: str, entry: str) -> str:
    """The test, with a call of `check` if it only defines that function."""
    defines = any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in unit.body)
    calls = any(
        isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and _called(n.value) == "check"
        for n in unit.body
    )
    return f"{source}\ncheck({entry})\n" if defines and not calls and entry else source


def _names_of_candidate(trees: Iterable[ast.Module], entry: str) -> set[str]:
    """Names that the tests read and do not define."""
    read: set[str] = {entry} if entry else set()
    bound: set[str] = set()
    methods: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, ast.Call) and "." in (method := _called(node)):
                methods.add(method)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
    found = {name for name in read - bound if name not in vars(builtins)}
    found |= {method for method in methods if method.partition(".")[0] in found}
    # A prompt in the setup often defines a stub of the function that is tested.
    return found | {entry} if entry else found


def _function_cases(unit: ast.Module, names: set[str], entry: str) -> list[FunctionCase] | None:
    """Function cases of a test, or None if it has another form."""
    body: Sequence[ast.stmt] = unit.body
    aliases = dict(zip(names, names, strict=True))
    check = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if check and entry:
        arguments = check[0].args.args
        rest = [n for n in body if n is not check[0]]
        if len(arguments) != 1 or not all(_is_idle(n) or _calls_check(n, entry) for n in rest):
            return None
        aliases[arguments[0].arg] = entry
        body = check[0].body
    cases = []
    for statement in body:
        if _is_idle(statement):
            continue
        case = _function_case(statement, aliases)
        if case is None:
            return None
        cases.append(case)
    return cases or None


def _is_idle(statement: ast.stmt) -> bool:
    """True for docstrings, `pass`, `assert True` and assignments of literals such as METADATA."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and bool(statement.test.value)
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id == "METADATA" for t in statement.targets)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _calls_check(statement: ast.stmt, entry: str) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Name("check"), [tested], [])):
            return ast.unparse(tested).replace("()", "") == entry
    return False


def _function_case(statement: ast.stmt, names: dict[str, str]) -> FunctionCase | None:
    """The case of `assert f(...) == literal` or `assert f(...) is None`."""
    if not isinstance(statement, ast.Assert):
        return None
    match statement.test:
        case ast.Compare(left, [ast.Eq()], [right]):
            sides = ((left, right), (right, left))
        case ast.Compare(left, [ast.Is()], [ast.Constant(None) as nothing]):
            sides = ((left, nothing), (nothing, left))
        case _:
            return None
    for call, literal in sides:
        found = _literal_call(call, names)
        expected = _literal(literal)
        if found is not None and expected is not None:
            return FunctionCase(found, expected[0])
    return None


def _literal_call(node: ast.expr, names: dict[str, str]) -> Call | None:
    if not (isinstance(node, ast.Call) and _called(node) in names):
        return None
    args = [_literal(argument) for argument in node.args]
    kwargs = {k.arg: _literal(k.value) for k in node.keywords if k.arg is not None}
    if None in args or None in kwargs.values() or len(kwargs) < len(node.keywords):
        return None
    return Call(
        names[_called(node)],
        [argument[0] for argument in args if argument],
        {name: value[0] for name, value in kwargs.items() if value},
    )


def _called(node: ast.Call) -> str:
    """`f` for a call of f, and `Class.method` for Class().method(...). Else empty."""
    match node.func:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Call(ast.Name(owner), [], []), method):
            return f"{owner}.{method}"
    return ""


def _literal(node: ast.expr) -> tuple[object] | None:
    """The value of a literal in a tuple, or None if the node is not a literal."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
