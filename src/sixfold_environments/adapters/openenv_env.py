"""OpenEnv environments: `environment.episode = "openenv:URL"`, or `"openenv:FILE.py:CLASS"`.

A URL names a running server; the library's own client connects to it. A class runs in this process
and needs only its own imports. A task is a seed. Its prompt is the first observation.
"""

from __future__ import annotations

import inspect
import json
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from sixfold.environment.episode import Action, End, Episode, MakeEpisode, Observation
from sixfold.environment.named import loading
from sixfold.environment.tools.tool import Registry
from sixfold.errors import UserError, nearest, one_line
from sixfold.event_loop import run_blocking
from sixfold.types import Task

from .actions import Adapted, MalformedAction, hints, malformed_answer
from .observations import step_answer
from .openenv_actions import ActionSchema
from .openenv_sessions import Local, Remote, Session, takes_seed
from .openenv_tools import ToolWorld
from .seeds import SEEDS_PER_RUN, first_observation, seed_task, task_seed
from .spec import import_module, parse_spec

KIND = "openenv"
DEFAULT_TASKS = 500
"""Number of tasks if data.limit is not set. Each costs one reset."""

SCHEMA_S = 10.0
"""Seconds within which a server must send the schema of its actions."""


@dataclass(frozen=True)
class World:
    """An OpenEnv environment: a server, or a class in this process.

    Attributes:
        seeded: False if its class has a `reset` without a seed.
        validate: makes an action from its fields, or raises MalformedAction.
    """

    where: str
    actions: ActionSchema
    session: Callable[[], Session]
    seeded: bool = True
    validate: Callable[[Mapping[str, Any]], Any] = dict

    def episode(self, task: Task) -> Episode:
        if self.actions.is_call:
            return ToolWorld(self.where, self.session(), task)
        return OpenEnvEpisode(self, task)


class OpenEnvEpisode:
    """One episode. The reward of a step is the reward of the turn. `done` ends the episode.

    Args:
        task: its column `seed` seeds the environment.
    """

    def __init__(self, world: World, task: Task) -> None:
        self._world = world
        self._task = task
        self._session: Session | None = None

    async def start(self) -> Observation:
        self._session = self._world.session()
        seen = await self._session.reset(task_seed(self._task))
        return first_observation(self._task, seen.text)

    async def step(self, action: Action) -> Observation | End:
        assert self._session is not None
        try:
            payload = self._world.actions.payload(action.text)
            seen = await self._session.step(payload)
        except MalformedAction as error:
            return malformed_answer(error, self._world.actions.expected)
        return step_answer(payload, seen.text, seen.reward, "ended" if seen.done else None)

    async def close(self) -> None:
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
    if world.actions.is_call:
        return Adapted(world.episode, Registry([]).errors)

    def read(reply: str) -> Any:
        return world.validate(world.actions.payload(reply))

    return Adapted(world.episode, hints(read, world.actions.expected))


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
    seeds = range(first, first + (limit or DEFAULT_TASKS))
    with loading(f"{world.where} failed in reset"):
        observed = run_blocking(_first_observations(world, seeds))
    return [seed_task(world.where, seed, text) for seed, text in enumerate(observed, first)]


def openenv_notes(text: str, seed: int) -> list[str]:
    """Notes for the user if seeds do not reach the environment.

    Args:
        text: the environment, as for `openenv_episode`.
    """
    world = _world(text)
    first = seed * SEEDS_PER_RUN
    if world.seeded:
        one, other = (run_blocking(_first_observations(world, (first,))) for _ in range(2))
        why = "" if one == other else "two resets with the same seed differ"
    else:
        why = "its method `reset` has no parameter `seed`"
    return [f"{world.where}: {why}, so the samples of a task may begin differently"] if why else []


async def _first_observations(world: World, seeds: Iterable[int]) -> list[str]:
    """First observations for some seeds."""
    session = world.session()
    try:
        return [(await session.reset(seed)).text for seed in seeds]
    finally:
        await session.close()


@lru_cache(maxsize=8)
def _world(text: str) -> World:
    where = f"{KIND}:{text}"
    if text.startswith(("http://", "https://")):
        _library()
        schema = ActionSchema(_remote_schema(text, where))
        return World(where, schema, lambda: Remote(_library()(base_url=text)))
    spec = parse_spec(KIND, text)
    if not spec.module:
        raise UserError(f"{where} has no file. Give {KIND}:URL or {KIND}:path/to/file.py:Class")
    members = vars(import_module(KIND, spec.module))
    kind: Any = members.get(spec.name)
    if not isinstance(kind, type):
        hint = nearest(spec.name, [n for n, m in members.items() if isinstance(m, type)])
        raise UserError(f"{where}: {spec.module} has no class {spec.name!r}.{hint}")
    reset = inspect.getattr_static(kind, "reset", None)
    if not callable(reset):
        raise UserError(f"{where} is no environment: it has no method reset")
    action = _action_class(kind, where)
    schema = ActionSchema(action.model_json_schema())
    classes = _call_classes(kind, action) if schema.is_call else {}

    def validate(payload: Mapping[str, Any]) -> Any:
        try:
            return classes.get(payload.get("type"), action).model_validate(payload)
        except ValidationError as error:
            raise MalformedAction(error.errors()[0]["msg"]) from error

    seeded = takes_seed(reset)
    make = partial(kind, **spec.arguments)
    return World(where, schema, lambda: Local(make, validate), seeded, validate)


def _action_class(kind: Any, where: str) -> Any:
    """The class of actions: the annotation of `step`, or the first argument of the generic base.

    If that is a base class without fields, it is the only class of the environment's module that
    extends it.
    """
    step = getattr(kind, "step", None)
    try:
        hints = get_type_hints(step) if callable(step) else {}
    except (NameError, TypeError):
        hints = {}
    names = list(inspect.signature(step).parameters)[1:2] if callable(step) else []
    bases = [get_args(base)[:1] for base in getattr(kind, "__orig_bases__", ())]
    given = (*(hints.get(name) for name in names), *(arg for args in bases for arg in args))
    found = [one for one in given if isinstance(one, type) and issubclass(one, BaseModel)]
    if found and not ActionSchema(found[0].model_json_schema()).fields:
        extending = {
            one: None
            for one in vars(sys.modules[kind.__module__]).values()
            if isinstance(one, type)
            and issubclass(one, found[0])
            and ActionSchema(one.model_json_schema()).fields
        }
        found = [*extending, *found] if len(extending) < 2 else []
    if not found:
        raise UserError(
            f"{where}: the class of its actions is unknown. Annotate it:"
            " def step(self, action: MyAction)"
        )
    return found[0]


def _call_classes(kind: Any, action: Any) -> dict[Any, Any]:
    """Value of `type` -> class of actions that list and call tools.

    They are in a module of the environment's class, of its bases, or of its action.
    """
    modules = [vars(sys.modules[one.__module__]) for one in (*kind.__mro__, action)]
    named = {"list_tools": "ListToolsAction", "call_tool": "CallToolAction"}
    return {
        value: found
        for value, name in named.items()
        if (found := next((m[name] for m in modules if name in m), None)) is not None
    }


def _remote_schema(url: str, where: str) -> Mapping[str, Any]:
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
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise UserError("openenv is not installed. Run pip install openenv") from error
    return GenericEnvClient
