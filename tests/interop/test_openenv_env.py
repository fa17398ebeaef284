"""Unchanged OpenEnv environments: as a class in this process, and on a server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sixfold.data.sources import load_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import load_episode
from sixfold.errors import UserError
from sixfold.interop.environments.openenv_env import openenv_tasks
from sixfold.recipe.schema import DataConfig
from sixfold.types import Task
from tests.interop import open_games

GAMES = "tests.interop.open_games"


def play(spec: str, replies: list[str], seed: int = 0) -> list[Any]:
    async def go() -> list[Any]:
        episode = load_episode(f"openenv:{spec}")(Task("t", "a", columns={"seed": seed}))
        try:
            first = await episode.start()
            return [first, *[await episode.step(Action(reply)) for reply in replies]]
        finally:
            await episode.close()  # type: ignore[attr-defined]

    return asyncio.run(go())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of the same environment. Needs the library."""
    http_server = pytest.importorskip("openenv.core.env_server.http_server")
    import uvicorn

    app = http_server.create_app(open_games.Parrot, open_games.Say, open_games.Heard)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started and thread.is_alive():
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(10)


def check_game(spec: str) -> None:
    first, heard, end = play(spec, ["<think>b or c?</think> b ", "x"], seed=1)
    assert first.text == "b"  # the only text of the observation is shown
    assert heard.reward == 1.0
    assert heard.messages[0]["content"] == "b"
    assert isinstance(end, End) and end.reward == 0.0 and end.outcome == "ended"
    assert [task.prompt for task in openenv_tasks(spec, 4, 0)] == ["a", "b", "c", "a"]


def test_a_class_is_played_and_closed() -> None:
    open_games.CLOSED.clear()
    check_game(f"{GAMES}:Parrot")
    assert open_games.CLOSED == [1, 3]  # the episode, and the session that made the tasks


def test_a_server_is_played(server: str) -> None:
    check_game(server)


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
    assert good.messages[0]["content"] == "3,0" and good.reward == 1.0
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
    from sixfold.interop.environments import openenv_env

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
