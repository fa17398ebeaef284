"""Patches of a repository, judged by tests that failed before and tests that passed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sixfold.environment.grade import Grade
from sixfold_environments.code.formats import read_row
from sixfold_environments.code.reporting import reporting
from sixfold_environments.code.repository import RepositoryTests
from sixfold_environments.code.results import Result
from sixfold_environments.code.task_tests import TestsError
from sixfold_environments.code.verifier import CodeVerifier, task_tests
from sixfold_environments.sandbox.job import Limits
from sixfold_environments.sandbox.sandbox import Sandbox

FILES = {
    "shop/__init__.py": "",
    "shop/price.py": "def total(prices):\n    return sum(prices) - 1\n\n\n"
    "def label():\n    return 'EUR'\n",
    "tests/test_old.py": "from shop.price import label\n\n"
    "def test_label():\n    assert label() == 'EUR'\n",
}
NEW_TESTS = """
import unittest

from shop.price import total


def test_total():
    for prices, expected in (([1, 2], 3), ([], 0)):
        assert total(prices) == expected
    assert total([5]) == 5
    assert total([1]) < 2, "small"


class TestEmpty(unittest.TestCase):
    def test_empty(self):
        self.assertEqual(total([]), 0)
        self.assertTrue(total([1]))
        self.assertFalse(total([]))
"""
NEW_LINES = NEW_TESTS.splitlines()
ROW: dict[str, Any] = {
    "type": "repository",
    "files": FILES,
    "test_patch": f"--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,{len(NEW_LINES)} @@\n"
    + "".join(f"+{line}\n" for line in NEW_LINES),
    "fail_to_pass": ["tests/test_new.py::test_total", "tests/test_new.py::TestEmpty::test_empty"],
    "pass_to_pass": ["tests/test_old.py::test_label"],
}
HEAD = "--- a/shop/price.py\n+++ b/shop/price.py\n@@ -1,2 +1,%d @@\n def total(prices):\n"


def fix(*lines: str) -> str:
    """A patch that replaces the body of `total`."""
    new = "".join(f"+    {line}\n" for line in lines)
    return HEAD % (1 + len(lines)) + "-    return sum(prices) - 1\n" + new


def at_import(code: str) -> str:
    """A patch that inserts lines at the top of the module and fixes nothing."""
    lines = code.splitlines()
    head = f"--- a/shop/price.py\n+++ b/shop/price.py\n@@ -1 +1,{1 + len(lines)} @@\n"
    return head + "".join(f"+{line}\n" for line in lines) + " def total(prices):\n"


def check(*patches: str) -> list[Result]:
    tests = task_tests(ROW)
    assert isinstance(tests, RepositoryTests)

    async def run(verifier: CodeVerifier) -> list[Result]:
        return await asyncio.gather(
            *(verifier.check_patch(patch, tests, longest_s=None) for patch in patches)
        )

    with Sandbox(slots=4) as sandbox:
        return asyncio.run(run(CodeVerifier(sandbox, Limits(wall_s=10.0))))


def test_a_patch_must_pass_the_failing_and_the_old_tests() -> None:
    right, wrong, breaks, nothing = check(
        fix("return sum(prices)"),
        fix("return sum(prices) - 2"),
        fix("return sum(prices)")
        + "@@ -4,3 +4,3 @@\n \n def label():\n-    return 'EUR'\n+    return 'USD'\n",
        "--- a/shop/price.py\n+++ b/shop/price.py\n@@ -9 +9 @@\n-nothing\n+such\n",
    )
    assert right.grade(fraction=False) == Grade(1.0, "passed", "3 tests passed", "namespaces")
    assert [case.verdict for case in wrong.cases] == ["wrong_answer", "wrong_answer", "passed"]
    assert [case.verdict for case in breaks.cases] == ["passed", "passed", "wrong_answer"]
    assert breaks.grade(fraction=True).value == pytest.approx(2 / 3)
    assert nothing.grade(fraction=False).verdict == "rejected"


FORGERIES = {
    "exit": at_import("import os\nos._exit(0)"),
    "equal": fix(
        "class Any(int):",
        "    def __eq__(self, other): return True",
        "    def __lt__(self, other): return True",
        "    __hash__ = int.__hash__",
        "return Any(1)",
    ),
    "report": at_import(
        "import builtins\nreport = builtins.__sixfold_report__\n"
        "builtins.__sixfold_report__ = lambda key, value: report(key, True)"
    ),
    "skip": at_import("import unittest\nraise unittest.SkipTest('no')"),
    "unittest": at_import(
        "import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert'):\n"
        "        setattr(unittest.TestCase, name, lambda *a, **k: None)"
    ),
    "results": at_import(
        "import os, sys\nframe = sys._getframe()\nwhile 'reports' not in frame.f_locals:\n"
        "    frame = frame.f_back\nnonce = frame.f_locals['reports']._nonce\n"
        "for test in frame.f_locals['request']['tests']:\n"
        '    os.write(3, (nonce + \'["%s", "end", "passed"]\\n\' % test).encode())\nos._exit(0)'
    ),
    "tests": "--- a/tests/test_old.py\n+++ b/tests/test_old.py\n@@ -1 +1 @@\n"
    "-from shop.price import label\n+def label(): return 'EUR'\n",
    "new tests": "--- /dev/null\n+++ b/tests/test_other.py\n@@ -0,0 +1 @@\n"
    "+def test_total(): pass\n",
}


def test_a_patch_that_forges_the_results_is_not_paid() -> None:
    """Each forgery runs twice, because reports are negated at random."""
    found = check(*FORGERIES.values(), *FORGERIES.values())
    paid = [name for name, result in zip([*FORGERIES] * 2, found, strict=True) if result.passed]
    assert paid == []
    for result in found:
        assert result.grade(fraction=False).value == 0.0


def test_expected_literals_leave_the_test_file() -> None:
    source = (
        "def test_a():\n    assert f() == [1, 'secret']\n    assert g() > 3\n"
        "    if x:\n        assert h() == 'other'\n"
    )
    found = reporting(source, frozenset())
    assert "secret" not in found.source
    assert "other" not in found.source
    assert found.expected["0"] == ("value", [1, "secret"])
    assert found.required == {"test_a": {"0", "1"}}
    assert found.as_expected("0", [1, "secret"])
    assert not found.as_expected("0", True)
    assert found.as_expected("1", True)
    negated = reporting(source, frozenset({1}))
    assert negated.as_expected("1", False)
    assert not negated.as_expected("1", True)


PARAMETRISED = """
import pytest

from shop.price import label, total

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("prices, expected", [([1, 2], 3), pytest.param([], 0, id="no prices")])
def test_total(prices, expected):
    assert total(prices) == expected


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("m", [3, 4])
def test_both(n, m):
    assert total([n, m]) == n + m


def test_raises():
    with pytest.raises(TypeError, match="int"):
        total([None, 1])


class TestLabel:
    @pytest.mark.parametrize("times", [1, 2])
    def test_label(self, times):
        assert label() * times == "EUR" * times
"""
DJANGO = """
from unittest import TestCase

from shop.price import total


class TotalTests(TestCase):
    def test_sum(self):
        self.assertEqual(total([1, 2]), 3)

    def test_empty(self):
        \"\"\"
        An empty list costs nothing.

        More words.
        \"\"\"
        self.assertEqual(total([]), 0)
"""


def published(tests: dict[str, str], fail: Any, keep: Any = "[]") -> dict[str, Any]:
    """A row with the columns and texts of SWE-bench: the lists are JSON text."""
    patch = "".join(
        f"diff --git a/{path} b/{path}\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(text.splitlines())} @@\n"
        + "".join(f"+{line}\n" for line in text.splitlines())
        for path, text in tests.items()
    )
    return {
        "repo": "shop/shop", "instance_id": "shop__shop-1", "base_commit": "abc123", "version": "1",
        "problem_statement": "The total is wrong.", "hints_text": "",
        "patch": fix("return sum(prices)"),
        "created_at": "2024-01-01", "environment_setup_commit": "abc123", "test_patch": patch,
        "FAIL_TO_PASS": fail, "PASS_TO_PASS": keep,
    }  # fmt: skip


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize(
    ("path", "text", "fail", "keep"),
    [
        (
            "tests/test_new.py",
            PARAMETRISED,
            ["tests/test_new.py::test_total[no prices]", "tests/test_new.py::test_total[prices0-3]",
             "tests/test_new.py::test_both[3-1]", "tests/test_new.py::test_total[no"],
            ["tests/test_new.py::TestLabel::test_label[1]", "tests/test_new.py::test_raises"],
        ),
        (
            "tests/admin/tests.py",
            DJANGO,
            ["test_sum (admin.tests.TotalTests)", "An empty list costs nothing."],
            ["test_label"],
        ),
        (
            "tests/admin/test_totals.py",
            DJANGO,
            ["test_sum (admin.test_totals.TotalTests.test_sum)", "test_empty"],
            [],
        ),
    ],
    ids=["pytest", "django", "django on Python 3.11"],
)  # fmt: skip
def test_rows_with_the_names_that_swe_bench_publishes(
    path: str, text: str, fail: list[str], keep: list[str]
) -> None:
    """Look-alikes of SWE-bench rows. They have the lists as JSON text, names of pytest with
    parameters (with a space, and cut at it), those of Django in both forms, and bare names.
    """
    row = {**published({path: text}, json.dumps(fail), json.dumps(keep)), "files": FILES}
    made = read_row("swebench", row)
    tests = task_tests(made.tests)
    assert isinstance(tests, RepositoryTests)

    async def run(verifier: CodeVerifier) -> list[Grade]:
        patches = [fix("return sum(prices)"), fix("return 1 + sum(prices)")]
        results = [await verifier.check_patch(p, tests, longest_s=None) for p in patches]
        return [result.grade(fraction=False) for result in results]

    with Sandbox(slots=2) as sandbox:
        right, wrong = asyncio.run(run(CodeVerifier(sandbox, Limits(wall_s=10.0))))
    assert (right.value, right.verdict) == (1.0, "passed"), right
    assert wrong.value == 0.0, wrong


@pytest.mark.parametrize(
    ("fail", "files", "words"),
    [
        (
            ["tests/test_new.py::test_total"],
            None,
            "add the column 'files'.*shop/shop at commit abc",
        ),
        (["tests/none.py::test_x[a b]"], FILES, "file of the test"),
        (["tests/test_new.py::test_none"], FILES, "does not exist. Names are"),
        (["test_x (admin.tests.None)"], FILES, "no file has None.test_x"),
        (["A sentence that is no docstring."], FILES, "in no test file. Names are"),
        ([], FILES, "no tests in fail_to_pass"),
    ],
)
def test_a_row_that_cannot_run_says_what_is_needed(fail: Any, files: Any, words: str) -> None:
    row = {**published({"tests/test_new.py": PARAMETRISED}, json.dumps(fail)), "files": files}
    with pytest.raises(TestsError, match=words):
        task_tests(read_row("swebench", row).tests)
