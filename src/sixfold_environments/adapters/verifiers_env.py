"""Environments written for `verifiers`: `environment.episode = "verifiers:ENV"`.

ENV is a module with `load_environment`, which returns an environment of the classic library
(verifiers 0.1.14 to 0.3: SingleTurnEnv, MultiTurnEnv, ToolEnv, Rubric). The environment's own
rollout runs, with a client of this module that samples the replies. So its state, stop conditions,
parser and rubric are used unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sixfold.environment.episode import Action, End, MakeEpisode
from sixfold.environment.grade import number
from sixfold.environment.named import loading
from sixfold.errors import UserError, is_fault, nearest, one_line
from sixfold.types import Message, Outcome, Reward, Task
from sixfold.user_code import own_copy

from .driven import Driven, Talk, canonical
from .spec import Spec, import_module, parse_spec

KIND = "verifiers"
VERSIONS = "verifiers>=0.1.14,<0.4"

OUTCOMES: Mapping[str, Outcome] = {
    "max_turns_reached": "turns",
    "max_total_completion_tokens_reached": "length",
    "prompt_too_long": "context",
    "timeout_reached": "timeout",
}
"""Stop condition of the library -> outcome. The outcome of all others is "ended"."""


@dataclass
class Samples:
    """Samples of one task, whose rewards may depend on each other.

    All samples of a task start before the first one ends. So when `playing` falls to 0, the group
    is complete. Samples that failed or were cut by a limit are not scored.

    Attributes:
        score: computes the rewards of finished samples from their states.
        playing: number of samples that have not ended.
        waiting: states of finished samples, with their future rewards.
        scoring: task that computes the rewards, once all samples have ended.
    """

    score: Callable[[Sequence[Any]], Awaitable[list[Reward]]]
    playing: int = 0
    waiting: list[tuple[Any, asyncio.Future[Reward]]] = field(default_factory=list)
    scoring: asyncio.Task[None] | None = None

    def ended(self, state: Any) -> Callable[[], Awaitable[Reward]]:
        """Add a finished sample.

        Args:
            state: its state in the library.

        Returns:
            Function that waits for its reward, see `End.later`.
        """
        reward: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self.waiting.append((state, reward))

        async def later() -> Reward:
            return await reward

        return later

    def left(self) -> None:
        """Count a sample as ended, for any reason. The last one starts the scoring."""
        self.playing -= 1
        if not self.playing and self.waiting:
            self.scoring = asyncio.create_task(self._score())

    async def _score(self) -> None:
        waiting, self.waiting = self.waiting, []
        try:
            rewards = await self.score([state for state, _ in waiting])
        except BaseException as error:  # becomes the error of every sample
            if not is_fault(error):
                raise
            rewards = [Reward.failed(one_line(error))] * len(waiting)
        for (_, future), reward in zip(waiting, rewards, strict=True):
            if not future.done():
                future.set_result(reward)


@dataclass(frozen=True)
class Classic:
    """An environment of the classic library.

    Attributes:
        client: class of clients that request replies from a `Talk`.
        samples: unfinished samples of each task, by task id.
    """

    where: str
    env: Any
    client: Any
    samples: dict[str, Samples] = field(default_factory=dict)

    def episode(self, task: Task) -> Driven:
        samples = self.samples.setdefault(task.id, Samples(self.score))
        samples.playing += 1

        async def play(talk: Talk) -> End:
            columns = own_copy(dict(task.columns))
            row = {key: value for key, value in columns.items() if value is not None}
            state = await self.env.rollout(row, self.client(talk), "sixfold", {})
            if (error := state.get("error")) is not None:
                raise error.__cause__ or error
            outcome = self._outcome(str(state.get("stop_condition")))
            if self.env.rubric.has_group_rewards:
                return End(outcome=outcome, later=samples.ended(state))
            (reward,) = await self.score([state])
            return End(reward, outcome)

        def left() -> None:
            samples.left()
            if not samples.playing:
                self.samples.pop(task.id, None)

        return Driven(play, left)

    async def score(self, states: Sequence[Any]) -> list[Reward]:
        """Rewards of finished rollouts of one task, by the environment's rubric."""
        rubric = self.env.rubric
        with _reward_errors() as failed:
            if rubric.has_group_rewards:
                await rubric.score_group(list(states))
            else:
                for state in states:
                    await rubric.score_rollout(state)
        for state in states:
            await rubric.cleanup(state)
        if failed:
            return [Reward.failed(failed[0])] * len(states)
        return [self._reward(state) for state in states]

    def _reward(self, state: Any) -> Reward:
        parts = {name: number(value) for name, value in (state["metrics"] or {}).items()}
        return Reward(number(state["reward"]), parts=parts, weights=_weights(self.env.rubric))

    def _outcome(self, stop: str) -> Outcome:
        """Outcome of a stop condition.

        An environment of one turn always stops with "max_turns_reached", which is its normal end.
        """
        if stop == "max_turns_reached" and self.env.max_turns == 1:
            return "ended"
        return OUTCOMES.get(stop, "ended")


def verifiers_episode(text: str) -> MakeEpisode:
    """Make a function that makes the episodes of an environment.

    Args:
        text: name of an installed environment (`ENV`), `path/to/file.py`, or `module:function`.
            Arguments of `load_environment` may follow: `ENV?split="train"`.

    Raises:
        UserError: the environment does not exist, or fails to load.
    """
    return _load_environment(text).episode


def verifiers_tasks(text: str, limit: int, heldout: int) -> tuple[list[Task], list[Task]]:
    """Tasks of the environment's own data set, and of its evaluation set if it has one.

    Args:
        text: the environment, as for `verifiers_episode`.
        limit: maximum number of training tasks. 0: all.
        heldout: maximum number of evaluation tasks.

    Returns:
        The training tasks and the evaluation tasks.

    Raises:
        UserError: the environment or its data set fails to load, or a row has no chat prompt.
    """
    made = _load_environment(text)
    env, where = made.env, made.where
    has_train = env.dataset is not None or env.dataset_source is not None
    has_eval = env.eval_dataset is not None or env.eval_dataset_source is not None
    with loading(f"{where}: its data set cannot be loaded"):
        rows = (env.get_dataset if has_train else env.get_eval_dataset)(n=limit or -1)
        tested = env.get_eval_dataset(n=heldout) if has_train and has_eval and heldout else []
    return (
        [_task(where, "train", dict(row)) for row in rows],
        [_task(where, "eval", dict(row)) for row in tested],
    )


def _task(where: str, split: str, row: dict[str, Any]) -> Task:
    row = own_copy(row)
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"{where}: example {row.get('example_id')} has no chat prompt. Use an environment with"
            " message_type = 'chat'"
        )
    try:
        messages = tuple(canonical(dict(message)) for message in prompt)
    except TypeError as error:
        raise UserError(f"{where}: example {row.get('example_id')}: {error}") from error
    return Task(
        id=f"{where}-{split}-{row['example_id']}",
        prompt=tuple(Message(role=m["role"], content=m["content"]) for m in messages),
        answer=row.get("answer"),
        columns=row,
        source=where,
        world=f"{split}-{row['example_id']}",
    )


@lru_cache(maxsize=8)
def _load_environment(text: str) -> Classic:
    spec = parse_spec(KIND, text)
    where = f"{KIND}:{text}"
    _library()
    load = _loader(spec, where)
    with _signals_kept(), loading(f"{where}: {load.__name__} failed"):
        env = load(**spec.arguments)
    if not any(base.__name__ == "Environment" for base in type(env).__mro__):
        raise UserError(
            f"{where}: {load.__name__} returned {type(env).__name__}, not a verifiers Environment"
        )
    return Classic(where, env, _client_class())


def _loader(spec: Spec, where: str) -> Any:
    if spec.module:
        module, name = import_module(KIND, spec.module), spec.name
    elif spec.name.endswith(".py"):
        module, name = import_module(KIND, spec.name), "load_environment"
    else:  # as in the library: the package of OWNER/my-env is my_env
        module = import_module(KIND, spec.name.rpartition("/")[2].replace("-", "_"))
        name = "load_environment"
    members = vars(module)
    if not callable(members.get(name)):
        hint = nearest(name, [other for other, member in members.items() if callable(member)])
        raise UserError(f"{where}: {module.__name__} has no function {name!r}.{hint}")
    return members[name]


def _library() -> None:
    """Check that a version of the library with classic environments is installed."""
    try:
        import verifiers
    except ImportError as error:
        raise UserError(f"verifiers is not installed. Run pip install '{VERSIONS}'") from error
    if importlib.util.find_spec("verifiers.clients") is None:
        raise UserError(
            f"verifiers {getattr(verifiers, '__version__', '')} has no classic environments"
            " (SingleTurnEnv, MultiTurnEnv, ToolEnv) with a client that Sixfold can replace."
            f" Versions 0.1.14 to 0.3 have them: pip install '{VERSIONS}'. Train a task set of"
            " version 0.4 (verifiers.v1) as an agent: environment.agent.command"
        )


@lru_cache(maxsize=1)
def _client_class() -> Any:
    """Class of clients of a `Talk`. It is made on demand, because its base is in the library."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage

    class TalkClient(Client):  # type: ignore[misc]
        """Client that requests replies from a `Talk` instead of a server."""

        def setup_client(self, config: Any) -> Any:
            return None

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            function = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            }
            return {"type": "function", "function": function}

        async def to_native_prompt(
            self, messages: Any
        ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [_message(message) for message in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
        ) -> Action:
            action: Action = await self.client.ask(prompt, tools or ())
            return action

        async def raise_from_native_response(self, response: Action) -> None: ...

        async def from_native_response(self, response: Action) -> Any:
            calls = [
                ToolCall(id=call.id or f"call_{n}", name=call.name, arguments=call.arguments)
                for n, call in enumerate(response.calls)
            ]
            cut = response.finish_reason == "length"
            return Response(
                id="sixfold",
                created=int(time.time()),
                model="sixfold",
                usage=Usage(
                    prompt_tokens=0, reasoning_tokens=0, completion_tokens=0, total_tokens=0
                ),
                message=ResponseMessage(
                    content=response.content,
                    tool_calls=calls or None,
                    finish_reason="length" if cut else "tool_calls" if calls else "stop",
                    is_truncated=cut,
                ),
            )

        async def close(self) -> None: ...

    return TalkClient


def _message(message: Any) -> dict[str, Any]:
    """A message of the library as chat templates read it."""
    given = message.model_dump(exclude_none=True)
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in given.pop("tool_calls", ())
    ]
    return {**given, **({"tool_calls": calls} if calls else {})}


def _weights(rubric: Any) -> dict[str, float]:
    """Weight of each reward function, by name. Includes the members of a group of rubrics."""
    found: dict[str, float] = {}
    for inner in (rubric, *getattr(rubric, "rubrics", ())):
        for function, weight in zip(inner.funcs, inner.weights, strict=False):
            name = getattr(function, "__name__", repr(function))
            found[name] = found.get(name, 0.0) + float(weight)
    return found


_failures: ContextVar[list[str] | None] = ContextVar("verifiers_failures", default=None)


class _RewardErrors(logging.Handler):
    """Collects errors of reward functions. The library only logs them, and uses the reward 0."""

    def emit(self, record: logging.LogRecord) -> None:
        message, noted = record.getMessage(), _failures.get()
        if noted is not None and message.startswith("Error calling"):
            noted.append(" ".join(message.split())[:300])


_HANDLER = _RewardErrors(logging.ERROR)


@contextlib.contextmanager
def _reward_errors() -> Iterator[list[str]]:
    """Collect the errors of reward functions that are called in this context."""
    logger = logging.getLogger("verifiers")
    if _HANDLER not in logger.handlers:
        logger.addHandler(_HANDLER)
    noted: list[str] = []
    token = _failures.set(noted)
    try:
        yield noted
    finally:
        _failures.reset(token)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers of the run, which the library replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number_, handler in kept.items():
            signal.signal(number_, handler)
