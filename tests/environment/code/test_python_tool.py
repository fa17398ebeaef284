"""The tool `python`: its output, its verdicts, and how much of them is shown."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from sixfold.environment.tools.observation import ToolsFailed
from sixfold_environments.code import python_tool
from sixfold_environments.code.python_tool import python
from sixfold_environments.sandbox.job import Ended


def ran(*codes: str) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return [await python(code) for code in codes]

    return asyncio.run(run())


def test_what_a_program_prints_is_returned_and_nothing_is_kept() -> None:
    first, second, failed = ran(
        "x = 6 * 7\nopen('kept', 'w').close()\nprint(x, '\\u00e9')",
        "import os\nprint('x' in globals(), os.path.exists('kept'))",
        "print('before')\n1 / 0",
    )
    assert first == {"verdict": "passed", "stdout": "42 é\n"}
    assert second == {"verdict": "passed", "stdout": "False False\n"}
    assert (failed["verdict"], failed["stdout"]) == ("runtime_error", "before\n")
    assert failed["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_long_output_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "SHOWN_CHARACTERS", 20)
    (long, failed) = ran("print('a' * 50)", "raise ValueError('the reason')")
    assert long["stdout"].startswith("a" * 20 + "\n(31 characters")
    assert failed["stderr"].endswith("Error: the reason\n")


def test_verdicts_of_programs_that_misbehave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "LIMITS", replace(python_tool.LIMITS, wall_s=1.0))
    verdicts = [
        result["verdict"]
        for result in ran("while True: pass", "while True: print('x' * 9999)", "\ud800", "x = '\0'")
    ]
    assert verdicts == ["timeout", "output_limit", "runtime_error", "runtime_error"]


def test_a_failure_of_the_sandbox_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        async def run_python(self, job: object) -> Ended:
            return Ended("infrastructure_error", None, b"", b"", 0.0, "namespaces", "no cells")

    monkeypatch.setattr(python_tool, "shared_sandbox", Broken)
    with pytest.raises(ToolsFailed, match="no cells"):
        ran("print(1)")
