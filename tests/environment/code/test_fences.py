"""Extraction of code from completions."""

from __future__ import annotations

import pytest

from sixfold_environments.code.fences import MAX_CODE, extract_code

TICKS = "`" * 3


def block(code: str, tag: str = "", fence: str = TICKS) -> str:
    return f"{fence}{tag}\n{code}\n{fence}\n"


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        (block("x = 1", "python"), "x = 1\n"),
        (block("x = 1", "Python3"), "x = 1\n"),
        (block("x = 1", "py title='a.py'"), "x = 1\n"),
        (block("x = 1", "{.python}"), "x = 1\n"),
        (block("x = 1"), "x = 1\n"),
        (block("x = 1", "python", "~~~~"), "x = 1\n"),
        (block("a", "python") + "Better:\n" + block("b", "python"), "b\n"),
        (block("a", "python") + "It prints:\n" + block("3") + block("python a.py", "bash"), "a\n"),
        (block("3", "text") + block("b"), "b\n"),
        (block("x = 1", "python").replace("\n", "\r\n"), "x = 1\n"),
        (
            f"1. Code:\n   {TICKS}python\n   def f():\n       pass\n   {TICKS}",
            "def f():\n    pass\n",
        ),
        (block(f"s = '''\n{TICKS}\n'''", "python", "````"), f"s = '''\n{TICKS}\n'''\n"),
        (f"<think>\n{block('a', 'python')}</think>\n{block('b', 'python')}", "b\n"),
    ],
)
def test_code_is_the_last_block_of_the_language(completion: str, code: str) -> None:
    assert extract_code(completion, "python").code == code


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ("def f(): return 1", "no fenced block"),
        ("", "no answer"),
        (f"Use {TICKS}f(){TICKS} inline", "no fenced block"),
        (block("a", "python") + f"{TICKS}python\ndef f(", "not closed"),
        (block("int main() {}", "cpp"), "no fenced block"),
        (block("", "python"), "empty"),
        (f"<think>\n{block('a', 'python')}", "no answer"),
        (f"<think>\n{block('a', 'python')}</think> It is above.", "no fenced block"),
        (block("#" * (MAX_CODE + 1), "python"), "longer"),
    ],
)
def test_without_a_finished_block_there_is_no_code(completion: str, problem: str) -> None:
    found = extract_code(completion, "python")
    assert found.code is None
    assert problem in found.problem


def test_each_language_has_its_own_tags() -> None:
    answer = block("int main() {}", "c++") + block("f()", "js") + block("-a\n+b", "diff")
    assert extract_code(answer, "cpp").code == "int main() {}\n"
    assert extract_code(answer, "javascript").code == "f()\n"
    assert extract_code(answer, "diff").code == "-a\n+b\n"
