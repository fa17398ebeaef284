"""Plays an episode with given replies, for tests of episodes with tools."""

from __future__ import annotations

import asyncio
import json

from sixfold.environment.episode import Action, End, MakeEpisode, Observation
from sixfold.environment.grade import Grade
from sixfold.types import Task, ToolCall


def action(reply: str) -> Action:
    """A reply as the rollout parses it: text, or one tool call."""
    if not reply.startswith("<tool_call>"):
        return Action(reply)
    call = json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return Action(reply, calls=(ToolCall(call["name"], json.dumps(call["arguments"])),))


def play(make: MakeEpisode, task: Task, *replies: str) -> list[Observation | End]:
    """The first observation, and what the environment returns for each reply."""

    async def answers() -> list[Observation | End]:
        episode = make(task)
        given: list[Observation | End] = [await episode.start()]
        for reply in replies:
            given.append(await episode.step(action(reply)))
        return given

    return asyncio.run(answers())


def reward(make: MakeEpisode, task: Task, *replies: str) -> float:
    """The final reward of an episode that the last reply ends."""
    end = play(make, task, *replies)[-1]
    assert isinstance(end, End) and isinstance(end.reward, Grade) and end.reward.value is not None
    return end.reward.value
