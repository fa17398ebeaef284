"""Verify a program: run it on the inputs of the tests, and compare its outputs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sixfold.environment.grade import Grade

from ..sandbox.job import Limits
from ..sandbox.sandbox import Sandbox
from .asserted import judge_program
from .asserts import Program, parsed_asserts
from .candidate import Answer, Answers, Candidate
from .compare import Rules, same_text
from .fences import extract_code
from .languages import LANGUAGES
from .repository import RepositoryTests, check_patch, read_repository_tests
from .results import Judged, Result
from .task_tests import Case, FunctionCase, InputCase, Tests, TestsError, read_tests, tests_object

REPEATS = 8
"""Extra runs of all cases, each in a new process, if a program that passed may be random.

A program that is right half of the time then passes three cases with a probability of 2**-27, and
of 2**-9 if it decides by an address, which is the same for all cases of a process.
"""

_RANDOM = re.compile(
    r"\b(?:rand\w*|choices?|shuffle|sample|secrets|uuid\w*|urandom|getrandom|srand|mt19937\w*"
    r"|time\w*|clock\w*|chrono|perf_counter\w*|monotonic\w*|datetime|Date|performance|getpid"
    r"|id|hash|__hash__|__import__|importlib|eval|exec|getattr|object|repr|__repr__|ctypes|gc"
    r"|weakref|thread\w*|Thread\w*|asyncio|u?intptr_t|reinterpret_cast|malloc)\b"
    r"|/dev/u?random|/proc/|\bself\s*[)}!]|%p|<<\s*&|void\s*\*",
    re.ASCII,
)
"""A program without any of these words is assumed to be deterministic. Addresses of objects, which
differ from process to process, are in the default texts and hashes of objects.
"""


def task_tests(value: Any) -> Tests | RepositoryTests:
    """Read the tests of a task from its column `tests`.

    Args:
        value: an object, or its JSON text.

    Raises:
        TestsError: if the tests are missing or malformed.
    """
    found = tests_object(value)
    if found.get("type") == "repository":
        return read_repository_tests(found)
    tests = read_tests(found)
    if tests.kind == "assert":
        parsed_asserts(tests)
    return tests


class CodeVerifier:
    """Checks programs in a sandbox.

    Args:
        limits: limits of a program on all cases of a task together. Those of the task override
            them.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits

    async def grade(
        self,
        completion: str,
        tests: Tests | RepositoryTests,
        *,
        fraction: bool,
        longest_s: float | None = None,
    ) -> Grade:
        """The grade of a completion. Its code is extracted as `fences` says.

        Args:
            completion: text of the policy.
            fraction: True: the value is the share of hidden cases that pass. False: 1 if all pass,
                else 0.
            longest_s: upper bound of the time limit, also of the task's own. None: no bound.
        """
        language = tests.language if isinstance(tests, Tests) else "diff"
        extracted = extract_code(completion, language)
        if extracted.code is None:
            return Grade(0.0, "rejected", extracted.problem)
        if isinstance(tests, RepositoryTests):
            patch = await self.check_patch(extracted.code, tests, longest_s=longest_s)
            return patch.grade(fraction=fraction)
        result = await self.check(extracted.code, tests, longest_s=longest_s)
        return result.grade(fraction=fraction, first=tests.public)

    async def check_patch(
        self, patch: str, tests: RepositoryTests, *, longest_s: float | None
    ) -> Result:
        """Verdicts on a patch, one per test.

        Args:
            patch: patch in git's unified format.
            longest_s: upper bound of the time limit, also of the task's own. None: no bound.
        """
        limits = self._limits_of(tests.time_limit_s, tests.memory_mb, longest_s)
        return await check_patch(patch, tests, self._sandbox, limits)

    async def check(self, code: str, tests: Tests, *, longest_s: float | None = None) -> Result:
        """Verdicts on a program.

        Args:
            longest_s: upper bound of the time limit, also of the task's own. None: no bound.
        """
        language = LANGUAGES[tests.language]
        if language.missing:
            return Result(failure="infrastructure_error", detail=language.missing)
        limits = self._limits_of(tests.time_limit_s, tests.memory_mb, longest_s)
        candidate = Candidate(code, language, self._sandbox, limits, tests.prefix)
        candidate, failed = await candidate.built()
        if failed is not None:
            return _without_cases(failed)
        cases: Sequence[Case] | Program = tests.cases
        if tests.kind == "assert":
            try:
                cases = await asyncio.to_thread(parsed_asserts, tests)
            except TestsError as error:
                return Result(failure="infrastructure_error", detail=str(error))
        result = await self._run(candidate, tests, cases, limits.wall_s)
        left = limits.wall_s - result.seconds
        repeats = REPEATS if _RANDOM.search(code) else 0
        while repeats > 0 and left > 0 and result.passed:
            again = await self._run(candidate, tests, cases, left)
            result = _both(result, again)
            left -= again.seconds
            repeats -= 1
        return result

    def _limits_of(
        self, time_limit_s: float | None, memory_mb: int | None, longest_s: float | None
    ) -> Limits:
        wall_s = time_limit_s or self._limits.wall_s
        return replace(
            self._limits,
            wall_s=min(wall_s, longest_s) if longest_s else wall_s,
            memory_mb=memory_mb or self._limits.memory_mb,
        )

    async def _run(
        self,
        candidate: Candidate,
        tests: Tests,
        cases: Sequence[Case] | Program,
        seconds: float,
    ) -> Result:
        """Run all cases once, in a new process."""
        if isinstance(cases, Program):
            return await judge_program(candidate, cases, seconds)
        try:
            calls = [c.call.encoded() for c in cases if isinstance(c, FunctionCase)]
        except TestsError as error:
            return Result(failure="infrastructure_error", detail=str(error))
        inputs = [case.given for case in cases if isinstance(case, InputCase)]
        if calls:
            answers = await candidate.call(calls, seconds=seconds)
        else:
            answers = await candidate.read(inputs, seconds=seconds)
        if answers.failure is not None:
            return _without_cases(answers)
        judged_cases = await asyncio.to_thread(_judge_cases, tests, cases, answers.answers)
        return Result(judged_cases, answers.isolation, seconds=answers.seconds)


def _without_cases(answers: Answers) -> Result:
    """Result of a program that failed before any case could run."""
    return Result((), answers.isolation, answers.failure, answers.detail)


def _judge_cases(
    tests: Tests, cases: Sequence[Case], answers: Sequence[Answer]
) -> tuple[Judged, ...]:
    rules = Rules(tests.tolerance, as_python=tests.kind == "assert")
    return tuple(
        _judge_case(case, answer, rules, tests) for case, answer in zip(cases, answers, strict=True)
    )


def _judge_case(case: Case, answer: Answer, rules: Rules, tests: Tests) -> Judged:
    if answer.failure is not None:
        return Judged(answer.failure, answer.detail)
    if isinstance(case, InputCase):
        found = answer.value if isinstance(answer.value, str) else ""
        right = same_text(case.expected, found, tests.tolerance)
        return Judged("passed") if right else Judged("wrong_answer", "another output is expected")
    assert isinstance(case, FunctionCase)
    try:
        right = any(rules.same(value, answer.value) for value in (case.expected, *case.also))
    except RecursionError:
        return Judged("protocol_error", "a value with too many levels")
    return Judged("passed") if right else Judged("wrong_answer", "another value is expected")


def _both(first: Result, again: Result) -> Result:
    """Combine the first result with that of the extra runs. A case must pass in both."""
    if again.failure == "infrastructure_error":
        return first
    if again.failure is not None:
        return again
    cases = tuple(
        one if other.verdict in ("passed", "timeout") else Judged(other.verdict, "not every time")
        for one, other in zip(first.cases, again.cases, strict=True)
    )
    return replace(first, cases=cases)
