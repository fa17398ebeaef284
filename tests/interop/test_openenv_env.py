"""Unchanged OpenEnv environments: as a class in this process, and on a server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sixfold.data.sources import load_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import load_episode
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig
from sixfold.types import Task, ToolCall
from sixfold_environments.adapters.actions import MalformedAction
from sixfold_environments.adapters.openenv_actions import ActionSchema
from sixfold_environments.adapters.openenv_env import openenv_tasks
from tests.interop import open_games, open_grid, open_tools

GAMES = "tests.interop.open_games"
GRID = "tests.interop.open_grid"
TOOLS = "tests.interop.open_tools"


def play(spec: str, replies: list[str | Action], seed: int = 0) -> list[Any]:
    async def go() -> list[Any]:
        episode = load_episode(f"openenv:{spec}")(Task("t", "a", columns={"seed": seed}))
        try:
            first = await episode.start()
            given = [Action(one) if isinstance(one, str) else one for one in replies]
            return [first, *[await episode.step(one) for one in given]]
        finally:
            await episode.close()  # type: ignore[attr-defined]

    return asyncio.run(go())


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[..., str]]:
    """Starts servers of environments, see `create_app` of the library."""
    http_server = pytest.importorskip("openenv.core.env_server.http_server")
    import uvicorn

    running: list[tuple[Any, threading.Thread]] = []

    def serve(*classes: Any) -> str:
        app = http_server.create_app(*classes)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        running.append((server, thread))
        return f"http://127.0.0.1:{port}"

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


def check_game(spec: str) -> None:
    first, heard, end = play(spec, ["<think>b or c?</think> b ", "x"], seed=1)
    assert json.loads(first.text) == {"said": "b", "length": 0}
    assert heard.reward == 1.0
    assert json.loads(heard.messages[0]["content"]) == {"said": "b", "length": 0}
    assert isinstance(end, End) and end.reward == 0.0 and end.outcome == "ended"
    prompts = [json.loads(str(task.prompt))["said"] for task in openenv_tasks(spec, 4, 0)]
    assert prompts == ["a", "b", "c", "a"]


def test_a_class_is_played_and_closed() -> None:
    open_games.CLOSED.clear()
    check_game(f"{GAMES}:Parrot")
    assert open_games.CLOSED == [1, 3]  # the episode, and the session that made the tasks


def check_grid(spec: str) -> None:
    """All fields are shown, and the values of an enumerated action are accepted and listed."""
    first, up, right, down, *bad = play(
        spec,
        ["UP", "I go <action>right</action>", '{"action": "down"}', "up or down", "north", "5"],
    )
    assert json.loads(first.text) == {"x": 0, "y": 0, "message": "Goal is at 4."}
    seen = [json.loads(one.messages[0]["content"]) for one in (up, right, down)]
    assert [(one["x"], one["y"]) for one in seen] == [(-1, 0), (-1, 1), (0, 1)]
    assert [one.reward for one in (up, right, down)] == [-0.1] * 3
    for one in bad:
        hint = json.loads(one.messages[0]["content"])["error"]
        assert one.tool_errors == 1 and hint["actions"] == {
            "action": ["UP", "DOWN", "LEFT", "RIGHT"]
        }


def check_tools(spec: str) -> None:
    """The policy sees the tools that the environment lists, and its calls become actions."""
    first, added, failed, wrong, end = play(
        spec,
        [
            Action("", calls=(ToolCall("add", '{"by": 2}'), ToolCall("add", '{"by": 1}'))),
            Action("", calls=(ToolCall("add", '{"by": 10}'),)),
            Action("", calls=(ToolCall("add", '{"by": "x"}'), ToolCall("take", "{}"))),
            Action("", calls=(ToolCall("send", "{}"), ToolCall("add", '{"by": 1}'))),
        ],
        seed=4,
    )
    assert first.messages[0]["content"] == "Add to 4."  # the only text, in the metadata
    assert [one["function"]["name"] for one in first.tools] == ["add", "send"]
    assert [one["content"] for one in added.messages] == ["6", "7"]
    assert added.reward == 1.0 and added.tool_errors == 0
    assert "too large" in failed.messages[0]["content"] and failed.tool_errors == 1
    assert "wrong_argument" in wrong.messages[0]["content"]
    assert "unknown_tool" in wrong.messages[1]["content"] and wrong.tool_errors == 2
    assert isinstance(end, End) and end.reward == 7.0 and end.tool_errors == 1


def test_a_server_is_played(servers: Callable[..., str]) -> None:
    check_game(servers(open_games.Parrot, open_games.Say, open_games.Heard))
    check_grid(servers(open_grid.Grid, open_grid.GridMove, open_grid.GridSeen))
    check_tools(servers(open_tools.Counter, open_games.CallToolAction, open_tools.Called))


def test_all_fields_are_shown_and_enumerated_actions_are_accepted() -> None:
    check_grid(f"{GRID}:Grid")


def test_arguments_reach_the_class() -> None:
    (first,) = play(f"{GRID}:Grid?size=9", [])
    assert json.loads(first.text)["message"] == "Goal is at 8."


def test_tools_of_an_environment_are_called() -> None:
    check_tools(f"{TOOLS}:Counter")
    _, end = play(f"{TOOLS}:Counter", ["no call"])
    assert isinstance(end, End) and end.reward == 0.0


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (f"{GAMES}:Parrot", ""),
        (f"{GRID}:Grid", "no parameter `seed`"),
        (f"{GRID}:Random", "same seed"),
    ],
)
def test_a_note_says_that_seeds_do_not_reach_the_environment(name: str, note: str) -> None:
    found = load_tasks(DataConfig(source=f"openenv:{name}", limit=3, heldout=0), seed=0, rewards=())
    notes = [one for one in found.notes if "begin differently" in one]
    assert bool(notes) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize(
    ("field", "reply", "action"),
    [
        ({"type": "string"}, "<think>a</think> b", "b"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"enum": [0, 1, 2], "type": "integer"}, "I take 2.", 2),
        ({"enum": ["rock", "rock and roll"], "type": "string"}, "Rock and Roll", "rock and roll"),
        ({"anyOf": [{"$ref": "#/$defs/D"}, {"type": "null"}]}, '"LEFT"', "left"),
        ({"allOf": [{"$ref": "#/$defs/D"}], "default": "left"}, "left!", "left"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
    ],
)
def test_the_single_field_of_an_action(field: dict[str, Any], reply: str, action: Any) -> None:
    kind = {"const": "move", "type": "string"}
    schema = {
        "properties": {"metadata": {"type": "object"}, "kind": kind, "take": field},
        "$defs": {"D": {"enum": ["left", "right"], "type": "string"}},
        "required": ["kind", "take"],
    }
    assert ActionSchema(schema).payload(reply) == {"kind": "move", "take": action}


def test_a_circle_of_references_ends() -> None:
    circle = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    with pytest.raises(MalformedAction):
        ActionSchema(circle).payload("text")


def test_tasks_are_seeds() -> None:
    data = DataConfig(source=f"openenv:{GAMES}:Parrot", limit=9, heldout=3)
    found = load_tasks(data, seed=2, rewards=())
    assert (len(found.train), len(found.heldout)) == (6, 3)
    assert {t.columns["seed"] for t in (*found.train, *found.heldout)} == {
        2_000_000 + n for n in range(9)
    }


def test_actions_of_several_fields_are_json() -> None:
    answers = play(
        f"{GAMES}:Board", ['{"x": 3}', "3", '{"y": 1}', '{"x": "a"}', '{"x": 1, "z": 2}']
    )
    good, *bad = answers[1:]
    assert json.loads(good.messages[0]["content"])["said"] == "3,0" and good.reward == 1.0
    for answer in bad:
        assert isinstance(answer, Observation) and answer.tool_errors == 1
        hint = json.loads(answer.messages[0]["content"])["error"]
        assert hint["kind"] == "malformed_action" and hint["actions"] == {
            "x": "integer",
            "y": "integer",
        }


@pytest.mark.parametrize(
    ("name", "error"), [("Raises", "no parrot"), ("Text", "returned str"), ("Nan", "nan")]
)
def test_faults_of_the_environment_are_raised_and_it_is_closed(name: str, error: str) -> None:
    open_games.CLOSED.clear()
    with pytest.raises((RuntimeError, TypeError, ValueError), match=error):
        play(f"{GAMES}:{name}", ["b"])
    assert open_games.CLOSED == [0]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (f"{GAMES}:Parot", "Parrot"),
        (f"{GAMES}:Unknown", "step"),
        ("Parrot", "openenv:URL"),
        ("no/such.py:Parrot", "no/such.py"),
    ],
)
def test_environments_that_do_not_exist_are_refused(spec: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_episode(f"openenv:{spec}")


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from sixfold_environments.adapters import openenv_env

    monkeypatch.setattr(openenv_env, "_library", lambda: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        with pytest.raises(UserError, match="Start it"):
            load_episode(f"openenv:http://127.0.0.1:{free.getsockname()[1]}")


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(UserError, match="pip install openenv"):
        load_episode("openenv:http://127.0.0.1:9")
