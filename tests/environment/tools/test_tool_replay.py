"""Recorded results of tools: a replay repeats them without running the tools."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from test_tool_episode import TASK, calls, contents, play

from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.observation import ToolError, ToolsFailed
from sixfold.environment.tools.replay import Recorder
from sixfold.environment.tools.setup import ToolSetup
from sixfold.environment.tools.tool import Tool, tool
from sixfold.errors import UserError

RUNS = itertools.count(1)


def roll(sides: int) -> str:
    return f"{sides}: {next(RUNS)}"


def fails(how: str) -> str:
    raise (ToolError if how == "own" else ValueError)(f"{next(RUNS)}")


class Counter(ToolEpisode):
    """An episode with functions and a method."""

    def __init__(self, *tools: Tool) -> None:
        super().__init__(TASK, tools)
        self.count = 0

    @tool
    def more(self) -> int:
        self.count += 1
        return self.count


def made(folder: Path, replay: bool, version: str = "1") -> Counter:
    episode = Counter(
        Tool(roll, version=version), Tool(fails), Tool(roll, name="draw", stateful=True)
    )
    episode.setup = ToolSetup(recorder=Recorder(folder, replay))
    return episode


ACTIONS = (
    calls(("roll", {"sides": 6}), ("fails", {"how": "own"}), ("more", {})),
    calls(("draw", {"sides": 2}), ("draw", {"sides": 2}), ("roll", {"sides": 6})),
    calls(("roll", "{oops"), ("fails", {"how": "other"}), ("more", {})),
)


def recorded(observations: list[Any]) -> list[Any]:
    """Messages, and events of recorded tools."""
    return [
        (seen.messages, [e for e in seen.events if e["tool"] != "more"]) for seen in observations
    ]


def test_a_replay_gives_the_same_observations_and_runs_nothing(tmp_path: Path) -> None:
    first = play(made(tmp_path, replay=False), *ACTIONS)
    ran = next(RUNS)
    second = made(tmp_path, replay=True)
    assert recorded(play(second, *ACTIONS)) == recorded(first)
    assert next(RUNS) == ran + 1, "no tool ran"
    assert second.count == 2, "methods hold state, so they ran"
    assert contents(first[2])[0] != contents(first[2])[1], "equal calls in another state"


def test_equal_calls_have_one_result_while_recording(tmp_path: Path) -> None:
    """Otherwise a replay could not repeat the run."""

    async def both() -> list[Any]:
        recorder = Recorder(tmp_path, replay=False)
        episodes = [made(tmp_path, replay=False) for _ in range(2)]
        for episode in episodes:
            episode.setup = ToolSetup(recorder=recorder)
        return await asyncio.gather(*(e.step(calls(("roll", {"sides": 9}))) for e in episodes))

    one, other = asyncio.run(both())
    assert contents(one) == contents(other)


@pytest.mark.parametrize(
    ("action", "version"),
    [
        (calls(("roll", {"sides": 7})), "1"),  # other arguments
        (calls(("roll", {"sides": 6})), "2"),  # another version of the tool
        (calls(("draw", {"sides": 3}), ("draw", {"sides": 2})), "1"),  # another history
    ],
)
def test_a_replay_never_runs_a_tool_that_was_not_recorded(
    action: Any, version: str, tmp_path: Path
) -> None:
    play(made(tmp_path, replay=False), calls(("roll", {"sides": 6}), ("draw", {"sides": 2})))
    before = next(RUNS)
    with pytest.raises(ToolsFailed, match=r"environment\.tools\.replay.*(roll|draw)"):
        play(made(tmp_path, replay=True, version=version), action)
    assert next(RUNS) == before + 1


def test_a_key_does_not_depend_on_the_order_or_the_spaces_of_arguments(tmp_path: Path) -> None:
    def pair(a: int, b: int) -> int:
        return next(RUNS)

    episode = ToolEpisode(TASK, [pair])
    episode.setup = ToolSetup(recorder=Recorder(tmp_path, replay=False))
    _, seen = play(episode, calls(("pair", '{"a": 1, "b": 2}'), ("pair", '{"b":2,"a":1}')))
    assert contents(seen)[0] == contents(seen)[1]


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.tools\.replay.*record"):
        Recorder(tmp_path / "missing", replay=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"environment\.tools\.record.*another folder"):
        Recorder(tmp_path / "file", replay=False)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    play(made(tmp_path, replay=False), calls(("roll", {"sides": 6})))
    (record,) = tmp_path.glob("*/*.json")
    record.write_text(record.read_text()[:-9])
    with pytest.raises(ToolsFailed, match=record.name):
        play(made(tmp_path, replay=True), calls(("roll", {"sides": 6})))
