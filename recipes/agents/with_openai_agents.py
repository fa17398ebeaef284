"""The recipes `search_agent` and `sql_agent`, played with OpenAI's agents SDK.

The SDK runs the loop of requests, calls and results. The tools and the grading are those of the
recipe's own episodes. With the same replies of the policy, the trajectories are equal, too.

    pip install openai-agents
    sixfold train search_agent --run.name search_sdk \
        --environment.agent.command recipes/agents/with_openai_agents.py:search_agent
    sixfold train sql_agent --run.name sql_sdk \
        --environment.agent.command recipes/agents/with_openai_agents.py:sql_agent
"""

from __future__ import annotations

import inspect
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from sixfold.environment.episode import Action, final_reward
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.observation import ToolError, error_text, result_text
from sixfold.environment.tools.tool import Tool
from sixfold.types import Task
from sixfold_environments.search.agent import SearchAgent
from sixfold_environments.sql.agent import SqlAgent

set_tracing_disabled(True)
MOST_TURNS = 8


async def search_agent(task: Task, base_url: str) -> float:
    """Play a task of `search_agent`. Returns its reward."""
    return await _play(SearchAgent(task), base_url)


async def sql_agent(task: Task, base_url: str) -> float:
    """Play a task of `sql_agent`. Returns its reward."""
    return await _play(SqlAgent(task), base_url)


async def _play(episode: ToolEpisode, base_url: str) -> float:
    # The endpoint is local and has no TLS. Loading certificates would take longer than a reply.
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as client:
        tools = [_for_sdk(episode.registry.find(name)) for name in _names(episode)]
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent(name="agent", model=model, tools=tools)
        try:
            done = await Runner.run(agent, episode.task.prompt_text, max_turns=MOST_TURNS)
        except (MaxTurnsExceeded, ModelBehaviorError):  # e.g. a call of an unknown tool
            return 0.0
    reward = final_reward(await episode.final(Action(str(done.final_output))))
    if reward is None or reward.value is None:
        raise RuntimeError(f"the answer could not be scored: {reward}")
    return reward.value


def _names(episode: ToolEpisode) -> list[str]:
    return [one["function"]["name"] for one in episode.registry.descriptions]


def _for_sdk(tool: Tool) -> FunctionTool:
    """Convert a tool of Sixfold to a tool of the SDK."""

    async def call(context: Any, arguments: str) -> str:
        try:
            result = tool(**tool.values(arguments))
            return result_text(await result if inspect.isawaitable(result) else result)
        except ToolError as error:
            return error_text(error.kind, str(error))

    return FunctionTool(
        tool.name,
        tool.signature.description,
        dict(tool.signature.schema),
        call,
        strict_json_schema=False,
    )
