"""Contract of environments: an episode is one conversation between the policy and a task.

An environment is a class whose instances play one episode each: `start` returns what the policy
sees first, and `step` takes each reply of the policy. Authors write text and messages. The renderer
in `rollout` owns the tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..types import FinishReason, Message, Outcome, Reward, Task, ToolCall
from .grade import Grade, number_given, reward_given


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


@runtime_checkable
class ChecksTasks(Protocol):
    """A maker of episodes that knows what it needs of a task."""

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Raise UserError for the first task that has no episode."""
        ...


@runtime_checkable
class WritesErrors(Protocol):
    """A maker of episodes that knows in which words they answer a reply that they cannot use.

    Attributes:
        own_errors: these texts. The tokenizer must know all of their characters.
    """

    own_errors: Sequence[str]


def final_reward(end: End) -> Reward | None:
    """The final reward of an episode. None: reward functions score it.

    Raises:
        TypeError: if one of its numbers has another type.
        ValueError: if one of its numbers is not finite or too large, or if there is also a `later`.
    """
    if end.reward is not None and end.later is not None:
        raise ValueError("End has both reward and later. Give one of them")
    return None if end.reward is None else reward_given(end.reward, "End.reward")


def turn_reward(answer: Observation | End) -> float:
    """The reward of the last reply. Raises TypeError or ValueError as `final_reward` does."""
    if isinstance(answer, End):
        return 0.0
    return number_given(answer.reward, "Observation.reward")
