"""Tokens of episodes with tools: calls of the policy, and results in the template's format."""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar

import pytest
from tests.models.families import BY_NAME, make_tokenizer

from sixfold.environment.answer_part import answer_part
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import tool
from sixfold.environment.tools.worked import worked_call
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits, Player
from sixfold.rollout.worked_episode import Script, worked_episodes
from sixfold.types import SamplingParams, Task, Trajectory

ALPHABET = "".join(chr(i) for i in range(32, 127)) + "\n"
WORDS = ("</tool_call>", '<tool_call>{"name": "add", "arguments": {"a": ')


class Sum(ToolEpisode):
    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def final(self, action: Action) -> End:
        return End(reward=float(answer_part(action.text).strip() == self.task.answer))


def renderer(template: str = "") -> Renderer:
    if template:
        made = Renderer(make_tokenizer(BY_NAME[template]))
        made.stop_token_ids = tuple(made.turn_end_tokens)
        return made
    return Renderer(character_tokenizer(ALPHABET, WORDS))


def play(made: Renderer, *replies: str, answer: str = "5") -> Trajectory:
    task = Task("1", "2+3", answer=answer)
    player = Player(Script(made, replies), made, Limits(4000, 8), Sum)
    played = asyncio.run(player.play(task, 0, made.encode(task), SamplingParams(max_tokens=2000)))
    assert not played.error
    return played.trajectory


def marked(made: Renderer, done: Trajectory) -> str:
    """The text, with sampled parts in [] and observations in ()."""
    text = "".join(
        {"s": "[%s]", "o": "(%s)"}.get(letter, "%s") % made.piece(token)
        for token, letter in zip(done.tokens, done.provenance, strict=True)
    )
    return text.replace("][", "").replace(")(", "")


CALL = worked_call("add", {"a": 2, "b": 3})


def test_a_call_and_its_result_in_the_tokens_of_a_model_from_scratch() -> None:
    made = renderer()
    done = play(made, CALL, "5")
    assert marked(made, done) == (
        f"<|tool|>add<|user|>2+3<|assistant|>[{CALL}<|end|>]<|tool|>(5)<|assistant|>[5<|end|>]"
    )
    start, *_ = done.turns
    assert made.piece(done.tokens[start.start]) == WORDS[1], "the word is one token"
    assert (done.outcome, done.reward and done.reward.value) == ("ended", 1.0)
    assert [dict(event)["result"] for event in done.events] == ["5"]


def test_worked_solutions_with_calls_are_played() -> None:
    made = renderer()
    player = Player(Script(made, ()), made, Limits(400, 8), Sum)
    (done,) = asyncio.run(worked_episodes(player, [Task("1", "2+3", "5", trace=(CALL, "5"))]))
    assert marked(made, done) == marked(made, play(made, CALL, "5"))


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "qwen3"])
def test_results_of_several_calls_follow_in_order(name: str) -> None:
    made = renderer(name)
    more = worked_call("add", {"a": 5, "b": 5})
    done = play(made, f"Two calls.\n{CALL}\n{more}", "5")
    assert [dict(event)["result"] for event in done.events] == ["5", "10"]
    assert (
        "<tool_response>\n(5)\n</tool_response>\n<tool_response>\n(10)\n</tool_response>"
    ) in marked(made, done)


def test_a_call_inside_a_thought_is_ignored() -> None:
    made = renderer("qwen3")
    done = play(made, f"<think>\n{CALL}\n</think>\n\n5")
    assert not done.events and done.reward is not None and done.reward.value == 1.0
    done = play(made, f"<think>\nI call.\n</think>\n\n{CALL}", "5")
    assert len(done.events) == 1


def test_a_malformed_call_is_answered_by_an_error_and_counted() -> None:
    made = renderer()
    done = play(made, "<tool_call>{oops}</tool_call>", CALL, "5")
    assert [turn.tool_errors for turn in done.turns] == [1, 0, 0]
    assert dict(done.events[0])["error"] == "malformed"
    observed = "".join(
        made.piece(t) for t, p in zip(done.tokens, done.provenance, strict=True) if p == "o"
    )
    assert json.loads(observed.removesuffix("5"))["error"]["kind"] == "malformed"
    assert done.reward is not None and done.reward.value == 1.0


def test_a_template_without_a_known_format_of_calls_is_refused() -> None:
    made = renderer()
    made.tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"model\.chat_template.*Hermes"):
        play(made, "5")


class Shows(Sum):
    """Records the actions that it gets. The task that it gets is a copy."""

    seen: ClassVar[list[Action]] = []

    async def step(self, action: Action) -> Observation | End:
        self.seen.append(action)
        return End()


def test_an_action_separates_the_calls_from_the_content() -> None:
    made = renderer()
    Shows.seen.clear()
    task = Task("1", "2+3")
    text = f"I add. {CALL}<tool_call>{{}}</tool_call>"
    player = Player(Script(made, (text,)), made, Limits(4000, 8), Shows)
    asyncio.run(player.play(task, 0, made.encode(task), SamplingParams(max_tokens=2000)))
    (action,) = Shows.seen
    assert action.text == text
    assert action.content == "I add.<tool_call>{}</tool_call>"
    assert [(call.name, json.loads(call.arguments)) for call in action.calls] == [
        ("add", {"a": 2, "b": 3})
    ]
    assert len(action.malformed) == 1 and "name" in action.malformed[0]
