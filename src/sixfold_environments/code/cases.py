"""Run the code cases of files that test verifiers: verifier cases and sandbox attacks.

A verifier case has the kind "code", a "completion" and "tests". A sandbox attack has "lang", "code"
(a program without fences) and "tests". `sixfold audit --cases` reads both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sixfold.types import Verdict

from ..sandbox.job import Limits
from ..sandbox.sandbox import Sandbox
from .task_tests import TestsError, read_tests
from .verifier import CodeVerifier

COMPLETION_LIMITS = Limits(wall_s=1.2)
"""Limits of a verifier case, whose verdict must arrive within 2 s."""


class CaseResult(NamedTuple):
    """Result of one case.

    Attributes:
        verdict: how the check ended.
        value: the reward, or None if the check failed.
    """

    verdict: Verdict
    value: float | None
    seconds: float
    detail: str


def is_code_case(case: Mapping[str, Any]) -> bool:
    """True if `run_case` can run a case."""
    return case.get("kind") == "code" or case.get("lang") in ("python", "cpp", "javascript")


async def run_case(case: Mapping[str, Any], sandbox: Sandbox) -> CaseResult:
    """Run one case.

    Args:
        case: an object of such a file.
    """
    start = time.monotonic()
    try:
        tests = read_tests({"language": case.get("lang"), **case["tests"]})
    except TestsError as error:
        # Without tests nothing is known about the program, so it earns nothing.
        return CaseResult("rejected", 0.0, time.monotonic() - start, str(error))
    if "completion" in case:
        verifier = CodeVerifier(sandbox, COMPLETION_LIMITS)
        grade = await verifier.grade(str(case["completion"]), tests, fraction=False)
    else:
        verifier = CodeVerifier(sandbox, Limits())
        result = await verifier.check(str(case["code"]), tests)
        grade = result.grade(fraction=False)
    verdict = grade.verdict or "infrastructure_error"
    return CaseResult(verdict, grade.value, time.monotonic() - start, grade.detail)
