"""Built-in tools by name: `python`, and `search` and `sql` with the files of the user."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import ExitStack
from pathlib import Path

import pytest

from sixfold.environment.calculator import Calculator
from sixfold.environment.episode import MakeEpisode
from sixfold.environment.tools.load import load_tools
from sixfold.errors import UserError
from sixfold.recipe.schema.environment import EnvironmentConfig
from sixfold.run.tool_setup import recipe_episode


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "title": "Tea", "text": "Tea is a drink."}\n')
    made = sqlite3.connect(tmp_path / "cups.sqlite")
    made.execute("CREATE TABLE cups (id INTEGER)")
    made.close()
    return {"search": str(corpus), "sql": str(tmp_path / "cups.sqlite")}


def test_the_tools_come_in_the_order_of_their_names(files: dict[str, str]) -> None:
    tools = load_tools(["sql", "python", "search"], files)
    assert [tool.name for tool in tools] == ["sql", "python", "search", "read"]
    for tool in tools:
        described = tool.description["function"]
        assert described["description"]
        parameters = described["parameters"]["properties"].values()
        assert parameters and all(parameter["description"] for parameter in parameters)
    assert tools[0]("SELECT count(*) FROM cups") == "[[0]]"
    assert asyncio.run(tools[2]("drink")) == [{"id": "1", "title": "Tea"}]
    assert asyncio.run(tools[3]("1")) == "Tea is a drink."


@pytest.mark.parametrize("name", ["search", "sql"])
def test_a_tool_needs_its_file_and_a_file_its_tool(name: str, files: dict[str, str]) -> None:
    setting = {"search": "environment.search.corpus", "sql": "environment.sql.database"}[name]
    with pytest.raises(UserError, match=rf"functions has '{name}', but {setting} is empty"):
        load_tools([name], {})
    with pytest.raises(UserError, match=rf"{setting} has no effect without '{name}'"):
        load_tools([], {name: files[name]})
    with pytest.raises(UserError, match=rf"{setting} = .*absent"):
        load_tools([name], {name: "absent"})


@pytest.mark.parametrize("episode", ["gymnasium:Maze-v0", "calculator"])
def test_tools_for_an_environment_that_does_not_use_them_are_refused(episode: str) -> None:
    config = EnvironmentConfig.model_validate(
        {"episode": episode, "tools": {"functions": ("calculator",)}}
    )
    make: MakeEpisode = Calculator if episode == "calculator" else lambda task: Calculator(task)
    with ExitStack() as ending, pytest.raises(UserError, match=rf"no effect.*{episode}.*'tools'"):
        recipe_episode(config, make, ending)


def test_the_settings_reach_the_episodes(files: dict[str, str]) -> None:
    config = EnvironmentConfig.model_validate(
        {
            "episode": "tools",
            "tools": {"functions": ("search", "sql")},
            "search": {"corpus": files["search"]},
            "sql": {"database": files["sql"]},
        }
    )
    with ExitStack() as ending:
        episode = recipe_episode(config, None, ending)
        assert episode is not None
        assert [tool.name for tool in episode.setup.tools] == ["search", "read", "sql"]
