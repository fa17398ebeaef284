"""Ask an environment: within its time, for an answer of the right form. Else it has failed."""

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
    """Raise EnvironmentFault unless the fields of an observation have the documented types."""
    if bool(seen.messages) == bool(seen.text):
        raise EnvironmentFault("an Observation needs messages or text, and not both")
    if not isinstance(seen.text, str):
        raise EnvironmentFault(f"Observation.text is of type {type(seen.text).__name__}, not str")
    if not isinstance(seen.messages, Sequence) or not all(map(_is_message, seen.messages)):
        raise EnvironmentFault("Observation.messages: a message needs a role and a content, as str")
    if isinstance(seen.stops, str) or not all(isinstance(s, str) and s for s in seen.stops):
        raise EnvironmentFault("Observation.stops must be a tuple of strings that are not empty")


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(given.get(name), str) for name in ("role", "content")
    )


async def called(call: Callable[[], Awaitable[T]]) -> T:
    """Result of the call. A `sys.exit` in it counts as a failure of the environment."""
    try:
        return await call()
    except SystemExit as error:
        raise EnvironmentFault(one_line(error)) from error


async def in_time(answer: Awaitable[T], limit: float) -> T:
    """Result of an awaitable.

    Raises:
        EnvironmentFault: after `limit` seconds. The awaitable is then cancelled, and not waited
            for: it may ignore that.
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
