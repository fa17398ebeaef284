"""Unchanged classes for TRL's `environment_factory`: tools, rewards and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sixfold.data.sources import load_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import load_episode
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.run.assemble import assemble
from sixfold.types import Task, ToolCall

FILE = '''
class Counter:
    """As in TRL's documentation: state on the object, public methods are tools."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs):
        self.total = kwargs.get("begin", 0)
        self.reward = 0.0
        return f" from {self.total}" if "begin" in kwargs else None

    def add(self, amount: int) -> str:
        """
        Add to the total.

        Args:
            amount: what to add.

        Returns:
            The new total.
        """
        if self.total > 9:
            raise ValueError("Game over.")
        self.total += amount
        self.reward = float(self.total == 5)
        return str(self.total)

    async def look(self) -> str:
        """The total."""
        return str(self.total)

    def _hidden(self):
        return 1


class Owner(Counter):
    def get_reward(self):
        return 0.25


class Waiting(Counter):
    async def get_reward(self):
        return 0.75


class Silent:
    def reset(self, **kwargs):
        return None


class Plain:
    def act(self, x: int) -> str:
        """Act."""
        return ""


class Untyped(Silent):
    def act(self, x) -> str:
        """Act."""
        return ""


class Greedy(Silent):
    def __init__(self, size): ...


class Fails(Silent):
    def reset(self, **kwargs):
        raise RuntimeError("no server")


def scored(prompts, completions, environments, word=None, **kwargs):
    said = [message["role"] for message in completions[0]]
    return [env.total + len(said) + (word == ["w"]) for env in environments]


def made():
    return Counter()


GAMES = {"count": Counter, "own": Owner}
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trl_games.py"
    path.write_text(FILE)
    return path


def call(name: str, **arguments: Any) -> Action:
    return Action("?", calls=(ToolCall(name, json.dumps(arguments), "c1"),), content="I add")


def play(spec: str, actions: list[Action], **columns: Any) -> list[Any]:
    async def go() -> list[Any]:
        episode = load_episode(f"trl:{spec}")(Task("t", "go", columns=columns))
        try:
            return [await episode.start(), *[await episode.step(action) for action in actions]]
        finally:
            await episode.close()  # type: ignore[attr-defined]

    return asyncio.run(go())


def test_methods_are_tools_and_reset_gets_the_columns(file: Path) -> None:
    first, result, end = play(f"{file}:Counter", [call("add", amount=2), Action("done")], begin=3)
    assert first.messages[-1] == {"role": "user", "content": "go from 3"}
    tools = {tool["function"]["name"]: tool["function"] for tool in first.tools}
    assert list(tools) == ["add", "look"]
    assert tools["add"]["parameters"]["properties"]["amount"]["type"] == "integer"
    assert result.messages[0]["content"] == "5" and result.messages[0]["role"] == "tool"
    assert isinstance(end, End) and end.reward == 1.0  # the attribute `reward`
    assert play(f"{file}:Counter", [])[0].messages[-1]["content"] == "go"


def test_async_tools_and_errors_of_tools(file: Path) -> None:
    *_, looked, bad, over = play(
        f"{file}:made",
        [call("add", amount=12), call("look"), call("add", amount="x"), call("add", amount=1)],
    )
    assert looked.messages[0]["content"] == "12"
    assert bad.tool_errors == over.tool_errors == 1
    assert "Game over." in over.messages[0]["content"]


@pytest.mark.parametrize(
    ("spec", "reward"),
    [("Owner", 0.25), ("Waiting", 0.75), ("Silent", None), ("Counter?reward=scored", 4.0)],
)
def test_rewards(spec: str, reward: float | None, file: Path) -> None:
    actions = [Action("done")]
    if "scored" in spec:  # the total of 1, and 3 messages: two of the assistant and one of a tool
        actions = [call("add", amount=1), Action("done")]
    end = play(f"{file}:{spec}", actions, word="v")[-1]
    assert isinstance(end, End) and end.reward == reward


def test_a_column_chooses_the_factory(file: Path) -> None:
    end = play(f"{file}:GAMES", [Action("done")], environment="own")[-1]
    assert end.reward == 0.25
    with pytest.raises(UserError, match="count"):
        play(f"{file}:GAMES", [], environment="conut")


def test_each_episode_has_its_own_object(file: Path) -> None:
    async def go() -> list[str]:
        make = load_episode(f"trl:{file}:Counter")
        episodes = [make(Task(f"t{n}", "go", columns={"begin": n})) for n in (1, 2)]
        for episode in episodes:
            await episode.start()
        said = [await episode.step(call("add", amount=1)) for episode in episodes]
        for episode in episodes:
            await episode.close()  # type: ignore[attr-defined]
        return [one.messages[0]["content"] for one in said if isinstance(one, Observation)]

    assert asyncio.run(go()) == ["2", "3"]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("{}:Conter", "Counter"),
        ("{}:Plain", "reset"),
        ("{}:Untyped", "'act'"),
        ("{}:Greedy", "without arguments"),
        ("{}:Counter?size=3", "size"),
        ("{}:Counter?reward=score", "scored"),
        ("{}:Counter?reward=GAMES", "no class or function 'GAMES'"),
        ("Counter", "trl:path/to/file.py:Class"),
        ("no/such.py:Counter", "no/such.py"),
    ],
)
def test_factories_that_cannot_be_used_are_refused(spec: str, named: str, file: Path) -> None:
    with pytest.raises(UserError, match=named):
        load_episode(f"trl:{spec.format(file)}")


def test_a_reset_that_fails_is_a_fault_of_the_episode(file: Path) -> None:
    with pytest.raises(RuntimeError, match="no server"):
        play(f"{file}:Fails", [])


def test_it_is_not_a_source_of_tasks(file: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source"):
        load_tasks(DataConfig(source=f"trl:{file}:Counter"), seed=0, rewards=())


NEEDS = '''
class Board:
    def reset(self, size, colour="red", **row): ...

    def act(self) -> str:
        """Act."""
        return ""


class Strict(Board):
    def reset(self, size): ...


GAMES = {"board": Board, "strict": Strict}


def scored(prompts, completions, environments, goal):
    return [1.0]
'''


@pytest.mark.parametrize(
    ("name", "columns", "words"),
    [
        ("GAMES", {"environment": "bord", "size": 3}, r"task t1 is 'bord'.*Did you mean 'board'"),
        ("GAMES", {"size": 3}, r"task t1 is ''"),
        ("Board", {"colour": "blue"}, r"reset.*task t1: missing a required argument: 'size'"),
        ("Strict", {"size": 3, "more": 1}, r"reset.*task t0: got an unexpected keyword.*'prompt'"),
        (
            "Board?reward=scored",
            {"size": 3},
            r"reward.*task t1: missing.*'goal'.*columns are prompt, size",
        ),
    ],
)
def test_wrong_columns_are_found_when_the_recipe_is_loaded(
    tmp_path: Path, name: str, columns: dict[str, Any], words: str
) -> None:
    (tmp_path / "board.py").write_text(NEEDS)
    fine = {"environment": "board", "size": 3, "goal": 1}
    if name == "Strict":
        fine = {"size": 3}
    rows = [{"prompt": "go", **fine}, {"prompt": "on", **columns}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "id": f"t{at}"}) + "\n" for at, row in enumerate(rows))
    )
    text = f"""
        run.name = "r"
        run.dir = "{tmp_path}"
        environment.episode = "trl:{tmp_path / "board.py"}:{name}"
        data.source = "{tmp_path / "rows.jsonl"}"
        data.prompt_field = "prompt"
        data.heldout = 0
        model.scratch.hidden_size = 16
    """
    recipe = parse_recipe(text, "test")
    with pytest.raises(UserError, match=words):
        assemble(recipe)
    assert load_episode(f"trl:{tmp_path / 'board.py'}:{name}")(Task("t", "go", columns=fine))
