"""Contract of environments: an episode is one conversation between the policy and a task.

An environment is a class whose instances play one episode each: `start` returns what the policy
sees first, and `step` takes each reply of the policy. Authors write text and messages. The renderer
in `rollout` owns the tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Protocol, runtime_checkable

from ..types import FinishReason, Message, Outcome, Reward, Task, ToolCall
from .grade import Grade
from .rewards import checked_value


@dataclass(frozen=True)
class Observation:
    """Next input of the policy. Exactly one of `messages` and `text` is given.

    Attributes:
        messages: chat messages, added to the conversation. Roles are those of the chat template,
            such as "user" and "tool". In `start`: the whole conversation so far.
        tools: in `start`: descriptions of the functions that the policy may call, for the chat
            template. They hold for the whole episode.
        text: text that continues the policy's own turn, without a template: for example the result
            of a calculation behind a call in the text.
        reward: reward of the reply that led here. It is credited to the reply's last token.
        stops: strings that end the next reply, besides the end of the turn.
        events: facts to record: JSON-ready dictionaries with a "kind". A tool call has the kind
            "tool_call".
        tool_errors: number of calls in the reply that failed.
        branch: with `rollout.branches` and `rollout.branch_turn` = 0: the samples that share this
            episode diverge here. The first such observation counts.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    reward: float = 0.0
    stops: tuple[str, ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    tool_errors: int = 0
    branch: bool = False


@dataclass(frozen=True)
class End:
    """End of an episode.

    Attributes:
        reward: final reward, to which the rewards of the turns are added. A `Grade` also says why.
            None: the run's reward functions score the finished trajectory.
        outcome: how the episode ended.
        events: facts to record.
        tool_errors: number of calls in the last reply that failed.
        later: computes the reward if it is not known yet, for example because it compares the
            samples of a task. It has no time limit. Then `reward` must be None.
    """

    reward: Reward | Grade | float | None = None
    outcome: Outcome = "ended"
    events: tuple[Mapping[str, Any], ...] = ()
    tool_errors: int = 0
    later: Callable[[], Awaitable[Reward | Grade | float]] | None = None


@dataclass(frozen=True)
class Action:
    """One reply of the policy.

    Calls are read only in episodes with `Observation.tools`, in the form of the model's chat
    template. A call inside a thought does not count.

    Attributes:
        text: the reply. It ends before a stop string or an end token.
        finish_reason: "stop", or "length" if the token limit cut the reply.
        stopped_by: the stop string that ended the reply, or "".
        calls: the tool calls of the reply, in order.
        malformed: for each block that is marked as a call but cannot be read: the reason.
        content: the text without the calls. It equals `text` if there are none.
    """

    text: str
    finish_reason: FinishReason = "stop"
    stopped_by: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    content: str = ""

    def __post_init__(self) -> None:
        if not self.calls:
            object.__setattr__(self, "content", self.text)


@runtime_checkable
class Episode(Protocol):
    """One episode. An object plays once: `start`, then `step` until it returns `End`."""

    async def start(self) -> Observation:
        """First observation, normally the task's prompt."""
        ...

    async def step(self, action: Action) -> Observation | End:
        """Take the policy's reply. Return the next observation, or the end with the reward."""
        ...


@runtime_checkable
class Closing(Protocol):
    """An episode that holds resources, such as a process or a connection."""

    async def close(self) -> None:
        """Free the resources. Called once, after the end of the episode for any reason."""
        ...


MakeEpisode = Callable[[Task], Episode]
"""Makes a new episode for a task. Each sample of a task gets its own."""


def final_reward(end: End) -> Reward | None:
    """The final reward of an episode. None: reward functions score it.

    Raises:
        TypeError: if one of its numbers has another type.
        ValueError: if one of its numbers is not finite or too large, or if there is also a `later`.
    """
    given = end.reward
    if given is not None and end.later is not None:
        raise ValueError("End has both reward and later. Give one of them")
    if isinstance(given, Reward):
        return _checked(given)
    if isinstance(given, Grade):
        return _graded(given)
    return None if given is None else Reward(_number(given, "End.reward"))


def _checked(given: Reward) -> Reward:
    """The reward with all of its numbers as finite floats."""
    if given.value is None:
        return given
    if not isinstance(given.parts, Mapping):
        raise TypeError(f"Reward.parts is of type {type(given.parts).__name__}, not a dictionary")
    score = given.score
    return replace(
        given,
        value=_number(given.value, "Reward.value"),
        parts={
            name: _number(part, f"Reward.parts[{name!r}]") for name, part in given.parts.items()
        },
        steps=tuple((index(at), _number(step, "Reward.steps")) for at, step in given.steps),
        score=None if score is None else _number(score, "Reward.score"),
    )


def _number(given: object, where: str) -> float:
    """A number of an environment as a float. The errors of `checked_value` name `where`."""
    try:
        return checked_value(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: the environment {error}. Give a finite number") from error


def _graded(grade: Grade) -> Reward:
    if grade.value is None:
        return replace(Reward.failed(grade.detail or grade.verdict), isolation=grade.isolation)
    return Reward(
        _number(grade.value, "Grade.value"),
        verdict=grade.verdict,
        detail=grade.detail,
        isolation=grade.isolation,
    )


def turn_reward(answer: Observation | End) -> float:
    """The reward of the last reply. Raises TypeError or ValueError as `final_reward` does."""
    if isinstance(answer, End):
        return 0.0
    return _number(answer.reward, "Observation.reward")
