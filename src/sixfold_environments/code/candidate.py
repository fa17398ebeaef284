"""The program of a model, run on calls or on standard inputs inside the sandbox.

The trusted side sends inputs and reads claims about outputs. It does not judge by the exit status,
and it does not trust the program that sends the claims (`harness`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sixfold.types import Verdict

from ..sandbox.job import Ended, Job, Limits
from ..sandbox.sandbox import Sandbox
from .languages import Language
from .wire import MAX_DEPTH

LONGEST_REPLY = 4 << 20
"""Largest JSON of one value, in bytes. Parsing it takes memory and time on the trusted side."""

_MOST_LEVELS = 4 * MAX_DEPTH
"""Levels of JSON in a reply. A dictionary of `wire` takes three."""

_PRINTED = re.compile(rb'\{"case": ([0-9]{1,9}), "text": (".*")\}')
"""A reply with printed text. It may be longer than other replies, because it is cheap to parse."""


@dataclass(frozen=True)
class Answer:
    """What the candidate answered to one case.

    Attributes:
        value: JSON of `wire`, or the printed text. Meaningless if there is a failure.
        failure: verdict if there is no value, else None.
        detail: one line about the failure.
    """

    value: Any = None
    failure: Verdict | None = None
    detail: str = ""


@dataclass(frozen=True)
class Answers:
    """Result of one run of the sandbox.

    Attributes:
        answers: one per case.
        failure: "compile_error" or "infrastructure_error" if no case could run.
        detail: one line about that failure.
    """

    answers: tuple[Answer, ...]
    seconds: float = 0.0
    isolation: str = ""
    failure: Verdict | None = None
    detail: str = ""


@dataclass(frozen=True)
class Candidate:
    """A program with its language and limits.

    Attributes:
        language: how it is compiled and run.
        sandbox: where it runs.
        prefix: Python source that runs before `code`.
        binary: the compiled program, if the language needs one.
    """

    code: str
    language: Language
    sandbox: Sandbox
    limits: Limits
    prefix: str = ""
    binary: bytes | None = field(default=None, repr=False)

    async def built(self) -> tuple[Candidate, Answers | None]:
        """Compile the candidate. Returns it, and a failure if it does not compile."""
        if self.binary is not None or not self.language.compiler:
            return self, None
        ended = await self.sandbox.run_python(self.language.build_job(self.code))
        if ended.verdict == "passed":
            return replace(self, binary=ended.stdout), None
        failure = ended.verdict if ended.verdict in _NOT_THE_SOURCE else "compile_error"
        detail = last_line(ended.stderr) if failure == "compile_error" else ended.detail
        return self, Answers((), ended.seconds, ended.isolation, failure, detail)

    async def call(
        self, calls: Sequence[Any], *, seconds: float | None = None, objects: bool = False
    ) -> Answers:
        """Call functions of the candidate in order, in one process.

        Args:
            calls: [name, JSON of the arguments, JSON of the keyword arguments] each, see `wire`.
            seconds: wall limit; None: that of `limits`.
            objects: values that are not plain data become numbers that later calls may use.
        """
        request = {
            "mode": "calls",
            "calls": list(calls),
            "objects": objects,
            "prefix": self.prefix,
            "code": self.code,
        }
        return await self._run(request, len(calls), seconds)

    async def read(self, inputs: Sequence[str], *, seconds: float | None = None) -> Answers:
        """Run the candidate once per input, each time in a new process.

        Args:
            inputs: text on standard input.
            seconds: wall limit of all runs together; None: that of `limits`.
        """
        in_harness = self.language.name == "python"
        request = {
            "mode": "inputs",
            "inputs": list(inputs),
            "prefix": self.prefix,
            "code": self.code if in_harness else None,
            "argv": list(self.language.argv),
            "output_bytes": self.limits.output_bytes // 2,
        }
        return await self._run(request, len(inputs), seconds)

    async def _run(self, request: Mapping[str, Any], cases: int, seconds: float | None) -> Answers:
        nonce = secrets.token_hex(16)
        limits = replace(
            self.limits,
            wall_s=self.limits.wall_s if seconds is None else seconds,
            memory_mb=max(self.limits.memory_mb, self.language.memory_mb),
        )
        mode = str(request["mode"])
        name, program = self.language.harness(mode)
        job = Job(
            argv=(*self.language.interpreter, name) if name.endswith(".js") else (name,),
            files={name: program, **self.language.files(self.code, self.binary)},
            stdin=json.dumps({**request, "nonce": nonce}).encode(),
            limits=limits,
        )
        run = self.sandbox.run if name.endswith(".js") else self.sandbox.run_python
        return _answers(await run(job), nonce.encode(), cases)


def _answers(ended: Ended, nonce: bytes, cases: int) -> Answers:
    """Read the replies of the harness. Every case without one gets the failure of the run."""
    if ended.verdict == "infrastructure_error":
        return Answers((), ended.seconds, ended.isolation, ended.verdict, ended.detail)
    found: dict[int, Answer] = {}
    rest = _rest(ended)
    for line in ended.result.split(b"\n"):
        if not line.startswith(nonce):
            if line.strip():
                rest = Answer(failure="protocol_error", detail="the reply is malformed")
                break
            continue
        reply = _reply(line[len(nonce) :])
        if reply is None:
            rest = Answer(failure="protocol_error", detail="the reply is malformed")
            break
        case, answer = reply
        if case is not None and 0 <= case < cases and case not in found:
            found[case] = answer
        elif case is None and answer.failure == "compile_error":
            return Answers((), ended.seconds, ended.isolation, answer.failure, answer.detail)
        elif case is None and answer.failure is not None:
            rest = answer
    answers = tuple(found.get(case, rest) for case in range(cases))
    return Answers(answers, ended.seconds, ended.isolation)


_FAILURES: tuple[Verdict, ...] = (
    "compile_error", "runtime_error", "out_of_memory", "output_limit", "protocol_error",
)  # fmt: skip
"""Failures that the harness may report. The sandbox reports all others itself."""

_NOT_THE_SOURCE = ("infrastructure_error", "timeout", "out_of_memory", "output_limit")
"""Verdicts on a compiler run that are not the fault of the source."""


def _rest(ended: Ended) -> Answer:
    """The answer for cases without a reply."""
    if ended.verdict not in ("passed", "runtime_error"):
        return Answer(failure=ended.verdict, detail=ended.detail)
    detail = f"the program ended early with status {ended.exit_code}"
    last = last_line(ended.stderr)
    return Answer(failure="runtime_error", detail=f"{detail}: {last}" if last else detail)


def _reply(line: bytes) -> tuple[int | None, Answer] | None:
    """Case and answer of one reply, or None if it is malformed. Cheap for any line."""
    try:
        if printed := _PRINTED.fullmatch(line):
            return int(printed[1]), Answer(json.loads(printed[2]))
        reply = parsed(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict):
        return None
    case, failure, detail = reply.get("case"), reply.get("failure"), reply.get("detail", "")
    if not (case is None or type(case) is int) or not isinstance(detail, str):
        return None
    if failure is None:
        return case, Answer(reply.get("value", reply.get("text")))
    known = next((verdict for verdict in _FAILURES if verdict == failure), None)
    return None if known is None else (case, Answer(failure=known, detail=shown(detail)))


def parsed(line: bytes) -> Any:
    """The JSON of a reply.

    Raises:
        ValueError: if it is no JSON, too long, or nested deeper than any value of `wire`.
        RecursionError: the same.
    """
    if len(line) > LONGEST_REPLY:
        raise ValueError("too long")
    value = json.loads(line)
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise ValueError("too deep")


def shown(text: str) -> str:
    """Text of an untrusted program as one line that can be stored."""
    return " ".join(text.encode("utf-8", "replace").decode().split())[:300]


def last_line(text: bytes) -> str:
    """Most informative line of an error output: the first with "error", else the last line."""
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors[0] if errors else lines[-1] if lines else "")[:200]
