"""The shipped agents with OpenAI's agents SDK play the episodes of their recipes. With the replies
of the worked solutions, their trajectories equal those of the recipe's environment and earn 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sixfold.recipe.toml import parse_recipe
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.rollout.without_model import WithoutModel
from sixfold.rollout.worked_episode import Script, worked_episodes
from sixfold.run.assemble import assemble
from sixfold.types import SamplingParams, Task
from sixfold_serving.agents.player import make_agent

pytest.importorskip("agents", reason="needs openai-agents")

RECIPES = Path(__file__).parents[2] / "recipes"


class Worked(WithoutModel):
    """Generator that gives the replies of each task's worked solution."""

    def __init__(self, renderer: Renderer, tasks: Sequence[Task]) -> None:
        self._scripts = {task.id: Script(renderer, task.trace or ()) for task in tasks}

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, key: SampleKey, **options: Any
    ) -> Sampled:
        return await self._scripts[key.name].generate(tokens, params, key, **options)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sql_agent", "search_agent"])
def test_an_agent_of_the_sdk_plays_the_recipes_episodes(name: str) -> None:
    text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    command = f"{RECIPES / 'agents' / 'with_openai_agents.py'}:{name}"
    recipe = parse_recipe(text, name, ["--environment.agent.command", command])
    assembly = assemble(recipe)
    tasks = [task for task in assembly.tasks.train[:8] if isinstance(task.trace, tuple)]
    worked = assembly.loop.run(worked_episodes(assembly.player, tasks))
    player = replace(assembly.player, generator=Worked(assembly.renderer, tasks))
    agent = make_agent(recipe.environment.agent, player, 1000)
    params = SamplingParams(
        max_tokens=recipe.rollout.max_new_tokens,
        stop_token_ids=tuple(assembly.policy.stop_token_ids),
    )
    driver = Driver(agent, params, 1)
    try:
        groups = assembly.loop.run(groups_in_order(driver.play(tasks, 0), tasks))
    finally:
        assembly.loop.run(agent.close())
        assembly.close()
    found = [trajectory for group in groups for trajectory in group.trajectories]
    assert [(t.tokens, t.provenance) for t in found] == [(t.tokens, t.provenance) for t in worked]
    assert [t.total_reward for t in found] == [1.0] * len(tasks)
