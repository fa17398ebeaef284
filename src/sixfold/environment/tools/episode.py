"""Episodes with tools: the policy calls functions, reads their results, and then answers."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...types import Message, Task, ToolCall
from ...user_code import own_copy
from ..blocking_episode import BlockingEpisode, is_blocking
from ..episode import Action, ChecksTasks, End, Episode, MakeEpisode, Observation
from .observation import ToolError, error_text, shortened
from .replay import CallKey, Recorded, canonical
from .running import Call
from .setup import DEFAULT, ToolSetup
from .tool import Registry, Tool, as_tool


class ToolEpisode:
    """Episode in which the policy may call tools. A reply without a call ends it.

    Methods with the decorator `tool` are tools that share the episode's state. A subclass scores
    the end state in `final`. Without `final`, the run's reward functions score the last reply.

    The calls of one reply run concurrently. Calls of stateful tools, such as methods, run one after
    the other, in the order of the reply. A call that fails gives the policy a structured error, see
    `observation.ErrorKind`.

    Args:
        functions: further tools, besides the methods and those of the run.

    Attributes:
        setup: tools and limits of the run. The run sets it before `start`.
        not_copied: why two copies of an episode cannot both go on, for a message. "": they can.
    """

    not_copied = ""

    @classmethod
    def configured(cls, config: Any) -> type[ToolEpisode]:
        """The class with the settings of a recipe. A subclass may take its own from them.

        Args:
            config: the settings `environment`.
        """
        return cls

    def __init__(self, task: Task, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self.task = task
        self.setup: ToolSetup = DEFAULT
        self._functions = [as_tool(one) for one in functions]
        self._registry: Registry | None = None
        self._last: Call | None = None
        self._before = ""

    async def start(self) -> Observation:
        """The task's prompt, and the descriptions of the tools.

        Raises:
            UserError: two tools have the same name, or a tool has no schema.
        """
        prompt = self.task.prompt
        if isinstance(prompt, str):
            prompt = (Message(role="user", content=prompt),)
        # A subclass may change the descriptions, which all episodes share.
        return Observation(messages=prompt, tools=own_copy(self.registry.descriptions))

    async def step(self, action: Action) -> Observation | End:
        """Run the calls of a reply, or end the episode if it has none."""
        if not (action.calls or action.malformed):
            return await self.final(action)
        done = [*await self._run(action.calls), *map(_malformed, action.malformed)]
        most = self.setup.max_result
        return Observation(
            messages=tuple(one.message(number, most) for number, one in enumerate(done)),
            events=tuple(one.event(most) for one in done),
            tool_errors=sum(one.failed for one in done),
        )

    async def final(self, action: Action) -> End:
        """Score a reply without calls. Override it to grade the reply or the end state."""
        return End()

    def __deepcopy__(self, memo: dict[int, Any]) -> ToolEpisode:
        """Copy for a branch. The task and the state are copied; the run's tools are shared."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        own = {"task": own_copy(self.task), "setup": self.setup, "_registry": None, "_last": None}
        for name, value in vars(self).items():
            vars(copied)[name] = own[name] if name in own else copy.deepcopy(value, memo)
        return copied

    @property
    def registry(self) -> Registry:
        """All tools: methods, the functions of this object, and the tools of the run."""
        if self._registry is None:
            self._registry = Registry([*own_tools(self), *self._functions, *self.setup.tools])
        return self._registry

    async def _run(self, calls: Sequence[ToolCall]) -> list[Done]:
        """Run the calls. Returns their outcomes in the order of the reply."""
        most = self.setup.max_calls
        places: dict[int, Done] = {
            at: _failed(call, ToolError(f"a reply may have {most} calls", "too_many_calls"))
            for at, call in enumerate(calls[most:], start=most)
        }
        ordered, free = list[tuple[int, ToolCall, Tool]](), list[tuple[int, ToolCall, Tool]]()
        for at, call in enumerate(calls[:most]):
            try:
                tool = self.registry.find(call.name)
            except ToolError as error:
                places[at] = _failed(call, error)
                continue
            (ordered if tool.stateful else free).append((at, call, tool))
        branches = [self._one_by_one([one], places) for one in free]
        await _all([*branches, self._one_by_one(ordered, places)])
        return [places[at] for at in range(len(calls))]

    async def _one_by_one(
        self, calls: Sequence[tuple[int, ToolCall, Tool]], places: dict[int, Done]
    ) -> None:
        for at, call, tool in calls:
            places[at] = await self._done(call, tool)

    async def _done(self, call: ToolCall, tool: Tool) -> Done:
        """Run one call, or replay it.

        Raises:
            ToolsFailed: the tool cannot work at all, so the episode fails.
        """
        try:
            values = tool.values(call.arguments)
        except ToolError as error:
            return _failed(call, error)
        run = partial(self._outcome, tool, values)
        recorder = self.setup.recorder
        if recorder is None or not tool.is_recorded:
            return Done(call, await run())
        return Done(call, await recorder.outcome(self._key(call, tool), run))

    def _key(self, call: ToolCall, tool: Tool) -> CallKey:
        """Key of a call. For a stateful tool, it becomes part of the keys of later calls."""
        key = CallKey(tool.name, canonical(call.arguments), tool.version)
        if tool.stateful:
            key = replace(key, task=self.task.id, before=self._before)
            self._before = key.digest
        return key

    async def _outcome(self, tool: Tool, values: Mapping[str, Any]) -> Recorded:
        """Run a call and measure its time.

        Raises:
            ToolsFailed: the tool cannot work at all, so the episode fails.
        """
        begun = time.monotonic()
        try:
            outcome = Recorded(await self._result(tool, values))
        except ToolError as error:
            outcome = Recorded(error=error.kind, message=str(error))
        return replace(outcome, seconds=round(time.monotonic() - begun, 6))

    async def _result(self, tool: Tool, values: Mapping[str, Any]) -> str:
        if tool.stateful and self._last is not None and self._last.runs:
            raise ToolError("an earlier call still runs, after its time limit", "busy")
        running = Call(tool, values, self.setup.slots)
        if tool.stateful:
            self._last = running
        return await running.result(self.setup.limit(tool))


@dataclass(frozen=True)
class Done:
    """A call and its outcome."""

    call: ToolCall
    outcome: Recorded

    @property
    def failed(self) -> bool:
        """True if the outcome is an error."""
        return bool(self.outcome.error)

    def message(self, number: int, limit: int) -> Message:
        """The message in which the policy reads the outcome.

        Args:
            number: index of the call in the reply.
            limit: maximum number of characters of a result.
        """
        more = {"name": self.call.name, "tool_call_id": self.call.id or f"call{number:05}"}
        text = (
            error_text(self.outcome.error, self.outcome.message)
            if self.failed
            else shortened(self.outcome.result, limit)
        )
        return Message(role="tool", content=text, **more)  # type: ignore[typeddict-item]

    def event(self, limit: int) -> dict[str, Any]:
        """The event that the trajectory records.

        Args:
            limit: maximum number of characters of a result.
        """
        done = self.outcome
        shown = (
            {"error": done.error, "message": done.message}
            if self.failed
            else {"result": shortened(done.result, limit)}
        )
        call = {"kind": "tool_call", "tool": self.call.name, "arguments": self.call.arguments}
        return {**call, **shown, "seconds": done.seconds}


def _failed(call: ToolCall, error: ToolError) -> Done:
    """Outcome of a call that was refused, and not run."""
    return Done(call, Recorded(error=error.kind, message=str(error)))


def _malformed(reason: str) -> Done:
    """Outcome of a block that has the marks of a call but cannot be parsed."""
    problem = f"the tool call cannot be read: {reason}"
    return _failed(ToolCall("tool", ""), ToolError(problem, "malformed"))


def own_tools(episode: ToolEpisode | type[ToolEpisode]) -> list[Tool]:
    """Methods of an episode that are tools, in the order of their definition."""
    kind = episode if isinstance(episode, type) else type(episode)
    names = dict.fromkeys(
        name
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, Tool)
    )
    members = [getattr(episode, name) for name in names]
    return [member for member in members if isinstance(member, Tool)]


@dataclass(frozen=True)
class Equipped:
    """Makes episodes. Episodes with tools get the setup of the run."""

    make: MakeEpisode
    setup: ToolSetup

    def __call__(self, task: Task) -> Episode:
        """A new episode of a task."""
        if isinstance(self.make, type) and is_blocking(self.make):
            return BlockingEpisode(partial(self.make, task))
        episode = self.make(task)
        if isinstance(episode, ToolEpisode):
            episode.setup = self.setup
        return BlockingEpisode(lambda: episode) if is_blocking(type(episode)) else episode

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Check the tasks of a run before it starts, if the environment can.

        Raises:
            UserError: for the first task that has no episode.
        """
        if isinstance(self.make, ChecksTasks):
            self.make.check_tasks(tasks)

    @property
    def tool_class(self) -> type[ToolEpisode] | None:
        """The class of the episodes if it is a subclass of `ToolEpisode`, else None."""
        make = self.make
        return make if isinstance(make, type) and issubclass(make, ToolEpisode) else None


async def _all(branches: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(branch) for branch in branches]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
