"""Assert tests that run as a program: the tests in one sandbox, the candidate in another.

The tests run without the candidate and report the calls that they make. The candidate runs on these
calls alone. Then the tests run again, with the answers as plain data. Nearly all tests need two
such rounds; tests whose arguments depend on earlier answers need more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from sixfold.types import VERDICTS, Verdict

from ..sandbox.job import Ended, Job
from .asserts import Program
from .candidate import Answer, Candidate, last_line, parsed, shown
from .program import join_modules
from .results import Judged, Result

ROUNDS = 6
"""Maximum number of runs of the tests."""

SHORTEST_S = 0.05
"""Minimum wall limit of a run, in seconds. It holds even if no time is left."""


class _Reply(NamedTuple):
    """What a run of the tests says: its verdicts and the number of calls, or calls to make."""

    units: tuple[Judged, ...] = ()
    calls: int = 0
    missing: Sequence[Any] = ()


_NO_CALL = "the tests never call the candidate's code"


async def judge_program(candidate: Candidate, program: Program, seconds: float) -> Result:
    """Run assert tests against a candidate.

    Args:
        seconds: wall limit of all runs of the candidate and of the tests together.
    """
    used = 0.0
    table: list[Any] = []
    for _ in range(ROUNDS):
        ended, reply = await _run_tests(candidate, program, table, seconds - used)
        used += ended.seconds
        if ended.verdict == "infrastructure_error":
            return Result((), ended.isolation, ended.verdict, ended.detail)
        if reply is None:
            return _without_reply(ended, program, bool(table))
        if reply.units and not reply.calls:
            return Result((), ended.isolation, "infrastructure_error", _NO_CALL)
        if reply.units:
            return Result(reply.units, ended.isolation, seconds=used)
        calls = reply.missing
        left = max(SHORTEST_S, seconds - used)
        answers = await candidate.call(calls, seconds=left, objects=True)
        used += answers.seconds
        if answers.failure is not None:
            return Result((), answers.isolation, answers.failure, answers.detail)
        for answer in answers.answers:
            if answer.failure not in (None, "runtime_error", "out_of_memory"):
                failed = Judged(answer.failure, answer.detail)
                return Result((failed,) * len(program.units), answers.isolation)
        table = [[call, _entry(a)] for call, a in zip(calls, answers.answers, strict=True)]
    many = Judged("protocol_error", f"the tests made new calls in each of {ROUNDS} runs")
    return Result((many,) * len(program.units), ended.isolation)


async def _run_tests(
    candidate: Candidate, program: Program, table: list[Any], left: float
) -> tuple[Ended, _Reply | None]:
    """Run the tests once. Returns their reply, or None if there is none."""
    nonce = secrets.token_hex(16)
    request = {"nonce": nonce, "table": table, **program._asdict()}
    ended = await candidate.sandbox.run_python(
        Job(
            argv=("test_program.py",),
            files={"test_program.py": join_modules("wire", "test_program")},
            stdin=json.dumps(request).encode(),
            limits=replace(candidate.limits, wall_s=max(SHORTEST_S, left)),
        )
    )
    for line in ended.result.split(b"\n"):
        if ended.verdict == "passed" and line.startswith(nonce.encode()):
            return ended, _reply(line[len(nonce) :], len(program.units))
    return ended, None


def _reply(line: bytes, units: int) -> _Reply | None:
    """The reply of the tests, or None if it is malformed."""
    try:
        reply = parsed(line)
    except (ValueError, RecursionError):
        return None
    match reply:
        case {"missing": [*calls]} if all(isinstance(c, list) and len(c) == 3 for c in calls):
            return _Reply(missing=calls)
        case {"units": [*found], "calls": int(calls)} if len(found) == units:
            cases = [_unit(one) for one in found]
            return _Reply(tuple(cases), calls) if None not in cases else None  # type: ignore[arg-type]
    return None


def _unit(unit: Any) -> Judged | None:
    match unit:
        case [str(verdict), str(detail)] if verdict in VERDICTS:
            return Judged(cast(Verdict, verdict), shown(detail))
    return None


def _without_reply(ended: Ended, program: Program, answered: bool) -> Result:
    """Result of tests that ended without a reply.

    The candidate is at fault only if the tests have read its answers.
    """
    if not answered:
        detail = f"the tests do not run ({ended.verdict}): {last_line(ended.stderr)}"
        return Result((), ended.isolation, "infrastructure_error", detail)
    verdict: Verdict = (
        "protocol_error" if ended.verdict in ("passed", "runtime_error") else ended.verdict
    )
    failed = Judged(verdict, f"the tests ended early: {last_line(ended.stderr)}")
    return Result((failed,) * len(program.units), ended.isolation)


def _entry(answer: Answer) -> dict[str, Any]:
    """An answer of the candidate, in the form that `test_program` reads."""
    if answer.failure is None:
        return {"value": answer.value}
    name, _, text = answer.detail.partition(":")
    return {"error": name, "detail": text.strip() or answer.detail}
