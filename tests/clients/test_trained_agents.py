"""An unchanged program of an agent framework plays the episodes of training. Its trajectories equal
those of a tool episode with the same tool bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.agents.playing import generator, with_agent, with_player
from tests.agents.test_agent_player import content
from tests.clients.conftest import PYTHONS
from tests.server.serving import ALPHABET

from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import tool
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import SampleKey
from sixfold.types import SamplingParams, Task
from sixfold_serving.agents.command import CommandRunner

PROGRAM = Path(__file__).parent / "agent_of_the_sdk.py"
TASKS = [Task("a", "add 1 and 2", answer=3), Task("b", "add 2 and 2", answer=5)]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Adds(ToolEpisode):
    """The same agent as an environment of Sixfold."""

    @tool
    def add(self, a: int, b: int) -> str:
        """Add."""
        return str(a + b)


@pytest.mark.skipif(not PYTHONS[2], reason="make clients installs the framework")
@pytest.mark.parametrize("interface", ["chat_completions", "responses"])
def test_an_agent_of_a_framework_is_trained_unchanged(interface: str) -> None:
    of = Renderer(character_tokenizer(ALPHABET, ("<tool_call>",)), (1,))

    def script(tokens: Sequence[int], params: SamplingParams, key: SampleKey) -> list[int]:
        return [*of.plain("3" if key.origin and len(tokens) > key.origin else CALL), 1]

    runner = CommandRunner(f"'{PYTHONS[2]}' '{PROGRAM}' {interface}")
    made = generator(of, script)
    found = with_agent(runner, TASKS, of, made=made, tokens=200, timeout_s=120.0)
    expected = with_player(Adds, TASKS, of, script=script, tokens=200)
    for mine, theirs in zip(found, expected, strict=True):
        (trajectory,), (other,) = mine.trajectories, theirs.trajectories
        different = {k for k, v in content(other).items() if content(trajectory)[k] != v}
        assert not different
    assert [g.trajectories[0].total_reward for g in found] == [1.0, 0.0]
    assert [len(g.trajectories[0].turns) for g in found] == [2, 2]
