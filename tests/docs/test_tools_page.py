"""The examples of docs/tools.md run as they are written there."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest

from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import load_episode
from sixfold.environment.tools.observation import ErrorKind
from sixfold.recipe.toml import parse_recipe
from sixfold.renderer.call_formats import HERMES
from sixfold.renderer.tool_calls import read_reply
from sixfold.run.tool_setup import recipe_episode
from sixfold.types import Task, ToolCall

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
RECIPES = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
def test_the_functions_of_the_first_recipe_are_tools() -> None:
    config = parse_recipe(RECIPES[0], "docs/tools.md").environment
    with ExitStack() as ending:
        made = recipe_episode(config, None, ending)
        assert made is not None
        episode = made(Task("1", "how warm is it?"))
        calls = (
            ToolCall("lookup", '{"city": "Oslo", "unit": "F"}'),
            ToolCall("calculator", '{"expression": "2*3+4"}'),
            ToolCall("lookup", '{"city": "Bergen"}'),
        )

        async def play() -> tuple[Observation, Observation | End]:
            return await episode.start(), await episode.step(Action("", calls=calls))

        first, second = asyncio.run(play())
    shown = first.tools[0]["function"]
    assert shown["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]
    assert shown["parameters"]["properties"]["city"]["description"] == "name of the city."
    assert isinstance(second, Observation)
    texts = [message["content"] for message in second.messages]
    assert texts[:2] == ["37.4 F", "10"] and "KeyError" in texts[2]


@pytest.mark.usefixtures("files")
def test_the_worked_solution_buys_what_the_task_wants() -> None:
    task = _task()
    episode = load_episode("shop.py:Shop")(task)

    async def play() -> Observation | End:
        seen: Observation | End = await episode.start()
        assert isinstance(seen, Observation) and isinstance(task.trace, tuple)
        for reply in task.trace:
            read = read_reply(HERMES.parser(seen.tools), reply)
            seen = await episode.step(Action(reply, calls=read.calls))
            assert isinstance(seen, Observation | End)
        return seen

    end = asyncio.run(play())
    assert isinstance(end, End) and end.reward == 1.0


def _task() -> Task:
    names: dict[str, Task] = {}
    exec(FILES["trace.py"], names)
    return names["TASK"]


@pytest.mark.parametrize("text", RECIPES)
def test_recipes_are_accepted(text: str) -> None:
    if "episode" not in text and "environment.tools" in text:
        text = '[environment]\nepisode = "tools"\n' + text
    parse_recipe(text, "docs/tools.md")


def test_the_page_lists_every_kind_of_error() -> None:
    for kind in get_args(ErrorKind):
        assert f"`{kind}`" in PAGE
