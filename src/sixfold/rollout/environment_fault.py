"""Failures of environments: errors, time limits, and malformed observations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from ..environment.episode import End, Episode, MakeEpisode, Observation, final_reward, turn_reward
from ..errors import is_fault, one_line
from ..types import SAMPLED, Outcome, Reward, Task
from ..user_code import Blocked, Called, calling, own_copy

T = TypeVar("T")


class EnvironmentFault(Exception):
    """The environment failed. The message says how, in one line.

    Attributes:
        outcome: outcome of the episode.
        by_agent: True if the code of an agent failed: an exception, or an exit code above 0.
    """

    def __init__(self, message: str, outcome: Outcome = "error", *, by_agent: bool = False) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.by_agent = by_agent


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
    if not _is_encodable((seen.text, seen.messages, seen.tools)):
        raise EnvironmentFault(
            "an Observation has half of a surrogate pair, which cannot be tokenized. Use"
            " text.encode('utf-8', 'replace').decode()"
        )


def made_episode(make: MakeEpisode, task: Task, limit: float | None) -> Episode:
    """Make the episode of a task. It gets its own copy of the task.

    Args:
        make: the environment's class or function.
        task: the task.
        limit: time limit in seconds. None: no limit.

    Raises:
        EnvironmentFault: `make` raised an error, blocked for too long, or made something else.
    """
    try:
        with calling(limit):
            made = make(own_copy(task))
    except Blocked as error:
        raise _too_late("__init__", limit or 0.0) from error
    except BaseException as error:
        if not is_fault(error):
            raise
        raise EnvironmentFault(one_line(error)) from error
    if not isinstance(made, Episode):
        raise EnvironmentFault(
            f"it made an object of type {type(made).__name__}, which has no `start` and `step`"
        )
    return made


def check_start(length: int, most: int, least: str = "") -> None:
    """Check that a reply fits after the first observation.

    Args:
        length: tokens of the observation.
        most: maximum number of tokens of the episode.
        least: "at least " if `length` is a lower bound.

    Raises:
        EnvironmentFault: there is no room.
    """
    if length >= most:
        raise EnvironmentFault(
            f"the first observation has {least}{length} tokens, which leaves no room for a reply"
            f" in {most} tokens: raise rollout.max_episode_tokens",
            "context",
        )


def checked_turn(answer: Observation | End) -> tuple[float, int]:
    """Reward of the last reply, and the number of its calls that failed.

    Raises:
        EnvironmentFault: the reward is not a finite number, or the count is not a whole number.
    """
    failed = answer.tool_errors
    if not isinstance(failed, int) or failed < 0:
        raise EnvironmentFault(
            f"tool_errors = {failed!r} must be the number of failed calls, 0 or more"
        )
    try:
        return turn_reward(answer), int(failed)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(one_line(error)) from error


def checked_end(end: End, provenance: str) -> Reward | None:
    """Final reward of an episode. None: it is not known yet, or reward functions score it.

    Args:
        end: the end of the episode.
        provenance: one letter per token of the episode, as in `Trajectory`.

    Raises:
        EnvironmentFault: the outcome is unknown, a number of the reward is not finite, the reward
            has no value, or a step's reward is on a token that was not sampled.
    """
    if end.outcome not in get_args(Outcome):
        raise EnvironmentFault(
            f"End.outcome = {end.outcome!r} is unknown. Use {', '.join(get_args(Outcome))}"
        )
    try:
        reward = final_reward(end)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(one_line(error)) from error
    if reward is None:
        return None
    if reward.value is None:
        raise EnvironmentFault(
            reward.error or "End.reward has no value",
            "error" if end.outcome == "ended" else end.outcome,
        )
    for at, _ in reward.steps:
        if not 0 <= at < len(provenance) or provenance[at] != SAMPLED:
            raise EnvironmentFault(f"Reward.steps: token {at} was not sampled by the policy")
    return reward


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(given.get(name), str) for name in ("role", "content")
    )


def _is_encodable(given: object) -> bool:
    """True if no text in a JSON value has half of a surrogate pair."""
    if isinstance(given, str):
        return not any("\ud800" <= character <= "\udfff" for character in given)
    if isinstance(given, Mapping):
        return all(_is_encodable(one) for pair in given.items() for one in pair)
    return not isinstance(given, list | tuple) or all(map(_is_encodable, given))


async def call_environment(call: Callable[[], Awaitable[T]], name: str) -> T:
    """Result of an async method of the environment.

    Args:
        call: calls the method.
        name: name of the method, for messages.

    Raises:
        EnvironmentFault: the method is not async, or it raised something that is no Exception, such
            as by `sys.exit`, which must not end the run.
    """
    try:
        result = call()
        if not isinstance(result, Awaitable):
            raise EnvironmentFault(f"`{name}` is not async. Write `async def {name}`")
        return await result
    except BaseException as error:
        if isinstance(error, Exception | Blocked) or not is_fault(error):
            raise
        raise EnvironmentFault(one_line(error)) from error


async def in_time(call: Callable[[], Awaitable[Any]], limit: float | None, name: str) -> Any:
    """Result of an async method of the environment.

    Args:
        call: calls the method.
        limit: time limit in seconds. None: no limit.
        name: name of the environment's method, for messages.

    Raises:
        EnvironmentFault: as `call_environment`, and after `limit` seconds. The method is then
            cancelled. Its end is not awaited, because it may ignore the cancellation. If it blocks,
            it is interrupted.
    """
    answer = Called(partial(call_environment, call, name), limit)
    if limit is None:
        return await answer
    task = asyncio.ensure_future(answer)
    try:
        done, _ = await asyncio.wait((task,), timeout=limit)
    finally:
        task.cancel()
    if not done:
        raise _too_late(name, limit)
    if task.cancelled():
        raise EnvironmentFault(f"`{name}` cancelled itself")
    try:
        return task.result()
    except Blocked as error:
        raise _too_late(name, limit) from error


def _too_late(name: str, limit: float) -> EnvironmentFault:
    """The fault of a method that reached its time limit."""
    return EnvironmentFault(
        f"`{name}` took longer than environment.timeout_s = {limit:g} s", "timeout"
    )
