"""`sixfold audit --cases`: score the cases of a file that checks verifiers and sandboxes.

Two forms are read: {"cases": [...]}, with kind, prompt, gold, tests, completion and
expected_reward; and {"attacks": [...]}, with name, lang, code, tests, expected and expected_status.
A list of such cases works too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sixfold.checks.environment import Environment
from sixfold.environment.grade import Grade
from sixfold.errors import UserError, one_line
from sixfold.report.page import environment as pages

from ..code.cases import is_code_case, run_case
from ..sandbox.sandbox import Sandbox
from ..text.cases import TextCase, text_case
from .setup import host_setup
from .trials import Trials

TIME_LIMIT_S = 1.8
"""Time limit of a check of a text, in seconds: a verdict must be given within 2 s."""

Case = Mapping[str, Any]


@dataclass(frozen=True)
class CaseVerdict:
    """Verdict of the library on a case.

    Attributes:
        verdict: in the same terms as the expected one: a reward, "reward 0", or another sentence.
        outcome: verdict of the check, such as "wrong_answer", or "".
    """

    verdict: float | str
    outcome: str
    detail: str
    seconds: float


def audit_cases_command(file: Path) -> int:
    """Score the cases of a file, and print one JSON line per case.

    Returns:
        The exit code: 0 if every verdict is as expected, else 1.

    Raises:
        UserError: if the file has another form, and after all cases if one of them cannot be run.
    """
    cases = read_cases(file)
    as_expected = True
    refused: UserError | None = None
    with CaseRunner() as runner:
        for case in cases:
            try:
                made = runner.run(case)
                right = is_expected(case, made)
            except Exception as error:  # noqa: BLE001 - boundary: no case may stop the others
                outcome = "infrastructure_error"
                made, right = CaseVerdict(outcome, outcome, one_line(error), 0.0), False
                refused = refused or (error if isinstance(error, UserError) else None)
            as_expected &= right
            record = {
                "id": _name(case),
                "verdict": made.verdict,
                "expected": _expectation(case),
                "seconds": round(made.seconds, 3),
                "outcome": made.outcome,
                "as_expected": right,
                "detail": made.detail,
            }
            print(json.dumps(record), flush=True)
    if refused:
        raise refused
    return 0 if as_expected else 1


def read_cases(file: Path) -> list[Case]:
    """The cases of a file.

    Raises:
        UserError: if the file cannot be read, or if a case has no name or no expected verdict.
    """
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--cases {file}: cannot read it: {error}") from error
    cases = read if isinstance(read, list) else None
    if isinstance(read, dict):
        cases = next((read[key] for key in ("cases", "attacks") if key in read), None)
    if not isinstance(cases, list) or not cases:
        raise UserError(
            f"--cases {file}: expected a list of cases, or an object with 'cases' or 'attacks'"
        )
    for number, case in enumerate(cases):
        if not (isinstance(case, dict) and _name(case) and _expectation(case) is not None):
            raise UserError(
                f"--cases {file}: case {number} has no 'id' or 'name', or no 'expected_reward' or"
                " 'expected'"
            )
        if is_code_case(case) and not isinstance(case.get("tests"), dict):
            raise UserError(f"--cases {file}: case {_name(case)!r} has no 'tests'")
    return cases


def is_expected(case: Case, made: CaseVerdict) -> bool:
    """True if a verdict is the expected one, with one of the outcomes that the case allows."""
    expected, allowed = _expectation(case), case.get("expected_status") or ()
    names = {"oom": "out_of_memory"}
    outcomes = [names.get(name, name) for name in allowed]
    return made.verdict == expected and (not outcomes or made.outcome in outcomes)


class CaseRunner:
    """Runs cases with the built-in verifiers. Sandbox and processes start when they are needed."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._loop = asyncio.Runner()
        self._rewards: dict[str, Trials] = {}
        self._sandbox: Sandbox | None = None

    def run(self, case: Case) -> CaseVerdict:
        """Verdict on one case.

        Raises:
            UserError: if no verifier handles such a case.
        """
        if is_code_case(case):
            return self._code(case)
        kind = (case.get("tests") or {}).get("type")
        if kind == "dashboard":
            return _check_rendering(str(case["code"]))
        if kind == "log":
            return _check_logging(str(case["code"]))
        if (text := text_case(case)) is None:
            raise UserError(f"case {_name(case)!r}: no verifier handles this kind of case")
        return self._text(case, text)

    def _code(self, case: Case) -> CaseVerdict:
        if self._sandbox is None:
            self._sandbox = self._open.enter_context(Sandbox())
        with host_setup(case.get("setup") or {}):
            result = self._loop.run(run_case(case, self._sandbox))
        return _verdict(case, result.value, result.verdict, result.detail, result.seconds)

    def _text(self, case: Case, text: TextCase) -> CaseVerdict:
        trials = self._rewards.get(text.reward)
        if trials is None:
            environment = Environment([text.reward], timeout_s=TIME_LIMIT_S)
            trials = Trials(self._open.enter_context(environment))
            self._rewards[text.reward] = trials
            # The first check of a process also loads the verifier.
            trials.rewards([(text.task, "warm-up")])
        before = trials.seconds
        rewards = trials.rewards([(text.task, completion) for completion in text.completions])
        seconds = trials.seconds - before
        if failed := next((r for r in rewards if r.value is None), None):
            return _verdict(case, None, "infrastructure_error", failed.error or "", seconds)
        grades = [Grade(r.value, r.verdict or "passed", r.detail) for r in rewards]
        worst = next((g for g in grades if g.verdict != "passed"), grades[0])
        verdict = worst.verdict or "passed"
        return _verdict(case, text.value(grades), verdict, worst.detail, seconds)

    def __enter__(self) -> CaseRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self._loop.close()


def _name(case: Case) -> str:
    return str(case.get("id") or case.get("name") or "")


def _expectation(case: Case) -> Any:
    return case.get("expected_reward", case.get("expected"))


def _verdict(
    case: Case, value: float | None, outcome: str, detail: str, seconds: float
) -> CaseVerdict:
    """A verdict in the terms of the case: a number, or "reward 0"."""
    verdict: float | str
    if value is None:
        verdict = "infrastructure_error"
    else:
        verdict = value if "expected_reward" in case else f"reward {value:g}"
    return CaseVerdict(verdict, outcome, detail, seconds)


class _Nodes(HTMLParser):
    """Counts elements and collects the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def _check_rendering(text: str) -> CaseVerdict:
    """Render a text as the report does. HTML in it must be shown as text."""
    start = time.monotonic()
    page = _Nodes()
    page.feed(pages().from_string("{{ text }}").render(text=text))
    page.close()
    plain = page.elements == 0 and page.text == text
    seconds = time.monotonic() - start
    return CaseVerdict("rendered as text" if plain else "rendered as HTML", "", "", seconds)


def _check_logging(text: str) -> CaseVerdict:
    """Write a text as the record of a completion. Reading must give this one record back."""
    start = time.monotonic()
    lines = json.dumps({"text": text}).splitlines()
    verdict = "one record" if len(lines) == 1 else f"{len(lines)} records"
    return CaseVerdict(verdict, "", "", time.monotonic() - start)
