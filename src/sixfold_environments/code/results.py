"""Verdicts on the tests of a task, and the grade that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sixfold.environment.grade import Grade
from sixfold.types import Verdict


class Judged(NamedTuple):
    """Verdict on one case.

    Attributes:
        verdict: "passed", or why not.
    """

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Result:
    """Verdicts on all cases of a program.

    Attributes:
        cases: one per case, in the order of the tests.
        isolation: level of the sandbox.
        failure: verdict if no case could run.
        detail: one line about the failure.
        seconds: run time of the program, without the wait for a sandbox.
    """

    cases: tuple[Judged, ...] = ()
    isolation: str = ""
    failure: Verdict | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if every case passed."""
        return self.failure is None and all(case.verdict == "passed" for case in self.cases)

    def grade(self, *, fraction: bool, first: int = 0) -> Grade:
        """The grade of the program.

        Args:
            fraction: True: the value is the share of cases that pass. False: 1 if all pass, else 0.
            first: index of the first case that counts for the share.
        """
        failure, detail = self.failure, self.detail
        broken = next((c for c in self.cases if c.verdict == "infrastructure_error"), None)
        if not self.cases and failure is None:
            failure, detail = "infrastructure_error", "the task has no tests"
        if broken is not None:
            failure, detail = broken
        if failure is not None:
            value = None if failure == "infrastructure_error" else 0.0
            return Grade(value, failure, detail, self.isolation)
        wrong = next((c for c in self.cases if c.verdict != "passed"), None)
        if wrong is None:
            return Grade(1.0, "passed", f"{len(self.cases)} tests passed", self.isolation)
        counted = self.cases[first:] or self.cases
        passed = sum(case.verdict == "passed" for case in counted)
        detail = f"{passed} of {len(counted)} tests passed; {wrong.detail or wrong.verdict}"
        value = passed / len(counted) if fraction else 0.0
        return Grade(value, wrong.verdict, detail, self.isolation)
