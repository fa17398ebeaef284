"""Environments for TRL's `environment_factory`: `environment.episode = "trl:FILE.py:CLASS"`.

Such a class has a method `reset(**columns)`. Its other public methods are tools. TRL need not be
installed. Tasks come from any data source with prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sixfold.environment.episode import Action, End, MakeEpisode, Observation
from sixfold.environment.grade import entries, number
from sixfold.environment.named import loading
from sixfold.environment.own_thread import OwnThread
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import Registry, as_tool
from sixfold.errors import UserError, nearest
from sixfold.types import Task
from sixfold.user_code import own_copy

from .driven import content_text
from .spec import import_module, parse_spec

KIND = "trl"
COLUMN = "environment"
"""Column of a task that names its factory, if there are several."""

Factory = Callable[[], Any]


@dataclass(frozen=True)
class Factories:
    """Factories of environments.

    Attributes:
        where: name of the environment in messages.
        factories: factories by name. A single factory has the name "".
        resets: signature of each factory's `reset`, by its name.
        reward: function with TRL's signature that scores an episode, or None.
    """

    where: str
    factories: Mapping[str, Factory]
    resets: Mapping[str, inspect.Signature]
    reward: Callable[..., Any] | None = None

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Check that every task has a factory, and the columns that `reset` and the reward need.

        Raises:
            UserError: for the first task that does not.
        """
        given = inspect.Signature() if self.reward is None else inspect.signature(self.reward)
        for task in tasks:
            _bind(self.resets[self.name_of(task)], task.columns, f"{self.where}: reset", task)
            offered = {**task.columns, "prompts": [], "completions": [], "environments": []}
            taken = {name: offered[name] for name in offered if name in given.parameters}
            _bind(given, taken, f"{self.where}: the reward", task)

    def name_of(self, task: Task) -> str:
        """Name of the factory of a task.

        Raises:
            UserError: its column `environment` names no factory.
        """
        if "" in self.factories:
            return ""
        name = str(task.columns.get(COLUMN, ""))
        if name not in self.factories:
            raise UserError(
                f"{self.where}: the column {COLUMN!r} of task {task.id} is {name!r}. Use"
                f" {', '.join(self.factories)}.{nearest(name, list(self.factories))}"
            )
        return name

    def __call__(self, task: Task) -> TrlEpisode:
        return TrlEpisode(task, self.factories[self.name_of(task)](), self.reward)


class TrlEpisode(ToolEpisode):
    """One episode. A reply without a call ends it.

    The reward comes from the first of these that exists: the function `reward`, the environment's
    method `get_reward`, its attribute `reward`. If there is none, the run's reward functions score
    the last reply.

    Args:
        task: its columns are the arguments of `reset`.
        environment: an object of the user's class.
        reward: function with TRL's signature, or None.
    """

    def __init__(
        self, task: Task, environment: Any, reward: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(task, functions=public_methods(environment))
        self._environment = environment
        self._reward = reward
        self._thread = OwnThread()
        self._said: list[dict[str, Any]] = []

    async def start(self) -> Observation:
        """Reset the environment. Its text is appended to the last message of the prompt."""
        first = await super().start()
        columns = own_copy(dict(self.task.columns))  # the reward gets them unchanged
        seen = await self._call(lambda: self._environment.reset(**columns))
        if seen is None:
            return first
        if not isinstance(seen, str | list):
            raise TypeError(f"reset returned {type(seen).__name__}. Return text or None")
        *before, last = first.messages
        added = {**last, "content": last["content"] + content_text(seen)}
        return Observation((*before, added), tools=first.tools)  # type: ignore[arg-type]

    async def step(self, action: Action) -> Observation | End:
        """Run the calls of a reply, or score the episode if it has none."""
        self._said.append(_assistant(action))
        answer = await super().step(action)
        if isinstance(answer, Observation):
            self._said += [dict(message) for message in answer.messages]
        return answer

    async def final(self, action: Action) -> End:
        """Score the end state of the environment."""
        if self._reward is not None:
            return End(await self._by_function(self._reward))
        kind = type(self._environment)
        if callable(getattr(kind, "get_reward", None)):
            value = await self._call(self._environment.get_reward)
            return End(None if value is None else number(value))
        value = getattr(self._environment, "reward", None)  # optional in TRL
        return End(None if value is None else number(value))

    async def close(self) -> None:
        self._thread.end()

    async def _by_function(self, reward: Callable[..., Any]) -> float | None:
        """Reward of the episode by a function with TRL's signature, which scores a batch of one."""
        columns = {key: [value] for key, value in self.task.columns.items()}
        own = own_copy({**columns, "prompts": [self.task.prompt], "completions": [self._said]})
        given = {**own, "environments": [self._environment]}
        names = inspect.signature(reward).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in names.values()):
            given = {key: value for key, value in given.items() if key in names}
        values = entries(await self._call(lambda: reward(**given)))
        if len(values) != 1:
            raise ValueError(
                f"the reward function returned {len(values)} values for 1 completion. Return one"
                " value per completion"
            )
        return None if values[0] is None else number(values[0])

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Result of a call in the environment's thread, awaited if it is awaitable."""
        result = await self._thread.call(function)
        return await result if inspect.isawaitable(result) else result


def _assistant(action: Action) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in action.calls
    ]
    said = {"role": "assistant", "content": action.content}
    return {**said, "tool_calls": calls} if calls else said


def public_methods(environment: Any) -> list[Callable[..., Any]]:
    """The methods that TRL uses as tools, sorted by name."""
    return [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    ]


def trl_episode(text: str) -> MakeEpisode:
    """Make a function that makes the episodes of a class, a function or a dictionary of factories.

    Args:
        text: `path/to/file.py:NAME` or `module:NAME`. `?reward=FUNCTION` may follow: a function of
            the same module with TRL's signature, which gets `environments`.

    Raises:
        UserError: the environment does not exist, has no `reset`, or has a tool without a schema.
    """
    spec = parse_spec(KIND, text)
    where = f"{KIND}:{text}"
    if not spec.module:
        raise UserError(f"{where} has no file. Give {KIND}:path/to/file.py:Class")
    members = vars(import_module(KIND, spec.module))
    made = members.get(spec.name)
    if not isinstance(made, Mapping) or not made:
        made = _callable(members, spec.name, where)
    unknown = set(spec.arguments) - {"reward"}
    if unknown:
        raise UserError(
            f"{where}: unknown argument {sorted(unknown)[0]!r}. TRL calls factories without"
            " arguments. Use only ?reward=FUNCTION"
        )
    reward = spec.arguments.get("reward")
    scored = None if reward is None else _callable(members, str(reward), where)
    factories = dict(made) if isinstance(made, Mapping) else {"": made}
    resets = {
        name: _check_environment(factory, f"{where}[{name!r}]" if name else where)
        for name, factory in factories.items()
    }
    return Factories(where, factories, resets, scored)


def _callable(members: Mapping[str, Any], name: str, where: str) -> Any:
    found = members.get(name)
    if not callable(found):
        hint = nearest(name, [n for n, m in members.items() if callable(m)])
        raise UserError(f"{where}: the module has no class or function {name!r}.{hint}")
    return found


def _bind(signature: inspect.Signature, given: Mapping[str, Any], what: str, task: Task) -> None:
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UserError(
            f"{what} cannot be called with the columns of task {task.id}: {error}. Its columns are"
            f" {', '.join(task.columns) or 'none'}"
        ) from error


def _check_environment(factory: Factory, where: str) -> inspect.Signature:
    """Make one environment, as TRL does, and check it. Returns the signature of `reset`."""
    with loading(f"{where} cannot be made without arguments"):
        environment = factory()
    if not callable(getattr(type(environment), "reset", None)):
        raise UserError(f"{where} has no method `reset(self, **columns)`")
    Registry([as_tool(method) for method in public_methods(environment)])  # checks the schemas
    return inspect.signature(environment.reset)
