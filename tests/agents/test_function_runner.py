"""A function is called in a process beside the run. What it returns, raises, or does to its process
reaches the run as a value or as the failure of the episodes that it plays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold.types import Task
from sixfold_serving.agents.function_runner import FunctionRunner

AGENT = """
import asyncio, os, signal, sys, time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def play(task, base_url):
    match task.prompt:
        case "reward": return 0.25
        case "numpy": return np.float32(0.5)
        case "text": return f"{task.answer['x']} {base_url}"
        case "nothing": return None
        case "nan": return float("nan")
        case "list": return [1.0]
        case "raises": raise KeyError("no such page")
        case "exits": sys.exit(3)
        case "pid": return str(os.getpid())
        case "dies": os.kill(os.getpid(), signal.SIGKILL)
        case "waits": time.sleep(60)
        case "prints": print("hello" * 100_000)
        case "proxy": return os.environ["NO_PROXY"]
        case long: return str(len(long))


async def play_async(task, base_url):
    if task.prompt != "waits":
        return play(task, base_url)
    (HERE / "began").write_text("")
    try:
        await asyncio.sleep(60)
    finally:
        (HERE / "cancelled").write_text("")
"""


def agent_file(folder: Path) -> Path:
    file = folder / "my_agent.py"
    file.write_text(AGENT)
    return file


@asynccontextmanager
async def runner(folder: Path, name: str = "play") -> AsyncIterator[FunctionRunner]:
    made = FunctionRunner(f"{agent_file(folder)}:{name}")
    try:
        yield made
    finally:
        await made.close()


def played(folder: Path, prompts: Sequence[str], name: str = "play") -> list[Any]:
    """Value or fault of episodes that run at the same time."""

    async def main() -> list[Any]:
        async with runner(folder, name) as made:
            calls = (made.run(Task("a", p, answer={"x": 1}), "http://host") for p in prompts)
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["play", "play_async"])
def test_values_and_failures_of_concurrent_calls_reach_their_own_episodes(
    tmp_path: Path, name: str
) -> None:
    long = "x" * 300_000  # more than a pipe holds
    prompts = ["reward", "numpy", "text", "nothing", long, "prints", "list", "raises", "exits"]
    *values, listed, raised, exited = played(tmp_path, prompts, name)
    assert values == [0.25, 0.5, "1 http://host/v1", None, "300000", None]
    assert [type(fault) for fault in (listed, raised, exited)] == [EnvironmentFault] * 3
    assert "list" in str(listed) and "no such page" in str(raised) and "3" in str(exited)


def test_a_reward_that_is_nan_is_a_failure_of_the_episode(tmp_path: Path) -> None:
    (fault,) = played(tmp_path, ["nan"])
    assert isinstance(fault, EnvironmentFault) and "nan" in str(fault)


def test_requests_for_the_endpoint_do_not_go_to_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "intern.example")
    (hosts,) = played(tmp_path, ["proxy"])
    assert hosts.split(",") == ["intern.example", "127.0.0.1", "localhost"]


def test_a_death_of_the_process_fails_its_episodes_and_the_next_one_gets_a_new_process(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with runner(tmp_path) as made:
            first = await made.run(Task("a", "pid"), "")
            lost = [made.run(Task("a", prompt), "") for prompt in ("waits", "dies")]
            for fault in await asyncio.gather(*lost, return_exceptions=True):
                assert isinstance(fault, EnvironmentFault) and "SIGKILL" in str(fault)
            second = await made.run(Task("a", "pid"), "")
            assert first != second
            os.kill(int(str(second)), signal.SIGKILL)  # between two episodes
            await until(lambda: made._child is None)
            assert await made.run(Task("a", "reward"), "") == 0.25

    asyncio.run(main())


def test_a_file_that_is_gone_fails_the_episodes_of_a_new_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with runner(tmp_path) as made:
            (tmp_path / "my_agent.py").unlink()
            with pytest.raises(EnvironmentFault, match="SIGKILL"):
                await made.run(Task("a", "dies"), "")
            with pytest.raises(EnvironmentFault, match="file not found"):
                await made.run(Task("a", "reward"), "")

    asyncio.run(main())


def test_a_cancelled_call_of_an_async_function_is_cancelled_in_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with runner(tmp_path, "play_async") as made:
            call = asyncio.ensure_future(made.run(Task("a", "waits"), ""))
            await until((tmp_path / "began").exists)
            call.cancel()
            await until((tmp_path / "cancelled").exists)
            assert await made.run(Task("a", "reward"), "") == 0.25

    asyncio.run(main())


async def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_close_ends_a_call_that_blocks(tmp_path: Path) -> None:
    async def main() -> None:
        made = FunctionRunner(f"{agent_file(tmp_path)}:play")
        pid = int(str(await made.run(Task("a", "pid"), "")))
        call = asyncio.ensure_future(made.run(Task("a", "waits"), ""))
        await asyncio.sleep(0.05)
        call.cancel()
        await made.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_one_runner_serves_one_event_loop_after_another(tmp_path: Path) -> None:
    """A run, and then the evaluation at its end, each have one."""
    made = FunctionRunner(f"{agent_file(tmp_path)}:play")
    pids = {asyncio.run(_run(made, "pid")) for _ in range(3)}
    asyncio.run(made.close())
    assert len(pids) == 1


async def _run(made: FunctionRunner, prompt: str) -> object:
    return await made.run(Task("a", prompt), "")


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("x = 1", "agent", "has no"),
        ("def agent(task): pass", "agent", "task and a base URL"),
        ("import not_there", "agent", "not_there"),
        ("import os; os._exit(3)", "agent", "exit code 3"),
        ("x = ", "agent", "my_agent.py"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_run(
    tmp_path: Path, text: str, name: str, problem: str
) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(text)
    with pytest.raises(UserError, match=problem):
        FunctionRunner(f"{file}:{name}")
