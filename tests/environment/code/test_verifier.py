"""Verdicts on programs, each run in a sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sixfold.environment.grade import Grade
from sixfold_environments.code import languages
from sixfold_environments.code.formats import PREFIX
from sixfold_environments.code.languages import LANGUAGES, Language
from sixfold_environments.code.results import Result
from sixfold_environments.code.task_tests import TestsError, read_tests
from sixfold_environments.code.verifier import REPEATS, CodeVerifier, task_tests
from sixfold_environments.sandbox.job import Limits
from sixfold_environments.sandbox.sandbox import Sandbox

ADD = {
    "type": "function",
    "fn_name": "add",
    "cases": [{"args": [1, 2], "expected": 3}, [[10, 32], 42]],
    "hidden": [{"args": [-5], "kwargs": {"b": 5}, "expected": 0}],
}
RIGHT = "def add(a, b):\n    return a + b\n"
SUM = {
    "type": "stdin",
    "public": [["2 3\n", "5\n"]],
    "hidden": [["10 20\n", "30\n"], ["-1 1", "0"]],
}
CHECK = """
def check(candidate):
    for x in range(20):
        assert candidate(x) == helper(x)
    assert abs(candidate(0.5) - 1.5) < 1e-6
    try:
        candidate("a")
        assert False, "no error"
    except TypeError:
        pass
"""
PROGRAM = {
    "type": "assert",
    "entry_point": "inc",
    "setup": "def helper(x):\n    return x + 1\ndef inc(x):\n    ''' '''\n",
    "prefix": "def helper(x):\n    return x + 1\n",
    "program": CHECK,
}
LISTS = {**ADD, "prefix": PREFIX}
PLUS = {"type": "stdin", "prefix": PREFIX, "cases": [["2 3\n", "5\n"], ["1 1", "2"]]}
PAIRS = {"type": "assert", "asserts": ["assert total([Pair(1, 2), Pair(3, 4)], 2) == 10"]}


def run(*work: Any) -> list[Any]:
    """Results of calls of a verifier, run concurrently."""

    async def all_of(verifier: CodeVerifier) -> list[Any]:
        return await asyncio.gather(*(call(verifier) for call in work))

    with Sandbox(slots=4) as sandbox:
        return asyncio.run(all_of(CodeVerifier(sandbox, Limits(wall_s=10.0))))


def results(*pairs: tuple[str, dict[str, Any]]) -> list[Result]:
    def call(code: str, tests: dict[str, Any]) -> Any:
        return lambda verifier: verifier.check(code, read_tests(tests))

    return run(*(call(code, tests) for code, tests in pairs))


def verdicts(*pairs: tuple[str, dict[str, Any]]) -> list[str]:
    return [result.grade(fraction=False).verdict for result in results(*pairs)]


def test_every_kind_of_test_accepts_right_programs() -> None:
    found = verdicts(
        (RIGHT, ADD),
        ("class Solution:\n    def add(self, a, b): return a + b", ADD),
        ("import random\n" + RIGHT, ADD),
        ("print(sum(map(int, input().split())))", SUM),
        ("import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.buffer.read().split()))))", SUM),
        ("a, b = map(int, input().split())\nprint(a + b, end='  \\n\\n')\nexit()", SUM),
        (
            "import atexit\na, b = map(int, input().split())\natexit.register(print, a + b)",
            SUM,
        ),
        ("def inc(x): return helper(x)", PROGRAM),
        ("class Solution:\n    def add(self, a: List[int], b): return sum([a, b])", LISTS),
        ("print(pow(2, sum(map(int, input().split())), 10**9).bit_length() - 1)", PLUS),
        (
            "class Pair:\n    def __init__(self, a, b): self.both = a + b\n"
            "def total(pairs, n): return sum(p.both for p in pairs[:n])",
            PAIRS,
        ),
    )
    assert found == ["passed"] * len(found)


METHOD = "class Solution:\n    def add(self, a, b): return a + b\n"
OF_ANOTHER = METHOD.replace("Solution", "Sums")
METHOD_JS = "class Solution { add(a, b) { return a + b; } }"
BY_CHECK = (
    "def check(candidate):\n    for i in range(4):\n        assert candidate(i, 2) == i + 2\n"
)
WITH_CALL = BY_CHECK + "check(Solution().add)\n"
LITERAL = "def check(candidate):\n    assert candidate(1, b=2) == 3\n"


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "fn_name": name, "cases": [[[1, 2], 3], [[5, 9], 14]], **more}


def checked(name: str, program: str) -> dict[str, Any]:
    return {"type": "assert", "entry_point": name, "program": program}


def test_an_entry_point_may_be_a_class_and_a_method() -> None:
    """As LeetCode, LiveCodeBench and LeetCodeDataset write them: Solution.add, Solution().add."""
    both = METHOD + "def add(a, b): return 0\n"
    js = {"language": "javascript"}
    right = [
        (METHOD, entry("Solution.add")), (METHOD, entry("Solution().add")), (METHOD, entry("add")),
        (RIGHT, entry("Solution.add")), (OF_ANOTHER, entry("Sums.add")),
        (both, entry("Solution.add")),
        (METHOD_JS, entry("Solution.add", **js)), (METHOD_JS, entry("add", **js)),
        ("const add = (a, b) => a + b", entry("Solution.add", **js)),
        (METHOD, checked("Solution().add", LITERAL)), (METHOD, checked("Solution().add", BY_CHECK)),
        (METHOD, checked("Solution.add", WITH_CALL)),
        (METHOD, {"type": "assert", "asserts": ["assert Solution().add(1, 2) == 3"]}),
        (METHOD, {"type": "assert", "asserts": ["assert [Solution().add(1, 2)] == [3]"]}),
    ]  # fmt: skip
    wrong = [(code.replace("a + b", "a - b"), tests) for code, tests in right]
    wrong.append((both, entry("add")))
    assert verdicts(*right) == ["passed"] * len(right)
    assert "passed" not in verdicts(*wrong)


@pytest.mark.parametrize("name", ["a.b.c", "Solution.", "add()x", "1add", "a b"])
def test_a_malformed_entry_point_is_an_error_of_the_tests(name: str) -> None:
    with pytest.raises(TestsError, match="use a name, or Class"):
        read_tests(entry(name))


@pytest.mark.nightly
def test_a_program_that_decides_by_an_address_runs_in_several_processes() -> None:
    """One process has one layout of addresses, so runs in it would always agree."""
    by_address = [
        "X = id(object())\ndef add(a, b): return a + b",
        "X = repr(object())\ndef add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b): return a + b if str(self) else 0",
        "class Solution:\n    def add(self, a, b): return a + b if f'{self}' else 0",
    ]

    async def runs(code: str) -> int:
        made = 0

        class Counting(Sandbox):
            async def run_python(self, job: Any) -> Any:
                nonlocal made
                made += 1
                return await super().run_python(job)

        with Counting(slots=2) as sandbox:
            verifier = CodeVerifier(sandbox, Limits(wall_s=20.0))
            assert (await verifier.check(code, read_tests(ADD))).passed
        return made

    assert [asyncio.run(runs(code)) for code in by_address] == [1 + REPEATS] * 4
    assert asyncio.run(runs(RIGHT)) == 1


def test_wrong_programs_get_the_verdict_that_says_why() -> None:
    cases: dict[tuple[str, str], dict[str, Any]] = {
        ("def add(a, b): return a - b", "wrong_answer"): ADD,
        ("def add(a, b): return float(a + b)", "wrong_answer"): ADD,
        ("def add(a, b): return str(a + b)", "wrong_answer"): ADD,
        ("def add(a, b): return {0: False}.get(a + b, a + b)", "wrong_answer"): ADD,
        (
            "import random\ndef add(a, b): return a + b + (random.random() < 0.5)",
            "wrong_answer",
        ): ADD,
        ("def add(a, b): return (a + b for _ in [1])", "protocol_error"): ADD,
        ("def add(a, b): return a.b", "runtime_error"): ADD,
        ("def sub(a, b): return a - b", "runtime_error"): ADD,
        ("from_prefix = None", "runtime_error"): LISTS,
        ("def add(a, b: return a", "compile_error"): ADD,
        ("def add(a, b): return bytearray(1 << 40)", "out_of_memory"): ADD,
        ("def add(a, b):\n    while True: pass", "timeout"): {**ADD, "time_limit_s": 0.3},
        ("while True: print('x' * 100000)", "output_limit"): ADD,
        ("print(5)\nprint(30)\nprint(0)", "wrong_answer"): SUM,
        ("print(sum(map(float, input().split())))", "wrong_answer"): SUM,
        ("print(sum(map(int, input().split())))\nraise SystemExit(3)", "runtime_error"): SUM,
        ("import time\nprint(5, flush=True)\ntime.sleep(9)", "timeout"): {
            **SUM,
            "time_limit_s": 0.3,
        },
        ("while 1: print('x' * 100000)", "output_limit"): SUM,
        ("def inc(x): return x + 2", "wrong_answer"): PROGRAM,
        ("def inc(x): return x + 1 if x != 'a' else None", "wrong_answer"): PROGRAM,
        ("def inc(x): raise KeyError", "wrong_answer"): PROGRAM,
        ("import os\ndef inc(x): os._exit(0)", "runtime_error"): PROGRAM,
    }
    expected = [verdict for _, verdict in cases]
    assert verdicts(*((code, tests) for (code, _), tests in cases.items())) == expected


def test_the_fraction_counts_hidden_tests() -> None:
    half = "print({'2 3': 5, '10 20': 30}.get(input()))"
    (result,) = results((half, SUM))
    assert result.grade(fraction=True, first=1).value == 0.5
    assert result.grade(fraction=False).value == 0.0
    assert result.grade(fraction=True, first=1).isolation == "namespaces"


def test_the_grade_of_a_completion_needs_a_code_block() -> None:
    tests = read_tests(ADD)
    good, bare = run(
        lambda v: v.grade(f"Here:\n```python\n{RIGHT}```", tests, fraction=False),
        lambda v: v.grade(RIGHT, tests, fraction=False),
    )
    assert (good.value, good.verdict) == (1.0, "passed")
    assert (bare.value, bare.verdict) == (0.0, "rejected")


@pytest.mark.skipif(bool(LANGUAGES["cpp"].missing), reason="no C++ compiler")
def test_cpp_programs_are_compiled_once_and_run_on_inputs() -> None:
    tests = {**SUM, "language": "cpp"}
    source = (
        '#include <cstdio>\nint main() { int a, b; scanf("%d %d", &a, &b);'
        ' printf("%d", a BODY b); }'
    )
    found = results(
        (source.replace("BODY", "+"), tests),
        (source.replace("BODY", "-"), tests),
        ("int main(", tests),
    )
    grades = [result.grade(fraction=False) for result in found]
    assert [grade.verdict for grade in grades] == ["passed", "wrong_answer", "compile_error"]
    assert "error" in grades[2].detail


@pytest.mark.skipif(bool(LANGUAGES["javascript"].missing), reason="no node")
def test_javascript_has_functions_and_programs() -> None:
    read = "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number);"
    add, total = {**ADD, "language": "javascript", "hidden": []}, {**SUM, "language": "javascript"}
    found = verdicts(
        ("const add = (a, b) => a + b", add),
        ("function add(a, b) { return {valueOf: () => a + b} }", add),
        ("function add(a, b { return a }", add),
        ("process.exit(0)", add),
        (f"{read} console.log(a + b)", total),
        (f"{read} console.log(a - b)", total),
    )
    assert found == [
        *("passed", "protocol_error", "compile_error", "runtime_error"),
        *("passed", "wrong_answer"),
    ]


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        (None, "no tests"),
        ("", "not JSON"),
        ({"type": "function", "fn_name": "f", "cases": []}, "no tests"),
        ({"type": "function", "cases": [[[1], 1]]}, "fn_name"),
        ({"type": "function", "fn_name": "f", "cases": [{"args": [1]}]}, "expected"),
        ({"type": "poem", "cases": [1]}, "unknown type"),
        ({"type": "assert", "asserts": ["assert f(1 == 2"]}, "does not compile"),
        ({"type": "assert", "asserts": ["assert 1 == 1"]}, "never use"),
        ({"type": "assert", "asserts": ["x = f(1).y"], "setup": ""}, ""),
        ({"type": "assert", "asserts": ["x = 1"]}, "asserts nothing"),
        ({"type": "stdin", "cases": [["1", "2"]], "language": "cobol"}, "language"),
        ({"type": "function", "fn_name": "f", "cases": [[[1], 1]], "language": "cpp"}, "stdin"),
        ({"type": "stdin", "cases": [["1", "2"]], "time_limit_s": -1}, "time_limit_s"),
        ({"type": "stdin", "cases": [[1, 2]]}, "text"),
    ],
)
def test_malformed_tests_are_no_fault_of_the_answer(tests: Any, problem: str) -> None:
    if not problem:
        task_tests(tests)
        return
    with pytest.raises(TestsError, match=problem):
        task_tests(tests)


def test_tests_that_raise_by_themselves_are_an_infrastructure_error() -> None:
    broken = {
        "type": "assert",
        "asserts": ["assert len(f(1)) == 1"],
        "setup": "import nothing_such",
    }
    idle = {"type": "assert", "asserts": ["if False:\n    assert f(1)"]}
    first, second = results(("def f(x): return [x]", broken), ("def f(x): return [x]", idle))
    for result, words in ((first, "nothing_such"), (second, "never call")):
        grade = result.grade(fraction=False)
        assert (grade.value, grade.verdict) == (None, "infrastructure_error")
        assert words in grade.detail


def test_a_missing_compiler_is_an_infrastructure_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Language("cpp", "solution.cpp", tool="no-such-compiler", package="g++")
    monkeypatch.setitem(languages.LANGUAGES, "cpp", lost)
    (result,) = results(("int main() {}", {**SUM, "language": "cpp"}))
    grade = result.grade(fraction=False)
    assert (grade.value, grade.verdict) == (None, "infrastructure_error")
    assert "no-such-compiler" in grade.detail
    assert "apt install g++" in grade.detail


def test_no_case_is_never_a_pass() -> None:
    assert Result().grade(fraction=True) == Grade(
        None, "infrastructure_error", "the task has no tests"
    )
