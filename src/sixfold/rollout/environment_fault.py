"""Failures of environments: errors, time limits, and malformed observations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from ..environment.episode import Observation
from ..errors import one_line
from ..types import Outcome

T = TypeVar("T")


class EnvironmentFault(Exception):
    """The environment failed. The message says how, in one line.

    Attributes:
        outcome: outcome of the episode.
    """

    def __init__(self, message: str, outcome: Outcome = "error") -> None:
        super().__init__(message)
        self.outcome = outcome


def check_observation(seen: Observation) -> None:
    """Check that the fields of an observation have the documented types.

    Raises:
        EnvironmentFault: a field has another type.
    """
    if bool(seen.messages) == bool(seen.text):
        raise EnvironmentFault("an Observation needs either messages or text")
    if not isinstance(seen.text, str):
        raise EnvironmentFault(f"Observation.text is of type {type(seen.text).__name__}, not str")
    if not isinstance(seen.messages, Sequence) or not all(map(_is_message, seen.messages)):
        raise EnvironmentFault("Observation.messages: a message needs a role and a content, as str")
    if not _is_list(seen.stops) or not all(isinstance(s, str) and s for s in seen.stops):
        raise EnvironmentFault("Observation.stops must be a tuple of non-empty strings")
    if not _is_list(seen.tools) or not all(isinstance(one, Mapping) for one in seen.tools):
        raise EnvironmentFault("Observation.tools must be a tuple of dictionaries")


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(given.get(name), str) for name in ("role", "content")
    )


async def called(call: Callable[[], Awaitable[T]]) -> T:
    """Result of the call.

    Raises:
        EnvironmentFault: the environment called `sys.exit`, which must not end the run.
    """
    try:
        return await call()
    except SystemExit as error:
        raise EnvironmentFault(one_line(error)) from error


async def in_time(answer: Awaitable[T], limit: float) -> T:
    """Result of an awaitable.

    Raises:
        EnvironmentFault: after `limit` seconds. The awaitable is then cancelled. Its end is not
            awaited, because it may ignore the cancellation.
    """
    task = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait((task,), timeout=limit)
    finally:
        task.cancel()
    if not done:
        raise EnvironmentFault(
            f"a step took longer than environment.timeout_s = {limit:g} s", "timeout"
        )
    if task.cancelled():
        raise EnvironmentFault("the environment cancelled itself")
    return task.result()
