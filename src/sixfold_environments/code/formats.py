"""Rows of code benchmarks as they are published: LiveCodeBench, APPS, HumanEval, MBPP, SWE-bench.

A format is recognised by its columns. Each row becomes a prompt, tests (`task_tests`) and, if it
has one, a reference solution.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .task_tests import TestsError

PREFIX = """from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import bisect, builtins, collections, copy, datetime, functools, heapq, io, itertools, json, math
import operator, random, re, statistics, string, sys
sys.setrecursionlimit(50000)
"""
"""Names that programs of LiveCodeBench and APPS may use without importing them: both benchmarks
run this first. The built-in functions come after modules that have functions of the same names.
"""


@dataclass(frozen=True)
class CodeRow:
    """A row of a code benchmark.

    Attributes:
        tests: tests of the task, as the column `tests`.
        identity: unique id within the benchmark.
        solution: reference solution, or None.
        replaced: columns that `tests` and `solution` replace.
    """

    prompt: str
    tests: Mapping[str, Any]
    identity: str
    solution: str | None
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class Format:
    """A published form of rows.

    Attributes:
        read: converts a row. Exceptions of a malformed row become TestsError in `read_row`.
    """

    columns: frozenset[str]
    read: Callable[[Mapping[str, Any]], CodeRow]


def recognise_format(fields: Mapping[str, Any]) -> str | None:
    """Name of the format that has these columns, or None."""
    return next((name for name, form in FORMATS.items() if form.columns <= fields.keys()), None)


def read_row(name: str, fields: Mapping[str, Any]) -> CodeRow:
    """Convert a row.

    Args:
        name: key of FORMATS.
        fields: column name to value.

    Raises:
        TestsError: if a column is missing or malformed.
    """
    form = FORMATS[name]
    missing = sorted(form.columns - fields.keys())
    if missing:
        raise TestsError(f"the row lacks columns of the format {name}: {', '.join(missing)}")
    try:
        return form.read(fields)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, TestsError):
            raise
        raise TestsError(
            f"not a row of {name}: {type(error).__name__}: {str(error)[:120]}"
        ) from error


def _humaneval(row: Mapping[str, Any]) -> CodeRow:
    stub, entry = row["prompt"], row["entry_point"]
    tests = {
        "type": "assert",
        "entry_point": entry,
        "setup": stub,
        "prefix": stub,
        "program": row["test"],
    }
    solution = row.get("canonical_solution")
    return CodeRow(
        prompt=(
            f"Complete the Python function `{entry}`. Reply with the whole function in one block of"
            f" Python code.\n\n{_code_block(stub)}"
        ),
        tests=tests,
        identity=str(row["task_id"]),
        solution=stub + solution if solution else None,
        replaced=("canonical_solution", "test"),
    )


def _mbpp(row: Mapping[str, Any]) -> CodeRow:
    first, *others = row["test_list"]
    hidden = [*others, *(row.get("challenge_test_list") or ())]
    setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or ())]
    question = row["text"] if row.get("text") else row["prompt"]
    return CodeRow(
        # The other tests stay hidden: shown tests can be hard-coded.
        prompt=(
            f"{question}\nReply with Python code in one block. It must pass this test, and others"
            f" of the same form:\n\n{_code_block(first)}"
        ),
        tests={
            "type": "assert",
            "asserts": [first],
            "hidden": hidden,
            "setup": "\n".join(setup),
            "prefix": "",
        },
        identity=str(row["task_id"]),
        solution=row["code"],
        replaced=("code", "test_list", "challenge_test_list", "test_setup_code", "test_imports"),
    )


def _apps(row: Mapping[str, Any]) -> CodeRow:
    given = _object(row["input_output"])
    inputs, outputs = given["inputs"], given["outputs"]
    name = given.get("fn_name")
    if len(inputs) != len(outputs):
        raise TestsError(f"{len(inputs)} inputs but {len(outputs)} outputs")
    if name:
        cases: list[Any] = [
            # APPS accepts a value also without the list around it.
            {"args": i, "expected": o, "also": o[:1] if isinstance(o, list) else []}
            for i, o in zip(inputs, outputs, strict=True)
        ]
        tests = {"type": "function", "fn_name": name, "hidden": cases, "prefix": PREFIX}
    else:
        pairs = list(zip(inputs, outputs, strict=True))
        tests = {"type": "stdin", "hidden": pairs, "prefix": PREFIX}
    solutions = _object(row.get("solutions") or "[]")
    identity = row.get("problem_id", row.get("id", ""))
    return CodeRow(
        prompt=_programming_prompt(row["question"], row.get("starter_code") or "", bool(name)),
        tests=tests,
        identity=str(identity),
        solution=str(solutions[0]) if solutions else None,
        replaced=("input_output", "solutions"),
    )


def _livecodebench(row: Mapping[str, Any]) -> CodeRow:
    public = _object(row["public_test_cases"])
    hidden = row["private_test_cases"]
    if isinstance(hidden, str):
        hidden = _object(hidden if hidden.lstrip().startswith("[") else unpack_text(hidden))
    kinds = {str(case["testtype"]) for case in (*public, *hidden)}
    starter = row.get("starter_code") or ""
    if kinds == {"functional"}:
        name = _object(row["metadata"])["func_name"]
        tests = {
            "type": "function",
            "fn_name": name,
            "public": [_functional(case) for case in public],
            "hidden": [_functional(case) for case in hidden],
            "prefix": PREFIX,
        }
    elif kinds == {"stdin"}:
        tests = {
            "type": "stdin",
            "public": [[case["input"], case["output"]] for case in public],
            "hidden": [[case["input"], case["output"]] for case in hidden],
            "prefix": PREFIX,
        }
    else:
        raise TestsError(f"unknown kinds of tests: {', '.join(sorted(kinds)) or 'no tests'}")
    return CodeRow(
        prompt=_programming_prompt(row["question_content"], starter, kinds == {"functional"}),
        tests=tests,
        identity=str(row["question_id"]),
        solution=None,
        replaced=("public_test_cases", "private_test_cases"),
    )


def _functional(case: Mapping[str, Any]) -> dict[str, Any]:
    """A functional case of LiveCodeBench: one argument per line, all values as JSON."""
    lines = [line for line in str(case["input"]).split("\n") if line.strip()]
    return {"args": [json.loads(line) for line in lines], "expected": json.loads(case["output"])}


def _swebench(row: Mapping[str, Any]) -> CodeRow:
    tests = {
        "type": "repository",
        "repository": row["repo"],
        "commit": row["base_commit"],
        "files": row.get("files"),
        "test_patch": row["test_patch"],
        "fail_to_pass": _names(row["FAIL_TO_PASS"]),
        "pass_to_pass": _names(row["PASS_TO_PASS"]),
    }
    return CodeRow(
        prompt=(
            f"Solve this issue of the repository {row['repo']}. Reply with one patch in git's"
            f" unified format, in a block of type diff.\n\n{row['problem_statement']}"
        ),
        tests=tests,
        identity=str(row["instance_id"]),
        solution=row.get("patch"),
        replaced=("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "files"),
    )


def _names(value: Any) -> list[str]:
    """Names of tests: a list, or its text as JSON or as Python writes it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = ast.literal_eval(value)
    if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise TestsError("FAIL_TO_PASS and PASS_TO_PASS are lists of names")
    return value


def _object(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _code_block(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _programming_prompt(question: str, starter: str, function: bool) -> str:
    if starter.strip() or function:
        start = f" Start with this code:\n\n{_code_block(starter)}" if starter.strip() else ""
        return f"{question}\n\nReply with a Python program in one block of code.{start}"
    return (
        f"{question}\n\nReply with a Python program in one block of code. It reads standard input"
        " and writes the answer to standard output."
    )


FORMATS = {
    "livecodebench": Format(
        frozenset({"question_content", "public_test_cases", "private_test_cases", "question_id"}),
        _livecodebench,
    ),
    "apps": Format(frozenset({"question", "input_output"}), _apps),
    "humaneval": Format(frozenset({"prompt", "test", "entry_point", "task_id"}), _humaneval),
    "mbpp": Format(frozenset({"test_list", "code", "task_id"}), _mbpp),
    "swebench": Format(
        frozenset(
            {"instance_id", "repo", "base_commit", "problem_statement", "test_patch"}
            | {"FAIL_TO_PASS", "PASS_TO_PASS"}
        ),
        _swebench,
    ),
}
"""Format by name, as `data.format` names it."""


LARGEST_TESTS = 256 << 20
"""Maximum number of bytes of the decompressed text."""

_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


class PackedTextError(ValueError):
    """The data is not one packed text."""


def unpack_text(packed: str) -> str:
    """The text in LiveCodeBench's packed form. No code can run.

    The pickle is not loaded. Its instructions are read as data, and only those that build one text
    are accepted.

    Args:
        packed: base64 of zlib of a pickle of one text.

    Raises:
        PackedTextError: if it is anything else, or larger than `LARGEST_TESTS`.
    """
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(packed, validate=True), LARGEST_TESTS)
        if reader.unconsumed_tail:
            raise PackedTextError(f"packed tests of more than {LARGEST_TESTS:,} bytes")
        steps = list(pickletools.genops(data))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise PackedTextError(f"packed tests cannot be read: {error}") from error
    texts = [argument for step, argument, _ in steps if step.name in _TEXTS]
    others = {step.name for step, _, _ in steps} - _TEXTS - _HARMLESS
    if others or len(texts) != 1 or not isinstance(texts[0], str):
        raise PackedTextError("packed tests are not one text (unpickling is disabled)")
    return texts[0]
