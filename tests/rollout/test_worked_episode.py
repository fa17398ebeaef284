"""Worked solutions of episodes: the replies are trained, the environment's answers are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.models.families import BY_NAME, make_tokenizer

from sixfold.batch import collate
from sixfold.environment.calculator import Calculator
from sixfold.environment.episode import Action, End, Observation
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import ScratchConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits, Player
from sixfold.rollout.worked_episode import Script, worked_episodes
from sixfold.types import Group, Message, Task, Trajectory

TASK = Task("1", "12+45*7=", answer=327, trace=("c(45*7)", "c(12+315)", "327"))


def played(task: Task, make: Callable[[Task], object] = Calculator, tokens: int = 90) -> Trajectory:
    renderer = Renderer(character_tokenizer(ScratchConfig().alphabet))
    player = Player(Script(renderer, ()), renderer, Limits(tokens, 8), make)  # type: ignore[arg-type]
    return asyncio.run(worked_episodes(player, [task]))[0]


def marked(trajectory: Trajectory) -> str:
    """The text, with the trained parts in brackets."""
    renderer = Renderer(character_tokenizer(ScratchConfig().alphabet))
    text = "".join(
        f"[{renderer.piece(token)}]" if trained else renderer.piece(token)
        for token, trained in zip(trajectory.tokens, trajectory.mask, strict=True)
    )
    return text.replace("][", "")


def test_results_of_the_calculator_are_not_trained() -> None:
    trajectory = played(TASK)
    assert marked(trajectory) == (
        "<|user|>12+45*7=<|assistant|>[c(45*7)]=315#[c(12+315)]=327#[327<|end|>]"
    )
    batch = collate([Group(TASK, [trajectory])])
    assert batch.mask[0].tolist() == trajectory.mask
    assert set(trajectory.version) == {-1}


class Asks:
    """Asks for a word twice, with messages."""

    def __init__(self, task: Task) -> None:
        self.left = 2

    async def start(self) -> Observation:
        return Observation(messages=(Message(role="user", content="a word"),))

    async def step(self, action: Action) -> Observation | End:
        self.left -= 1
        again = (Message(role="user", content=f"not {action.text}"),)
        return Observation(messages=again) if self.left else End()


def test_turns_of_messages_end_with_the_template_s_token() -> None:
    trajectory = played(Task("1", "a word", trace=("yes", "no")), Asks)
    assert marked(trajectory) == (
        "<|user|>a word<|assistant|>[yes<|end|>]<|user|>not yes<|assistant|>[no<|end|>]"
    )


ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Tools(Asks):
    """Describes a function to the policy, and answers with its result."""

    async def start(self) -> Observation:
        return Observation(messages=(Message(role="user", content="1+1"),), tools=(ADD,))

    async def step(self, action: Action) -> Observation | End:
        self.left -= 1
        return Observation(messages=(Message(role="tool", content="2"),)) if self.left else End()


def test_tools_are_shown_to_the_policy_in_the_form_of_its_template() -> None:
    renderer = Renderer(make_tokenizer(BY_NAME["qwen2.5-instruct"]))
    player = Player(Script(renderer, ()), renderer, Limits(2000, 8), Tools)
    task = Task("1", "1+1", trace=("add it", "two"))
    (trajectory,) = asyncio.run(worked_episodes(player, [task]))
    said = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "add it"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    whole = renderer.tokenizer.apply_chat_template(said, tools=[ADD], tokenize=False)
    assert renderer.shown(trajectory.tokens) + "\n" == whole
    seen = zip(trajectory.tokens, trajectory.provenance, strict=True)
    assert renderer.decode([token for token, letter in seen if letter == "o"]) == "2"


@pytest.mark.parametrize(
    ("trace", "tokens"),
    [
        (("c(45*7)", "c(12+315)"), 90),  # a reply is missing
        (("327", "c(45*7)"), 90),  # a reply is left over
        (("c(45*7) and c(12+315)",), 90),  # a reply goes on after a stop string
        (("\u00a7",), 90),  # the tokenizer does not know it
        (("c(45*7)", "c(12+315)", "327"), 24),  # longer than the context
    ],
)
def test_solutions_that_do_not_fit_the_environment(trace: tuple[str, ...], tokens: int) -> None:
    with pytest.raises(UserError, match=r"task 1:.*data\.trace_field"):
        played(Task("1", "12+45*7=", answer=327, trace=trace), tokens=tokens)


def test_solutions_of_several_replies_need_an_environment() -> None:
    renderer = Renderer(character_tokenizer("0123456789"))
    with pytest.raises(UserError, match=r"task 1 .*environment\.episode"):
        renderer.solution(TASK)
