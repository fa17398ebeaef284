"""Replies of a hostile program: every field of every reply, with every type of JSON.

A fake sandbox answers each job with a forged reply, as a program that has taken over its process
would. No reply may make the checker raise, and none that is malformed earns a reward.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from sixfold.environment.grade import Grade
from sixfold_environments.code.verifier import CodeVerifier, task_tests
from sixfold_environments.sandbox.job import Ended, Job, Limits

DEEP = "[" * 900 + "]" * 900
VALUES = [
    "null", "true", "false", "0", "-1", "3", "1.5", "1e999", "NaN", "-Infinity", '""', '"text"',
    '"\\ud800"', '"a\\n\\u001b[31mb"', "[]", "[1]", "[[]]", '["passed"]', "{}", '{"a": 1}',
    '{"i": "0x' + "f" * 400 + '"}', '{"i": 5}', '{"i": "z"}', '{"f": "nan"}', '{"f": []}',
    '{"f": "0x1p99999"}', '{"d": 1}', '{"d": [[1]]}', '{"d": [[{"d": []}, 1]]}', '{"t": {}}',
    '{"d": [[{"i": "0x' + "f" * 400 + '"}, 1]]}', '{"s": [[]]}', '{"b": 1}', '{"c": [1]}',
    '{"r": 0}', "9" * 4000, "9" * 5000, DEEP, '{"a":' * 300 + "1" + "}" * 300,
    '"compile_error"', '"passed"', '"infrastructure_error"', "123456789012345678901",
]  # fmt: skip
EXPECTED: list[Any] = [3, 1.5, "text", [1, 2], {"a": 1}, {"b": {"c": [1]}}, None, True, 10**400]
FUNCTION = {"type": "function", "fn_name": "f"}
STDIN = {"type": "stdin", "cases": [["1", "never this"]]}
ASSERTS = {"type": "assert", "asserts": ["assert sorted([f(1), f(2)]) == [71, 72]"]}
REPOSITORY = {
    "type": "repository",
    "files": {
        "m.py": "X = 1\n",
        "test_m.py": "from m import X\ndef test_x():\n    assert X == 7\n",
    },
    "fail_to_pass": ["test_m.py::test_x"],
}
PATCH = "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-X = 1\n+X = 2\n"


class ForgingSandbox:
    """Answers every job with given lines. NONCE in a line is that of the job."""

    isolation = "namespaces"

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    async def run_python(self, job: Job) -> Ended:
        nonce = json.loads(job.stdin)["nonce"]
        result = "\n".join(nonce + line for line in self._lines).encode()
        return Ended("passed", 0, b"", b"", 0.1, self.isolation, result=result)

    run = run_python


def graded(tests: dict[str, Any], lines: list[str], code: str = "def f(x): pass") -> Grade:
    verifier = CodeVerifier(ForgingSandbox(lines), Limits())  # type: ignore[arg-type]
    kind = "diff" if tests["type"] == "repository" else "python"
    text = f"```{kind}\n{code}\n```"
    grade = asyncio.run(verifier.grade(text, task_tests(tests), fraction=True))
    json.dumps(grade.to_record()).encode()
    grade.detail.encode()
    return grade


def forms(template: str, fields: int) -> list[str]:
    """The template with each field replaced by each value, the others being plausible."""
    plausible = {"case": "0", "value": "1", "failure": "null", "detail": '""', "end": "true"}
    names = [name for name in plausible if f"<{name}>" in template]
    made = []
    for name, value in itertools.product(names, VALUES):
        line = template.replace(f"<{name}>", value)
        for other, text in plausible.items():
            line = line.replace(f"<{other}>", text)
        made.append(line)
    assert len(names) == fields
    return made


REPLIES = [
    *forms('{"case": <case>, "value": <value>}', 2),
    *forms('{"case": <case>, "text": <value>}', 2),
    *forms('{"case": <case>, "failure": <failure>, "detail": <detail>}', 3),
    *forms('{"failure": <failure>, "detail": <detail>}', 2),
    *forms('{"end": <end>}', 1),
    *VALUES,
]  # fmt: skip


@pytest.mark.parametrize("tests", [FUNCTION, STDIN], ids=["function", "stdin"])
def test_a_forged_reply_of_the_harness_is_no_fault_of_the_checker(tests: dict[str, Any]) -> None:
    for number, line in enumerate(REPLIES):
        wanted = EXPECTED[number % len(EXPECTED)]
        given = {**tests, "cases": [[[1], wanted]]} if tests is FUNCTION else tests
        grade = graded(given, [line])
        claimed = tests is FUNCTION and '"value"' in line
        assert grade.value == 0.0 or claimed, (line[:80], grade)
        assert grade.verdict != "infrastructure_error", line[:80]


@pytest.mark.parametrize("expected", EXPECTED, ids=repr)
def test_a_claimed_value_of_any_form_is_compared(expected: Any) -> None:
    tests = {**FUNCTION, "cases": [[[1], expected]]}
    for value in VALUES:
        line = f'{{"case": 0, "value": {value}}}'
        grade = graded(tests, [line])
        assert grade.value == float(is_claim(value, expected)), (value[:80], expected, grade)


def is_claim(value: str, expected: Any) -> bool:
    """True if the JSON text is a right value: a float may be written as an integer."""
    if value in ("9" * 5000, DEEP):
        return False
    read = json.loads(value)
    if isinstance(read, bool) or isinstance(expected, bool) or not isinstance(read, int):
        same = type(read) is type(expected) and read == expected
        return same and not isinstance(read, list | dict | float)
    return bool(isinstance(expected, int | float) and read == expected)


@pytest.mark.parametrize("failure", ["[]", "{}", "[[1]]", "true", "1", '"unheard of"', '"timeout"'])
def test_a_failure_of_another_type_is_a_protocol_error(failure: str) -> None:
    tests = {**FUNCTION, "cases": [[[1], 1]]}
    for line in (f'{{"case": 0, "failure": {failure}}}', f'{{"failure": {failure}}}'):
        assert graded(tests, [line]).verdict == "protocol_error"


def test_forged_replies_of_the_program_of_tests() -> None:
    """The tests' own process sees answers of the candidate, so its reply is read with care too."""
    lines = [
        *(f'{{"units": {value}, "calls": 1}}' for value in VALUES),
        *(f'{{"units": [["passed", ""]], "calls": {value}}}' for value in VALUES),
        *(f'{{"units": [[{value}, ""]], "calls": 1}}' for value in VALUES),
        *(f'{{"units": [["wrong_answer", {value}]], "calls": 1}}' for value in VALUES),
        *(f'{{"missing": {value}}}' for value in VALUES),
        *(f'{{"missing": [["f", {value}, {value}]]}}' for value in VALUES),
        *VALUES,
    ]
    for line in lines:
        graded(ASSERTS, [line])


@pytest.mark.nightly
def test_forged_reports_of_a_repository() -> None:
    end = '["test_m.py::test_x", "end", "passed"]'
    lines = [
        *(f'["test_m.py::test_x", "0", {value}]' for value in VALUES),
        *(f'["test_m.py::test_x", {value}, 7]' for value in VALUES),
        *(f'[{value}, "0", 7]' for value in VALUES),
        *(f'["test_m.py::test_x", "end", {value}]' for value in VALUES),
        *VALUES,
    ]
    for line in lines:
        assert graded(REPOSITORY, [line, end], PATCH).value == 0.0, line[:80]
        assert graded(REPOSITORY, [line], PATCH).value == 0.0, line[:80]
