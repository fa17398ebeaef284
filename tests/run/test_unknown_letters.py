"""Texts that Sixfold itself answers with need letters that the model's tokenizer may lack."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.data.task_set import TaskSet
from sixfold.environment.rewards import load_reward
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema.environment import EnvironmentConfig
from sixfold.renderer.renderer import Renderer, RenderError
from sixfold.run.prompt_tools import give_tools
from sixfold.run.tool_setup import recipe_episode
from sixfold.types import Task, Trajectory

PRINTABLE = "".join(chr(n) for n in range(32, 127))
CALL = '<tool_call>{"name": "calculator"'

OPEN = """
from enum import Enum
from pydantic import BaseModel


class Move(BaseModel):
    steps: int


class Steps:
    def reset(self, seed=None): ...
    def step(self, action: Move): ...


class Side(str, Enum):
    left = "left"
    right = "right"


class Turn(BaseModel):
    side: Side


class Turns(Steps):
    def step(self, action: Turn): ...
"""

GAMES = """
import gymnasium
from gymnasium import spaces


class Left(gymnasium.Env):
    action_space = spaces.Discrete(2)
    action_names = ["left", "right"]
    observation_space = spaces.Text(8)


class Levers(Left):
    action_space = spaces.MultiDiscrete([2, 3])


class Words(Left):
    action_space = spaces.Text(8)
"""


def check(episode: str, alphabet: str, functions: tuple[str, ...] = ()) -> None:
    config = EnvironmentConfig.model_validate(
        {"episode": episode, "tools": {"functions": functions}}
    )
    renderer = Renderer(character_tokenizer(alphabet, [CALL] if functions else []))
    tasks = TaskSet(train=[Task("1", "1+1=")], heldout=[])
    with ExitStack() as ending:
        made = recipe_episode(config, None, ending)
        give_tools(config, made, tasks, renderer)


@pytest.mark.parametrize(
    ("file", "name", "missing"),
    [
        ("gymnasium", "Left", "{"),
        ("gymnasium", "Left", "v"),  # only in "the reply names several actions"
        ("gymnasium", "Levers", "J"),  # "the reply is not a JSON list of numbers"
        ("gymnasium", "Levers", "["),
        ("openenv", "Steps", "I"),  # pydantic's "Input should be a valid integer"
        ("openenv", "Steps", "{"),
        ("openenv", "Turns", "v"),
    ],
)
def test_a_letter_of_a_hint_is_missed_before_anything_is_sampled(
    tmp_path: Path, file: str, name: str, missing: str
) -> None:
    if file == "gymnasium":
        pytest.importorskip("gymnasium")
    path = tmp_path / "games.py"
    path.write_text(GAMES if file == "gymnasium" else OPEN)
    spec = f"{file}:{path}:{name}"
    check(spec, PRINTABLE)
    with pytest.raises(UserError) as caught:
        check(spec, PRINTABLE.replace(missing, ""))
    said = str(caught.value)
    assert f"does not know: {missing!r}" in said and "reward check" not in said
    assert "environment.episode" in said and "model.scratch.alphabet" in said


def test_an_environment_whose_replies_are_all_actions_needs_no_letters(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "games.py").write_text(GAMES)
    check(f"gymnasium:{tmp_path}/games.py:Words", "abc")


@pytest.mark.parametrize("missing", ["{", "T", "J", "z_"])
def test_a_letter_of_a_tool_s_error_is_missed_too(missing: str) -> None:
    check("tools", PRINTABLE, ("calculator",))
    few = "".join(c for c in PRINTABLE if c not in missing)
    with pytest.raises(UserError, match=r"environment\.episode: its errors have characters"):
        check("tools", few, ("calculator",))


def test_the_calculator_episode_needs_the_letters_of_its_errors_and_no_others() -> None:
    check("calculator", "0123456789+-*=()# eroscalyntxiz")
    with pytest.raises(UserError, match="does not know: 'z'"):
        check("calculator", "0123456789+-*=()# eroscalyntxi")


def test_an_episode_that_fails_is_no_failed_reward_check() -> None:
    trajectory = Trajectory.one_turn("1", 0, [1], [2], [0.0], [0], "stop", text="2")
    with Environment([load_reward("arithmetic")]) as environment:
        scorer = environment.scorer(1)
        with pytest.raises(RewardBudgetExceeded) as caught:
            scorer.fail(trajectory, "environment games: messages has an 'é'")
    said = str(caught.value)
    assert "1 of 1 reward checks cannot run" in said and "reward checks failed" not in said
    assert "the episode failed: environment games: messages has an 'é'" in said
    assert "Correct the environment" in said
    assert trajectory.reward and trajectory.reward.value is None


def test_a_text_that_cannot_be_read_names_its_letters() -> None:
    renderer = Renderer(character_tokenizer("abc<|user>"))
    with pytest.raises(RenderError, match="does not know: 'éx'"):
        renderer.encode_messages([{"role": "user", "content": "aébx"}])
