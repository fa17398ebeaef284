"""A process that checks answers: `python -m sixfold.environment.worker REQUESTS REPLIES TIMEOUT SPEC...` (file descriptors, seconds, names).

Protocol. Once, after the rewards are loaded, a JSON line: [[name, takes_groups], ...], or {"fatal": message}. Then each request, a pickle
behind its 4-byte length, is a list of checks, and each check is answered by one JSON line as soon as it is done: {"values": [...],
"error": null or text, "seconds": s}. Replies come in the order of the checks, so the parent knows at any time which check is running.

Replies are JSON and not pickles, so nothing that a reward writes is run by the parent. Standard output belongs to the reward functions.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import sys
import time
from typing import IO, NamedTuple

from sixfold.environment.rewards import RewardFunction, load_reward
from sixfold.errors import UserError
from sixfold.types import Task

LENGTH = struct.Struct("!I")


class Check(NamedTuple):
    """One call of one reward: `completions` is a single text, or all of a group for a TRL function. completion_ids: tokens of each."""

    reward: int
    task: Task
    completions: list[str]
    completion_ids: list[list[int]]


class Outcome(NamedTuple):
    """What came of a check: a value for each completion (None: does not apply), or an error, and the seconds that it took."""

    values: list[float | None]
    error: str | None
    seconds: float


def run_check(function: RewardFunction, check: Check) -> Outcome:
    """Call the reward. Whatever it raises is an outcome."""
    start = time.perf_counter()
    try:
        values, error = function.scores(check.completions, check.task, check.completion_ids), None
    except Exception as raised:  # noqa: BLE001  the boundary: a failing check is data
        values, error = [], one_line(raised)
    return Outcome(values, error, time.perf_counter() - start)


def one_line(error: BaseException) -> str:
    """`ValueError: what it said`, on one line and not longer than 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def serve(requests: IO[bytes], replies: int, timeout_s: float, specs: list[str]) -> None:
    """Answer checks until the parent closes its end."""
    try:
        functions = [load_reward(spec) for spec in specs]
    except UserError as error:
        _reply(replies, {"fatal": str(error)})
        return
    _reply(replies, [[function.name, function.takes_groups] for function in functions])
    while header := requests.read(LENGTH.size):
        for check in pickle.loads(requests.read(*LENGTH.unpack(header))):
            # The parent kills a check that hangs. If the parent is gone, this does, at the price of a microsecond a check.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 5)
            _reply(replies, run_check(functions[check.reward], check)._asdict())
            signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(descriptor: int, message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    """Entry point of the process."""
    with os.fdopen(int(sys.argv[1]), "rb") as requests:
        serve(requests, int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])


if __name__ == "__main__":
    main()
