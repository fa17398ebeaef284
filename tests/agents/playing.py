"""Agents for tests: functions with the `openai` client, played with a fake generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from openai import OpenAI
from tests.models.families import BY_NAME, make_tokenizer
from tests.rollout.episodes import Recording, letters, user

from sixfold.checks.environment import Environment
from sixfold.environment.episode import MakeEpisode
from sixfold.event_loop import EventLoop
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.player import Limits, OneTurn, Player
from sixfold.types import Group, SamplingParams, Task
from sixfold_serving.agents.command import CommandRunner
from sixfold_serving.agents.function import FunctionCalls
from sixfold_serving.agents.player import AgentPlayer

Agent = Callable[[Task, str], Any]
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=())
TEXT = "0123456789+=?#()abcxyz "


@cache
def renderer(name: str = "") -> Renderer:
    """Renderer with the chat template of a model family, or without a template."""
    if not name:
        tokenizer = character_tokenizer(TEXT)
        tokenizer.chat_template = None
        return Renderer(tokenizer, (1,))
    tokenizer = make_tokenizer(BY_NAME[name])
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(list(BY_NAME[name].ends)))


def end_of(of: Renderer) -> int:
    return of.stop_token_ids[0]


def generator(of: Renderer, script: Any = None) -> Recording:
    return Recording(of, script or letters(of, end_of(of)), vocabulary=20)


def whole_replies(of: Renderer) -> Any:
    """Script of replies that no token limit cuts: two letters and the end token."""
    return lambda tokens, params, key: [*of.plain("ab"), end_of(of)]


def params(of: Renderer, tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=of.stop_token_ids)


def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=30)


def talk(*more: str, **fields: Any) -> Agent:
    """An agent that sends the task's prompt, and then one message of `more` after each reply."""

    def agent(task: Task, base_url: str) -> None:
        with client(base_url) as api:
            messages: list[Any] = [user(str(task.prompt))]
            for text in (*more, None):
                reply = api.chat.completions.create(model="any", messages=messages, **fields)
                said = reply.choices[0].message.model_dump(exclude_none=True)
                messages += [said, user(text or "")]

    return agent


class Here(FunctionCalls):
    """Calls an agent in this process, so that it may be a closure."""

    async def close(self) -> None:
        pass


def with_agent(
    agent: Agent | CommandRunner,
    tasks: Sequence[Task],
    of: Renderer,
    *,
    samples: int = 1,
    script: Any = None,
    limits: Limits | None = None,
    environment: Environment | None = None,
    made: Recording | None = None,
    timeout_s: float = 20.0,
    stops: tuple[str, ...] = (),
    concurrency: int = 8,
    whole: bool = True,
    tokens: int = 6,
) -> list[Group]:
    """Groups of episodes that an agent plays."""
    made = made or generator(of, script)
    player = Player(made, of, limits or Limits(1000, 8, 5.0), OneTurn, stops)
    runner = agent if isinstance(agent, CommandRunner) else Here(agent, "agent")
    plays = AgentPlayer(player, runner, 100_000, concurrency, timeout_s)
    driver = Driver(plays, params(of, tokens), samples, whole=whole)
    scorer = environment.scorer(len(tasks) * samples) if environment else None
    loop = EventLoop()
    try:
        return loop.run(groups_in_order(driver.play(tasks, 0, scorer), tasks))
    finally:
        loop.run(plays.close())
        loop.close()


def with_player(
    make: MakeEpisode,
    tasks: Sequence[Task],
    of: Renderer,
    *,
    samples: int = 1,
    script: Any = None,
    stops: tuple[str, ...] = (),
    tokens: int = 6,
) -> list[Group]:
    """Groups of the same episodes, played by the player in an environment."""
    player = Player(generator(of, script), of, Limits(1000, 8, 5.0), make, stops, "tests")
    driver = Driver(player, params(of, tokens), samples)
    return asyncio.run(groups_in_order(driver.play(tasks, 0, None), tasks))
