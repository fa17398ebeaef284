"""Tests of a repository: apply a patch, then run its tests, all of which must pass.

The tests of a row are {"type": "repository", "files": {path: text}, "test_patch": patch,
"fail_to_pass": [names], "pass_to_pass": [names]}, with "time_limit_s" and "memory_mb" as in
`task_tests`. The forms of names are those of `test_names`. Tests are functions or methods whose
arguments, if any, come from `pytest.mark.parametrize`, or methods of `unittest.TestCase`. There are
no fixtures, and what the repository imports must be installed in the sandbox.

The tests import the patched code, so they run in the same process, and the patch could change what
they use. Three rules make forging hard:

- The test files of the task replace those of the patch.
- `assert x == literal` and `assertEqual(x, literal)` send x. The trusted side compares it: the
  literal is not in the sandbox.
- Every other assert sends its truth value. Some are negated at random, and only the trusted side
  knows which. So no constant value passes.

A patch that reads the source of the running tests could still forge the right values.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..sandbox.job import Ended, Job, Limits
from ..sandbox.sandbox import Sandbox
from .candidate import parsed, shown
from .patch import PatchError, apply_patch, safe_path
from .program import join_modules
from .reporting import ReportingFile, reporting
from .results import Judged, Result
from .task_tests import TestsError, positive
from .test_names import TestNames

MOST_ASSERTS = 4096
"""Maximum number of asserts per file whose truth value may be negated."""

LONGEST_RESULT = 8 << 20
"""Maximum number of bytes of all reports of the tests."""


@dataclass(frozen=True)
class RepositoryTests:
    """Tests of a repository.

    Attributes:
        files: path to text of the repository, with the files of the tests.
        names: names of all tests that must pass.
        test_files: paths of the files that contain them.
        time_limit_s: seconds for all tests together. None: the default limit.
        memory_mb: memory limit. None: the default limit.
    """

    __test__ = False

    files: Mapping[str, str]
    names: tuple[str, ...]
    test_files: frozenset[str]
    time_limit_s: float | None = None
    memory_mb: int | None = None


def read_repository_tests(value: Mapping[str, Any]) -> RepositoryTests:
    """Read the tests of a repository from a column of a data row.

    Raises:
        TestsError: if it is malformed.
    """
    files = value.get("files")
    if not isinstance(files, Mapping) or not files:
        raise TestsError(
            "the row has no repository, which SWE-bench does not publish: add the column 'files',"
            f" an object of path to text of {value.get('repository') or 'the repository'} at commit"
            f" {value.get('commit') or '(base_commit)'}"
        )
    try:
        repository = {safe_path(str(path)): _text(path, text) for path, text in files.items()}
        if value.get("test_patch"):
            repository = apply_patch(repository, str(value["test_patch"]))
    except PatchError as error:
        raise TestsError(f"test_patch: {error}") from error
    if not _names(value, "fail_to_pass"):
        raise TestsError("the task has no tests in fail_to_pass")
    known = TestNames(repository, str(value.get("test_patch") or ""))
    given = [*_names(value, "fail_to_pass"), *_names(value, "pass_to_pass")]
    names = list(dict.fromkeys(known.resolved(name) for name in given))
    paths = frozenset(name.partition("::")[0] for name in names)
    memory_mb = positive(value, "memory_mb")
    return RepositoryTests(
        repository,
        tuple(names),
        paths,
        positive(value, "time_limit_s"),
        int(memory_mb) if memory_mb else None,
    )


def _text(path: object, text: object) -> str:
    if not isinstance(text, str):
        raise TestsError(f"the file {str(path)[:80]!r} must be text")
    return text


def _names(value: Mapping[str, Any], key: str) -> list[str]:
    found = value.get(key) or []
    if not (isinstance(found, list | tuple) and all(isinstance(name, str) for name in found)):
        raise TestsError(f"{key!r} must be a list of names of tests")
    return list(found)


async def check_patch(
    patch: str, tests: RepositoryTests, sandbox: Sandbox, limits: Limits
) -> Result:
    """Verdicts on a patch, one per test.

    Args:
        patch: patch in git's unified format.
    """
    try:
        files = await asyncio.to_thread(apply_patch, tests.files, patch)
    except PatchError as error:
        return Result(failure="rejected", detail=str(error))
    files |= {path: tests.files[path] for path in tests.test_files}
    flipped = frozenset(n for n in range(MOST_ASSERTS) if secrets.randbelow(2))
    prepared = {path: reporting(tests.files[path], flipped) for path in tests.test_files}
    files |= {path: one.source for path, one in prepared.items()}
    nonce = secrets.token_hex(16)
    ended = await sandbox.run_python(
        Job(
            argv=("sixfold_harness.py",),
            files={
                "sixfold_harness.py": join_modules("wire", "repository_harness"),
                **{f"repository/{path}": text.encode() for path, text in files.items()},
            },
            stdin=json.dumps({"nonce": nonce, "tests": list(tests.names)}).encode(),
            limits=replace(limits, files=max(limits.files, 2 * len(files) + 64)),
        )
    )
    if ended.verdict == "infrastructure_error":
        return Result((), ended.isolation, ended.verdict, ended.detail)
    reports = _reports(ended, nonce)
    cases = tuple(
        _judge_test(name, prepared[name.partition("::")[0]], reports, ended) for name in tests.names
    )
    return Result(cases, ended.isolation)


def _reports(ended: Ended, nonce: str) -> dict[str, list[list[Any]]]:
    """Lists of reports, by name of the test.

    A report is [id, JSON of `wire`]. The last one of a test is ["end", text].
    """
    found: dict[str, list[list[Any]]] = {}
    for line in ended.result[:LONGEST_RESULT].split(b"\n"):
        if not line.startswith(nonce.encode()):
            continue
        try:
            report = parsed(line[len(nonce) :])
        except (ValueError, RecursionError):
            continue
        match report:
            case [str(name), str(key), value]:
                found.setdefault(name, []).append([key, value])
    return found


def _judge_test(
    name: str, prepared: ReportingFile, reports: dict[str, list[list[Any]]], ended: Ended
) -> Judged:
    mine = reports.get(name, [])
    if not mine or mine[-1][0] != "end":
        if ended.verdict not in ("passed", "runtime_error"):
            return Judged(ended.verdict, f"{name}: {ended.detail}")
        return Judged("runtime_error", f"{name} did not end")
    if mine[-1][1] != "passed":
        return Judged("wrong_answer", f"{name}: {shown(str(mine[-1][1])[:200])}")
    seen = {key for key, _ in mine}
    if not prepared.required.get(name.partition("::")[2], set()) <= seen:
        return Judged("protocol_error", f"{name} skipped an assert")
    for key, value in mine[:-1]:
        if not prepared.as_expected(key, value):
            return Judged("wrong_answer", f"{name}: an assertion failed")
    return Judged("passed")
