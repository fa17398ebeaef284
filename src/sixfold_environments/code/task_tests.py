"""Tests of a task: their three kinds, and how to read them from a data row.

A row has them in the column `tests`, an object or its JSON text:

- {"type": "function", "fn_name": "add", "cases": [{"args": [1, 2], "expected": 3}]}. A case may
  also have "kwargs" and "also" (a list of other right values), or be a pair [args, expected]. The
  name may be that of a method, `Solution.add` or `Solution().add`.
- {"type": "stdin", "cases": [{"input": "1 2\\n", "expected": "3\\n"}]}. A case may also be a pair
  [input, expected].
- {"type": "assert", "asserts": ["assert add(1, 2) == 3"], "setup": "import math"}. Or a
  "program" that asserts, as HumanEval's `check(candidate)`, with "fn_name".

Cases are public ("cases", "public", "public_cases") or hidden ("hidden", "hidden_cases"). Other
keys: "float_tol" (tolerance of numbers), "time_limit_s" (for all cases together), "memory_mb",
"language" (python, cpp, javascript) and "prefix" (source that runs before the candidate's).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sixfold.errors import nearest

from .languages import LANGUAGES
from .wire import Encoder, NotPlain

_PUBLIC = ("cases", "public", "public_cases", "asserts")
_HIDDEN = ("hidden", "hidden_cases")
_ENTRY = ("fn_name", "entry", "entry_point")

TEST_KEYS = (
    "type", *_PUBLIC, *_HIDDEN, *_ENTRY, "program", "language", "float_tol", "time_limit_s",
    "memory_mb", "setup", "imports", "prefix",
)  # fmt: skip
CASE_KEYS = {
    "function": ("args", "kwargs", "expected", "also"),
    "stdin": ("input", "expected"),
}
"""Keys of a case, by type of the tests."""


class TestsError(ValueError):
    """The tests of a task are missing or malformed. The completion is not at fault."""

    __test__ = False


@dataclass(frozen=True)
class Call:
    """One call of a function of the candidate.

    Attributes:
        name: a function, or a method of a class, `Solution.add`.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def encoded(self) -> list[Any]:
        """The call for `Candidate.call`.

        Raises:
            TestsError: if an argument is not plain data.
        """
        try:
            encoder = Encoder()
            return [self.name, encoder.encode(list(self.args)), encoder.encode(dict(self.kwargs))]
        except NotPlain as error:
            raise TestsError(f"an argument in the tests is {error}, which is not data") from error


@dataclass(frozen=True)
class FunctionCase:
    """A call and the value that it must return.

    Attributes:
        also: other values that are right.
    """

    call: Call
    expected: Any
    also: tuple[Any, ...] = ()


@dataclass(frozen=True)
class InputCase:
    """Text on standard input, and what the program must print."""

    given: str
    expected: str


@dataclass(frozen=True)
class AssertCase:
    """A piece of Python that raises if the candidate is wrong."""

    source: str


Case = FunctionCase | InputCase | AssertCase


@dataclass(frozen=True)
class Tests:
    """Tests of one task.

    Attributes:
        kind: "function", "stdin" or "assert".
        cases: all cases, the public ones first.
        public: number of public cases.
        tolerance: largest difference of two numbers, as in `compare.Rules`. None: exact.
        time_limit_s: seconds for all cases together. None: the default limit.
        memory_mb: memory limit. None: the default limit.
        setup: source that runs before the cases of kind "assert".
        prefix: source that runs before the candidate, such as the code in the prompt.
        entry: the function or method (`Solution.add`) that is tested, or "".
    """

    __test__ = False

    kind: str
    cases: tuple[Case, ...]
    public: int = 0
    language: str = "python"
    tolerance: float | None = None
    time_limit_s: float | None = None
    memory_mb: int | None = None
    setup: str = ""
    prefix: str = ""
    entry: str = ""


def tests_object(value: Any) -> Mapping[str, Any]:
    """Read the object in a column `tests`.

    Args:
        value: an object, or its JSON text.

    Raises:
        TestsError: if the value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise TestsError(f"tests are not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise TestsError("the task has no tests")
    return value


def read_tests(value: Mapping[str, Any]) -> Tests:
    """Read the tests of a program from a column of a data row.

    Raises:
        TestsError: if the tests are missing or malformed.
    """
    kind = {"stdio": "stdin", "stdin": "stdin", "function": "function", "assert": "assert"}.get(
        str(value.get("type"))
    )
    if kind is None:
        raise TestsError(
            f"unknown type of tests {value.get('type')!r}: use function, stdin or assert"
        )
    _check_keys(value, TEST_KEYS, "tests")
    entry = _entry(next((str(value[k]) for k in _ENTRY if value.get(k)), ""))
    if kind == "function" and not entry:
        raise TestsError("function tests need the name of the function in 'fn_name'")
    public, hidden = (
        [_case(case, kind, entry) for key in keys for case in _list_of(value, key)]
        for keys in (_PUBLIC, _HIDDEN)
    )
    if isinstance(value.get("program"), str):
        hidden.append(AssertCase(value["program"]))
    if not public and not hidden:
        raise TestsError("the task has no tests")
    language = str(value.get("language") or "python").lower()
    if language not in LANGUAGES:
        raise TestsError(f"unknown language {language!r}: use {', '.join(LANGUAGES)}")
    if (kind == "assert" and language != "python") or (kind == "function" and language == "cpp"):
        raise TestsError(f"tests of type {kind} do not work for {language}: use stdin tests")
    return Tests(
        kind=kind,
        cases=(*public, *hidden),
        public=len(public),
        language=language,
        tolerance=positive(value, "float_tol"),
        time_limit_s=positive(value, "time_limit_s"),
        memory_mb=int(memory) if (memory := positive(value, "memory_mb")) else None,
        setup=_setup(value),
        prefix=str(value.get("prefix") or ""),
        entry=entry,
    )


def _entry(name: str) -> str:
    """The name of the tested function: `add`, or `Solution.add` also for `Solution().add`."""
    parts = re.sub(r"\(\s*\)(?=\.|$)", "", name.strip()).split(".")
    if name and (len(parts) > 2 or not all(part.isidentifier() for part in parts)):
        raise TestsError(
            f"the tests name the function {name[:60]!r}: use a name, or Class.method for a method"
        )
    return ".".join(parts)


def _check_keys(value: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in value:
        if key not in known:
            hint = nearest(str(key), list(known))
            raise TestsError(f"{what} have an unknown key {key!r}.{hint} Known: {', '.join(known)}")


def _list_of(value: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = value.get(key)
    if found is None:
        return ()
    if not isinstance(found, list | tuple):
        raise TestsError(f"{key!r} of the tests must be a list")
    return found


def _setup(value: Mapping[str, Any]) -> str:
    parts = [value.get("setup"), *_list_of(value, "imports")]
    if any(part is not None and not isinstance(part, str) for part in parts):
        raise TestsError("'setup' of the tests must be Python source")
    return "\n".join(part for part in parts if part)


def positive(value: Mapping[str, Any], key: str) -> float | None:
    """A positive number among the keys of the tests, or None if the key is missing."""
    found = value.get(key)
    if found is None:
        return None
    good = isinstance(found, int | float) and not isinstance(found, bool)
    if not (good and math.isfinite(found) and found > 0):
        raise TestsError(f"{key!r} of the tests must be a positive number, is {found!r}")
    return float(found)


def _case(case: Any, kind: str, entry: str) -> Case:
    if kind == "assert":
        if not isinstance(case, str):
            raise TestsError("an assert test must be Python source")
        return AssertCase(case)
    if isinstance(case, list | tuple) and len(case) == 2:
        case = {"args" if kind == "function" else "input": case[0], "expected": case[1]}
    if not isinstance(case, Mapping) or "expected" not in case:
        raise TestsError(f"a {kind} test has no 'expected' output: {str(case)[:60]}")
    _check_keys(case, CASE_KEYS[kind], f"cases of {kind} tests")
    if kind == "stdin":
        given, expected = _text(case.get("input", "")), _text(case["expected"])
        return InputCase(given, expected)
    args, kwargs = case.get("args", ()), case.get("kwargs") or {}
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise TestsError(f"a function test needs a list of 'args': {str(case)[:60]}")
    return FunctionCase(Call(entry, args, kwargs), case["expected"], tuple(_list_of(case, "also")))


def _text(value: Any) -> str:
    """Text of an input or output. A list is its lines; {"$repeat": [text, n]} is n times text."""
    match value:
        case str():
            return value
        case {"$repeat": [str(text), int(times)]} if len(text) * times <= 1 << 26:
            return text * times
        case [*lines] if all(isinstance(line, str) for line in lines):
            return "\n".join(lines)
    raise TestsError(f"input and output of a stdin test must be text: {str(value)[:60]}")
