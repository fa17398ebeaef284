"""OpenEnv environments: `environment.episode = "openenv:URL"`, or `"openenv:FILE.py:CLASS"`.

A URL names a running server; the library's own client connects to it. A class runs in this process
and needs only its own imports. A task is a seed. Its prompt is the first observation.
"""

from __future__ import annotations

import inspect
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from ...environment.answer_part import answer_part
from ...environment.blocking import run_blocking
from ...environment.episode import Action, End, MakeEpisode, Observation
from ...environment.rewards import checked_value
from ...errors import UserError, nearest, one_line
from ...types import Task
from .actions import MalformedAction, malformed_answer
from .observations import observation_text, step_answer
from .own_thread import OwnThread
from .seeds import SEEDS_PER_RUN, first_observation, seed_task, task_seed
from .spec import import_module, parsed

KIND = "openenv"
DEFAULT_TASKS = 500
"""Number of tasks if data.limit is not set. Each costs one reset."""

SCHEMA_S = 10.0
"""Seconds within which a server must send the schema of its actions."""

NOT_SEEN = ("done", "reward", "metadata")
"""Fields of an observation that are not part of its text."""


@dataclass(frozen=True)
class Seen:
    """Result of a reset or a step."""

    text: str
    reward: float
    done: bool


class Session(Protocol):
    """One running environment."""

    async def reset(self, seed: int | None) -> Seen: ...

    async def step(self, payload: Mapping[str, Any]) -> Seen: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class World:
    """An OpenEnv environment: a server, or a class in this process. It opens sessions.

    Attributes:
        where: its name in messages.
        schema: JSON schema of its actions.
        url: address of the server. "" for a class.
        kind: class of the environment. None for a server.
        action: class of its actions. None for a server.
    """

    where: str
    schema: Mapping[str, Any]
    url: str = ""
    kind: Any = None
    action: Any = None

    def session(self) -> Session:
        """A new session. `reset` opens it."""
        return Remote(self.url) if self.url else Local(self.kind, self.action)

    def payload(self, reply: str) -> dict[str, Any]:
        """The action of a reply.

        If an action has a single field of text, the reply is its value. Otherwise the reply must be
        a JSON object with the fields. For a single field of another type, its JSON value is enough.

        Raises:
            MalformedAction: the reply is not JSON, or has other fields than an action.
        """
        fields = self.fields
        text = answer_part(reply).strip()
        if len(fields) == 1:
            ((name, field),) = fields.items()
            if field.get("type") == "string":
                return {name: text}
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MalformedAction("the reply is not JSON") from error
        if not isinstance(given, dict):
            if len(fields) != 1:
                raise MalformedAction("the reply is not a JSON object")
            given = {next(iter(fields)): given}
        unknown = [name for name in given if name not in fields]
        missing = [name for name in self.schema.get("required", ()) if name not in given]
        if unknown or missing:
            what = f"has no field {missing[0]!r}" if missing else f"has a field {unknown[0]!r}"
            raise MalformedAction(f"the action {what}")
        return given

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of an action, with their schemas."""
        properties = dict(self.schema.get("properties", {}))
        properties.pop("metadata", None)
        return properties

    @property
    def expected(self) -> dict[str, Any]:
        """Description of an action for the policy: the type of each field."""
        return {name: field.get("type", "any") for name, field in self.fields.items()}


class Local:
    """A session of a class. Its calls run in one thread."""

    def __init__(self, kind: Any, action: Any) -> None:
        self._kind = kind
        self._action = action
        self._thread = OwnThread()
        self._env: Any = None

    async def reset(self, seed: int | None) -> Seen:
        """Make and reset the environment."""

        def begin() -> Any:
            if self._env is None:
                self._env = self._kind()
            return self._env.reset(seed=seed)

        return _seen(await self._thread.call(begin))

    async def step(self, payload: Mapping[str, Any]) -> Seen:
        """Validate an action and take it."""
        try:
            action = self._action.model_validate(payload)
        except ValidationError as error:
            raise MalformedAction(error.errors()[0]["msg"]) from error
        return _seen(await self._thread.call(self._env.step, action))

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
    """A session of a server, over its websocket."""

    def __init__(self, url: str) -> None:
        self._client = _library()(base_url=url)

    async def reset(self, seed: int | None) -> Seen:
        """Reset the environment."""
        result = await self._client.reset(**({} if seed is None else {"seed": seed}))
        return _seen(result.observation, result)

    async def step(self, payload: Mapping[str, Any]) -> Seen:
        """Send an action."""
        try:
            result = await self._client.step(dict(payload))
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise MalformedAction(one_line(error)) from error
            raise
        return _seen(result.observation, result)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _seen(observation: Any, result: Any = None) -> Seen:
    """Result of a reset or a step.

    Args:
        observation: a pydantic model, or for a server a dictionary.
        result: has `reward` and `done`. None: the observation has them.

    Raises:
        TypeError: it is not an observation of OpenEnv.
    """
    source = observation if result is None else result
    fields = (
        observation.model_dump(mode="json") if isinstance(observation, BaseModel) else observation
    )
    done = getattr(source, "done", None)
    if not isinstance(fields, Mapping) or not isinstance(done, bool):
        raise TypeError(
            f"the environment returned {type(observation).__name__}. Return an Observation with"
            " `done` and `reward`"
        )
    shown = {name: value for name, value in fields.items() if name not in NOT_SEEN}
    texts = [value for value in shown.values() if isinstance(value, str)]
    reward = 0.0 if source.reward is None else checked_value(source.reward)
    return Seen(texts[0] if len(texts) == 1 else observation_text(shown), reward, done)


class OpenEnvEpisode:
    """One episode. The reward of a step is the reward of the turn. `done` ends the episode.

    Args:
        world: the environment.
        task: its column `seed` seeds the environment.
    """

    def __init__(self, world: World, task: Task) -> None:
        self._world = world
        self._task = task
        self._session: Session | None = None

    async def start(self) -> Observation:
        """Open a session and reset it."""
        self._session = self._world.session()
        seen = await self._session.reset(task_seed(self._task))
        return first_observation(self._task, seen.text)

    async def step(self, action: Action) -> Observation | End:
        """Take the action of a reply."""
        assert self._session is not None
        try:
            payload = self._world.payload(action.text)
            seen = await self._session.step(payload)
        except MalformedAction as error:
            return malformed_answer(error, self._world.expected)
        return step_answer(payload, seen.text, seen.reward, "ended" if seen.done else None)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()


def openenv_episode(text: str) -> MakeEpisode:
    """Make a function that makes the episodes of a server or class.

    Args:
        text: `http://HOST:PORT`, `path/to/file.py:Class` or `module:Class`.

    Raises:
        UserError: the class does not exist, the server does not answer, or actions have no schema.
    """
    world = _world(text)
    return lambda task: OpenEnvEpisode(world, task)


def openenv_tasks(text: str, limit: int, seed: int) -> list[Task]:
    """One task per seed.

    Args:
        text: the environment, as for `openenv_episode`.
        limit: number of tasks. 0: `DEFAULT_TASKS`.
        seed: the run's seed. It chooses the seeds of the tasks.

    Raises:
        UserError: the environment does not exist or cannot be reset, or an observation is empty.
    """
    world = _world(text)
    first = seed * SEEDS_PER_RUN
    try:
        observed = run_blocking(_first_observations(world, first, limit or DEFAULT_TASKS))
    except Exception as error:
        raise UserError(f"{world.where} failed in reset: {one_line(error)}") from error
    return [seed_task(world.where, seed, text) for seed, text in enumerate(observed, first)]


async def _first_observations(world: World, first: int, count: int) -> list[str]:
    session = world.session()
    try:
        return [(await session.reset(first + n)).text for n in range(count)]
    finally:
        await session.close()


@lru_cache(maxsize=8)
def _world(text: str) -> World:
    where = f"{KIND}:{text}"
    if text.startswith(("http://", "https://")):
        _library()
        return World(where, _remote_schema(text, where), url=text)
    spec = parsed(KIND, text)
    if not spec.module:
        raise UserError(f"{where} has no file. Give {KIND}:URL or {KIND}:path/to/file.py:Class")
    members = vars(import_module(KIND, spec.module))
    kind = members.get(spec.name)
    if not isinstance(kind, type):
        hint = nearest(spec.name, [n for n, m in members.items() if isinstance(m, type)])
        raise UserError(f"{where}: {spec.module} has no class {spec.name!r}.{hint}")
    action = _action_class(kind)
    if action is None:
        raise UserError(
            f"{where}: the class of its actions is unknown. Annotate it:"
            " def step(self, action: MyAction)"
        )
    return World(where, action.model_json_schema(), kind=kind, action=action)


def _action_class(kind: Any) -> Any:
    """The class of actions: the annotation of `step`, or the first argument of the generic base."""
    step = getattr(kind, "step", None)
    try:
        hints = get_type_hints(step) if callable(step) else {}
    except (NameError, TypeError):
        hints = {}
    names = list(inspect.signature(step).parameters)[1:2] if callable(step) else []
    bases = [get_args(base)[:1] for base in getattr(kind, "__orig_bases__", ())]
    for found in (*(hints.get(name) for name in names), *(arg for args in bases for arg in args)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


def _remote_schema(url: str, where: str) -> Mapping[str, Any]:
    """Schema of a server's actions."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=SCHEMA_S) as answer:
            schema = json.load(answer)["action"]
            return dict(schema)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{where}: the server did not send the schema of its actions: {one_line(error)}. Start"
            " it, or correct the URL"
        ) from error


def _library() -> Any:
    """The library's client for environments of any kind."""
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise UserError("openenv is not installed. Run pip install openenv") from error
    return GenericEnvClient
