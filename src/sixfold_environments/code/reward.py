"""The rewards `code` and `code_fraction`: programs that pass the tests of their task."""

from __future__ import annotations

import asyncio

from sixfold.checks.limits import time_limit_s
from sixfold.environment.grade import Grade
from sixfold.environment.versions import cached
from sixfold.types import Task

from ..sandbox.job import Limits
from .shared import shared_sandbox
from .task_tests import TestsError
from .verifier import CodeVerifier, task_tests

ROOM_S = 0.5
"""Seconds of a check's time limit that are reserved for the sandbox and the comparison."""

VERSION = "1"
"""Part of the key of cached outcomes (`versions.cached`). Change it when verdicts may change."""


@cached(VERSION)
async def code_reward(completion: str, task: Task) -> Grade:
    """1 if the program in the completion passes all tests of the task, else 0."""
    return await _grade(completion, task, fraction=False)


@cached(VERSION)
async def code_fraction_reward(completion: str, task: Task) -> Grade:
    """Share of the hidden tests that the program passes; of all tests if none is hidden."""
    return await _grade(completion, task, fraction=True)


async def _grade(completion: str, task: Task, *, fraction: bool) -> Grade:
    try:
        tests = await asyncio.to_thread(task_tests, task.columns.get("tests"))
    except TestsError as error:
        return Grade(None, "infrastructure_error", f"task {task.id}: {error}")
    verifier = CodeVerifier(shared_sandbox(), Limits())
    longest_s = max(ROOM_S, time_limit_s() - ROOM_S)
    if (tests.time_limit_s or 0.0) > longest_s:
        problem = (
            f"task {task.id}: time_limit_s = {tests.time_limit_s:g} of its tests is longer than"
            f" environment.timeout_s = {time_limit_s():g} allows. Set environment.timeout_s to at"
            f" least {(tests.time_limit_s or 0.0) + ROOM_S:g}"
        )
        return Grade(None, "infrastructure_error", problem)
    return await verifier.grade(completion, tests, fraction=fraction, longest_s=longest_s)
