"""Rows of code benchmarks in their published forms."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from sixfold_environments.code.asserts import Program, parsed_asserts
from sixfold_environments.code.formats import (
    PackedTextError,
    read_row,
    recognise_format,
    unpack_text,
)
from sixfold_environments.code.task_tests import FunctionCase, InputCase, TestsError, read_tests
from sixfold_environments.code.verifier import task_tests


def packed(value: Any, protocol: int = 4) -> str:
    """A value in LiveCodeBench's packed form."""
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'def double(x: int) -> int:\n    """ Twice x.\n    >>> double(2)\n    4\n    """\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
    "    assert candidate(2) == 4\n    assert candidate(-1) == -2, 'sign'\n    assert True\n",
}
MBPP = {
    "task_id": 901,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": ["assert add(-1, 1) == 0"],
}
STDIN_CASE = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
LIVECODEBENCH = {
    "question_title": "Sum",
    "question_content": "Print the sum of two integers.",
    "question_id": "abc901_a",
    "starter_code": "",
    "public_test_cases": json.dumps([STDIN_CASE]),
    "private_test_cases": packed(json.dumps([{**STDIN_CASE, "input": "2 2", "output": "4"}])),
    "metadata": "{}",
}
FUNCTIONAL = {
    **LIVECODEBENCH,
    "starter_code": "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        ",
    "public_test_cases": json.dumps(
        [{"input": "1\n[2, 3]", "output": "6", "testtype": "functional"}]
    ),
    "private_test_cases": "[]",
    "metadata": json.dumps({"func_name": "add"}),
}
APPS = {
    "problem_id": 902,
    "question": "Print the sum.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
    "input_output": json.dumps({"inputs": ["1 2\n", ["1", "2"]], "outputs": ["3\n", ["3"]]}),
    "starter_code": "",
}
APPS_CALLS = {
    **APPS,
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}),
}
SWEBENCH = {
    "instance_id": "some__project-1",
    "repo": "some/project",
    "base_commit": "abc",
    "patch": "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n",
    "test_patch": "--- /dev/null\n+++ b/test_m.py\n@@ -0,0 +1,5 @@\n+import m\n+def test_x():\n"
    "+    assert m.x == 2\n+def test_type():\n+    assert isinstance(m.x, int)\n",
    "problem_statement": "x must be 2",
    "FAIL_TO_PASS": '["test_m.py::test_x"]',
    "PASS_TO_PASS": "['test_m.py::test_type']",
    "files": {"m.py": "x = 1\n"},
}
ROWS = {
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "livecodebench": LIVECODEBENCH,
    "apps": APPS,
    "swebench": SWEBENCH,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_recognised_by_its_columns(name: str) -> None:
    assert recognise_format(ROWS[name]) == name
    assert recognise_format({"question": "1+1?", "answer": "2"}) is None


@pytest.mark.parametrize("name", ROWS)
def test_no_expected_output_of_a_hidden_test_is_in_the_prompt_or_the_other_columns(
    name: str,
) -> None:
    found = read_row(name, ROWS[name])
    left = {key: value for key, value in ROWS[name].items() if key not in found.replaced}
    assert not {"test", "test_list", "private_test_cases", "input_output", "test_patch"} & {*left}
    assert task_tests(found.tests)
    for hidden in ("add(0, 0)", "add(-1, 1)", "m.x == 2", "2 * x"):
        assert hidden not in found.prompt


def test_humaneval_becomes_calls_with_expected_values() -> None:
    found = read_row("humaneval", HUMANEVAL)
    assert found.identity == "HumanEval/900"
    assert found.solution == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    cases = parsed_asserts(read_tests(found.tests))
    assert not isinstance(cases, Program)
    assert [(case.call.name, case.call.args, case.expected) for case in cases] == [
        ("double", [2], 4),
        ("double", [-1], -2),
    ]


def test_mbpp_shows_the_first_test_only() -> None:
    found = read_row("mbpp", MBPP)
    tests = read_tests(found.tests)
    assert "assert add(1, 2) == 3" in found.prompt
    assert (len(tests.cases), tests.public) == (3, 1)


def test_livecodebench_unpacks_private_tests() -> None:
    tests = read_tests(read_row("livecodebench", LIVECODEBENCH).tests)
    assert tests.cases == (InputCase("1 2\n", "3\n"), InputCase("2 2", "4"))
    assert tests.public == 1
    found = read_row("livecodebench", FUNCTIONAL)
    (case,) = read_tests(found.tests).cases
    assert isinstance(case, FunctionCase)
    assert (case.call.name, case.call.args, case.expected) == ("add", [1, [2, 3]], 6)
    assert "class Solution" in found.prompt


def test_apps_has_programs_and_functions() -> None:
    found = read_row("apps", APPS)
    assert read_tests(found.tests).cases == (InputCase("1 2\n", "3\n"), InputCase("1\n2", "3"))
    assert found.solution == "print(sum(map(int, input().split())))"
    (case,) = read_tests(read_row("apps", APPS_CALLS).tests).cases
    assert isinstance(case, FunctionCase)
    assert (case.call.args, case.expected, case.also) == ([1, 2], [3], (3,))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("humaneval", {"test": 5}),
        ("mbpp", {"test_list": []}),
        ("livecodebench", {"private_test_cases": "not base64!"}),
        ("livecodebench", {"public_test_cases": "[]", "private_test_cases": "[]"}),
        ("apps", {"input_output": "{}"}),
        ("apps", {"input_output": '{"inputs": ["1"], "outputs": []}'}),
        ("swebench", {"FAIL_TO_PASS": "__import__('os')"}),
        ("swebench", {"files": None}),
        ("swebench", {"FAIL_TO_PASS": "[]"}),
        ("swebench", {"FAIL_TO_PASS": '["test_m.py::test_y"]'}),
    ],
)
def test_a_malformed_row_is_an_error_of_the_tests(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(TestsError):
        task_tests(read_row(name, ROWS[name] | change).tests)


class Evil:
    """Runs code if it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_packed_text_of_every_pickle_protocol_is_read(protocol: int) -> None:
    for text in ("", "[1]", "é" * 70_000):
        assert unpack_text(packed(text, protocol)) == text


@pytest.mark.parametrize(
    "data",
    [packed(value) for value in (Evil(), ["a"], ("a", "b"), 5, {"a": Evil()}, b"x", None)]
    + ["", "!!", base64.b64encode(b"x").decode(), base64.b64encode(zlib.compress(b"x")).decode()],
)
def test_nothing_else_is_unpacked(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PackedTextError):
        unpack_text(data)
    assert "unpickled" not in capsys.readouterr().out
