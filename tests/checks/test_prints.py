"""What rewards print goes to a file, wherever they run, and what others print does not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from sixfold.checks import prints as module
from sixfold.checks.environment import Environment
from sixfold.checks.prints import FILE, Prints
from sixfold.types import Group, Task, Trajectory

NAMED = """
import asyncio, os, sys

def loud(completion, task):
    print("named", completion)
    print("named error", completion, file=sys.stderr)
    os.system("echo child of named")
    return 1.0

async def loud_async(completion, task):
    await asyncio.sleep(0)
    print("named async", completion)
    return 1.0
"""


def here(completion: str, task: Task) -> float:
    print("callable", completion)
    print("callable error", completion, file=sys.stderr)
    return 1.0


async def here_async(completion: str, task: Task) -> float:
    print("before", completion)
    await asyncio.sleep(0)
    print("after", completion)
    return 1.0


def group(*texts: str) -> Group:
    rows = [
        Trajectory.one_turn("t", i, [1], [2], [0.0], [0], "stop", text=text)
        for i, text in enumerate(texts)
    ]
    return Group(Task("t", "p"), rows)


def test_every_kind_of_reward_prints_to_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(NAMED)
    prints = Prints()
    rewards = [here, here_async, f"{file}:loud", f"{file}:loud_async"]
    usual = sys.stdout, sys.stderr
    with Environment(rewards, prints=prints) as environment:
        environment.score([group("x")])  # the rewards are tried before there is a folder
        prints.keep_in(tmp_path)
        environment.score([group("y")])
        print("the run's own line")
    prints.close()
    assert (sys.stdout, sys.stderr) == usual
    lines = sorted((tmp_path / FILE).read_text().splitlines())
    each = ["callable", "callable error", "before", "after", "named", "named error", "named async"]
    assert lines == sorted(
        [f"{one} {text}" for one in each for text in "xy"] + ["child of named"] * 2
    )
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("the run's own line\n", "")


def test_what_others_print_meanwhile_stays_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two blocks are open at once, as those of two async checks are."""
    prints = Prints()
    prints.keep_in(tmp_path)

    async def reward(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with prints.capturing():
            print("reward")
            entered.set()
            await leave.wait()
            print("reward again")

    async def run() -> None:
        entered, leave = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
        tasks = [asyncio.ensure_future(reward(*both)) for both in zip(entered, leave, strict=True)]
        for event in entered:
            await event.wait()
        print("progress")
        leave[0].set()
        await tasks[0]
        print("more progress")
        leave[1].set()
        await tasks[1]

    asyncio.run(run())
    prints.close()
    assert capfd.readouterr().out == "progress\nmore progress\n"
    assert (tmp_path / FILE).read_text().split("\n") == [
        *["reward", "reward", "reward again", "reward again", ""]
    ]


def test_without_a_folder_the_output_is_shown_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    prints = Prints()
    with Environment([here], prints=prints) as environment:
        environment.score([group("x")])
    assert capfd.readouterr().err == ""
    prints.close()
    assert capfd.readouterr().err == "callable x\ncallable error x\n"


def test_the_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 10)
    prints = Prints()
    prints.keep_in(tmp_path)
    with prints.capturing():
        print("1234567890")
        print("lost")
    prints.close()
    assert (tmp_path / FILE).read_text().startswith("1234567890\n(what rewards print later")
    assert "lost" not in (tmp_path / FILE).read_text()
