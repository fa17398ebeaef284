"""Properties of the episodes of every shipped environment, for any replies of the policy."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.environment.calculator import calculator_tasks
from sixfold.environment.episode import Action, End, Episode, Observation, final_reward
from sixfold.environment.episodes import load_episode
from sixfold.environment.registry import EPISODES
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.rollout.player import OneTurn
from sixfold.types import Task

TASKS = calculator_tasks(20, numbers=2, digits=2, seed=0)
CHAT = Task("chat", ({"role": "user", "content": "12+3*4="},), answer=24)
OWN_TASKS = {"search_agent", "sql_agent", "web", "web_shop"}
"""Environments that play only their own tasks. They have separate tests."""
SHIPPED: dict[str, Callable[[Task], Episode]] = {
    "one turn": OneTurn,
    **{name: load_episode(name) for name in EPISODES if name not in OWN_TASKS},
}
REPLIES = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.text("0123456789+-*() c.#=", max_size=30),
        st.sampled_from(["c(1+1", "c(" + "9" * 40, "c(1" + "+1" * 40, "24", ""]),
    ),
    min_size=1,
    max_size=6,
)


def play(make: Callable[[Task], Episode], task: Task, replies: list[str]) -> list[object]:
    """Answers to the replies, until the end."""

    async def answers() -> list[object]:
        episode = make(task)
        given: list[object] = [await episode.start()]
        for reply in replies:
            seen = given[-1]
            assert isinstance(seen, Observation)
            stop = next((stop for stop in seen.stops if stop in reply), "")
            text = reply.partition(stop)[0] if stop else reply
            given.append(await episode.step(Action(text, "stop", stop)))
            if isinstance(given[-1], End):
                break
        return given

    return asyncio.run(answers())


def _said(first: Observation) -> str:
    """The first observation as text: a prompt may be text, or the message of a user."""
    return first.text or "".join(message["content"] for message in first.messages)


@pytest.mark.parametrize("name", sorted(SHIPPED))
@given(task=st.sampled_from([*TASKS, CHAT]), replies=REPLIES)
@settings(max_examples=60, deadline=None)
def test_an_episode_answers_any_reply_by_the_contract(
    name: str, task: Task, replies: list[str]
) -> None:
    answers = play(SHIPPED[name], task, replies)
    first = answers[0]
    assert isinstance(first, Observation) and _said(first) == task.prompt_text
    for answer in answers:
        assert isinstance(answer, Observation | End)
        assert answer.tool_errors >= 0
        assert json.loads(json.dumps([dict(e) for e in answer.events])) == list(answer.events)
        if isinstance(answer, Observation):
            assert bool(answer.messages) != bool(answer.text) and math.isfinite(answer.reward)
        else:
            final_reward(answer)  # raises if it cannot be trained on
    # A reply that calls nothing ends the episode.
    assert isinstance(play(SHIPPED[name], task, ["24"])[-1], End)
    # The same replies get the same answers: no state is left from the first episode.
    assert play(SHIPPED[name], task, replies) == answers


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_episodes_of_one_task_share_no_state(name: str) -> None:
    """Interleaved episodes give the same answers as separate ones."""
    task = TASKS[0]

    async def interleaved() -> list[object]:
        one, other = SHIPPED[name](task), SHIPPED[name](task)
        answers: list[object] = [await one.start(), await other.start()]
        for text in ("c(1+1", "c(2+2"):
            answers.append(await one.step(Action(text, "stop", ")")))
            if isinstance(answers[-1], End):
                break
        answers.append(await other.step(Action("c(3+3", "stop", ")")))
        return answers

    answers = asyncio.run(interleaved())
    assert answers[-1] == play(SHIPPED[name], task, ["c(3+3)"])[-1]


def test_the_row_of_an_environment_says_what_its_class_says_about_copies() -> None:
    for name in EPISODES:
        kind = load_episode(name)
        fixed = issubclass(kind, ToolEpisode) and kind.not_copied  # type: ignore[arg-type]
        assert EPISODES.row(name).copyable == (not fixed), name
