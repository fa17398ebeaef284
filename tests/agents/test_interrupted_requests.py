"""Signals that arrive while agents wait for replies: the run stops, without a traceback."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.agents.playing import client, generator, renderer, talk, with_agent
from tests.agents.test_agent_player import Slow
from tests.agents.test_train import recipe
from tests.rollout.episodes import user
from tests.run.processes import start

from sixfold.run.interrupts import Interrupted
from sixfold.types import Task
from sixfold_serving.agents.requests import Settings

ENDLESS = """
import json, pathlib, urllib.request

def agent(task, base_url):
    headers = {"content-type": "application/json"}
    body = {"model": "m", "messages": [{"role": "user", "content": task.prompt}], "stream": STREAM}
    while True:
        call = urllib.request.Request(
            base_url + "/chat/completions", json.dumps(body).encode(), headers
        )
        urllib.request.urlopen(call).read()
        pathlib.Path(ASKED).touch()
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["loop", "handler", "cancelled handler"])
def test_a_signal_stops_the_run_without_a_traceback(
    stream: bool, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One agent waits for a reply. The signal arrives in the event loop, in the handler of another
    agent's request, or there while something else, such as the end of a stream, cancels its task.
    """
    of = renderer("qwen2.5-instruct")
    checked = Settings.check

    def check(settings: Settings, ask: Any, params: Any) -> None:
        if where != "loop" and ask.messages[-1].content == "now":
            if where == "cancelled handler" and (task := asyncio.current_task()):
                task.cancel()
            raise Interrupted
        checked(settings, ask, params)

    def agent(task: Task, base_url: str) -> None:
        say: list[Any] = [user("slow" if task.id == "a" else "now")]
        with client(base_url) as api:
            while task.id == "b" and not made.running:
                time.sleep(0.01)
            if task.id == "b" and where == "loop":
                loop[0].call_soon_threadsafe(interrupt)
            list(api.chat.completions.create(model="m", messages=say, stream=stream))

    class Watched(Slow):
        async def generate(self, *given: Any, **options: Any) -> Any:
            loop[:] = [asyncio.get_running_loop()]
            return await super().generate(*given, **options)

    def interrupt() -> None:
        raise Interrupted

    loop: list[asyncio.AbstractEventLoop] = []
    made = Watched(of, generator(of)._script, vocabulary=20)
    monkeypatch.setattr(Settings, "check", check)
    began = time.monotonic()
    with pytest.raises(Interrupted):
        with_agent(agent, [Task("a", "1"), Task("b", "2")], of, made=made)
    assert made.running == 0 and time.monotonic() - began < 15
    assert not [record for record in caplog.records if record.exc_info]


def test_a_failing_handler_is_still_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only requests that end with the run are left out of the log."""

    def check(settings: Settings, ask: Any, params: Any) -> None:
        raise ZeroDivisionError("a bug")

    def agent(task: Task, base_url: str) -> float:
        with pytest.raises(openai.InternalServerError):
            talk()(task, base_url)
        return 1.0

    monkeypatch.setattr(Settings, "check", check)
    with_agent(agent, [Task("a", "1")], renderer("qwen2.5-instruct"))
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info and isinstance(record.exc_info[1], ZeroDivisionError)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_prints_one_line_for_the_stop_and_one_for_the_way_back(
    tmp_path: Path, stream: bool
) -> None:
    file, asked, errors = (tmp_path / name for name in ("my_agent.py", "asked", "errors"))
    file.write_text(f"ASKED, STREAM = {str(asked)!r}, {stream}\n{ENDLESS}")
    settings = {"rollout__max_turns": 10**6, "sft__steps": 0}
    process = start(recipe(tmp_path, f"{file}:agent", **settings), errors)
    while not asked.exists():
        assert process.is_alive(), errors.read_text()
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    said = errors.read_text()
    assert process.exitcode == 143, said
    assert "Traceback" not in said and "ASGI" not in said
    assert len(said.partition("\nstopping\n")[2].splitlines()) == 1, said
