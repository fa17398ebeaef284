"""Sessions of OpenEnv environments: of a class in this process, or of a server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from sixfold.environment.grade import checked_value
from sixfold.environment.own_thread import OwnThread
from sixfold.errors import one_line

from .actions import MalformedAction
from .observations import observation_text

NOT_SEEN = ("done", "reward", "metadata")
"""Fields of an observation that are not part of its text."""


@dataclass(frozen=True)
class Seen:
    """Result of a reset or a step.

    Attributes:
        text: the observation as the policy reads it.
        reward: the reward. 0 if there is none.
        done: True if the episode has ended.
        fields: the observation without reward and end.
    """

    text: str
    reward: float
    done: bool
    fields: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """One running environment."""

    async def reset(self, seed: int | None) -> Seen: ...

    async def step(self, payload: Mapping[str, Any]) -> Seen: ...

    async def close(self) -> None: ...


class Local:
    """A session of a class. Its calls run in one thread.

    Args:
        validate: makes an action from its fields. Raises MalformedAction.
    """

    def __init__(
        self, make: Callable[[], Any], validate: Callable[[Mapping[str, Any]], Any]
    ) -> None:
        self._make = make
        self._validate = validate
        self._thread = OwnThread()
        self._env: Any = None

    async def reset(self, seed: int | None) -> Seen:
        """Make and reset the environment. A `reset` without a parameter `seed` gets none."""

        def begin() -> Any:
            if self._env is None:
                self._env = self._make()
            return self._env.reset(**({"seed": seed} if takes_seed(self._env.reset) else {}))

        return _seen(await self._thread.call(begin))

    async def step(self, payload: Mapping[str, Any]) -> Seen:
        return _seen(await self._thread.call(self._env.step, self._validate(payload)))

    async def close(self) -> None:
        """Close the environment if it has a `close`, after a call that still runs."""

        def end() -> None:
            if callable(close := getattr(self._env, "close", None)):
                close()

        try:
            await self._thread.call(end)
        finally:
            self._thread.end()


class Remote:
    """A session of a server, over its websocket.

    Args:
        client: the library's client for environments of any kind.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    async def reset(self, seed: int | None) -> Seen:
        result = await self._client.reset(**({} if seed is None else {"seed": seed}))
        return _seen(result.observation, result)

    async def step(self, payload: Mapping[str, Any]) -> Seen:
        try:
            result = await self._client.step(dict(payload))
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise MalformedAction(one_line(error)) from error
            raise
        return _seen(result.observation, result)

    async def close(self) -> None:
        await self._client.close()


def takes_seed(reset: Callable[..., Any]) -> bool:
    """True if a function or method `reset` has a parameter `seed`, or takes any keyword."""
    given = inspect.signature(reset).parameters
    return "seed" in given or any(one.kind is one.VAR_KEYWORD for one in given.values())


def _seen(given: Any, result: Any = None) -> Seen:
    """Result of a reset or a step.

    Args:
        given: a pydantic model, or for a server a dictionary.
        result: has `reward` and `done`. None: the observation has them.
    """
    if result is None and not isinstance(given, BaseModel):  # the StepResult of the library
        given, result = getattr(given, "observation", given), given
    source = given if result is None else result
    fields = given.model_dump(mode="json") if isinstance(given, BaseModel) else given
    done = getattr(source, "done", None)
    if not isinstance(fields, Mapping) or not isinstance(done, bool):
        raise TypeError(
            f"the environment returned {type(given).__name__}. Return an Observation with `done`"
            " and `reward`"
        )
    own = {name: value for name, value in fields.items() if name not in NOT_SEEN}
    shown = {name: value for name, value in own.items() if value is not None}
    # An environment whose observations have no fields of their own writes into the metadata.
    metadata = fields.get("metadata") or getattr(source, "metadata", None)
    reward = 0.0 if source.reward is None else checked_value(source.reward)
    text = observation_text(shown or metadata) if shown or metadata else ""
    return Seen(text, reward, done, own)
