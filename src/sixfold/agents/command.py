"""Agents that are programs. Each episode starts the command in a new process."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..processes.child import Child, ChildError
from ..rollout.environment_fault import EnvironmentFault
from ..types import Task

HOST = "127.0.0.1"
SHOWN_LINES, SHOWN_CHARACTERS = 3, 400
"""Maximum lines and characters of a failed agent's output in the error."""


class CommandRunner:
    """Runs a command once per episode.

    The command gets these environment variables: OPENAI_BASE_URL and OPENAI_API_KEY for its client;
    SIXFOLD_TASK, the task as JSON; SIXFOLD_REWARD_URL, to which it may post the reward. `python`
    means the interpreter of the run, unless the command contains a path.

    Launchers (`launcher`) start the programs and are reused. When a program ends, its launcher also
    ends all processes that the program has started.

    Args:
        command: the command line. It is not passed to a shell.
        answers: also pass the task's answer and columns.

    Raises:
        UserError: if the command cannot be parsed, or its program does not exist.
    """

    def __init__(self, command: str, answers: bool = True) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UserError(f"environment.agent.command = {command!r}: {error}") from error
        own = Path(sys.executable).parent
        path = os.pathsep.join([str(own), os.environ.get("PATH", os.defpath)])
        self._variables = {**os.environ, **without_proxy(), "PATH": path}
        if not self._words or shutil.which(self._words[0], path=path) is None:
            name = self._words[0] if self._words else ""
            raise UserError(
                f"environment.agent.command = {command!r}: the program {name!r} does not exist."
                " Give a command line such as 'python my_agent.py', or module:function"
            )
        self._answers = answers
        self._idle: list[Child] = []

    async def run(self, task: Task, address: str) -> None:
        """Run the command for one episode, see `Runner.run`."""
        variables = {
            **self._variables,
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_BASE": f"{address}/v1",
            "OPENAI_API_KEY": "sixfold",
            "SIXFOLD_TASK": json.dumps(task_record(task, self._answers), default=str),
            "SIXFOLD_REWARD_URL": f"{address}/reward",
        }
        job = {"command": self._words, "environment": variables, "folder": os.getcwd()}
        child = self._idle.pop() if self._idle else Child("sixfold.agents.launcher")
        try:
            child.post(json.dumps(job).encode())
            ended = json.loads(await _answer(child))
        except BaseException as problem:
            await asyncio.shield(asyncio.to_thread(child.close, 0.0))
            if isinstance(problem, ChildError):
                raise EnvironmentFault(f"the launcher of the agent {problem}") from problem
            raise
        self._idle.append(child)
        if ended["code"] != 0:
            raise EnvironmentFault(_failure(ended["code"], ended["output"]))

    async def close(self) -> None:
        """End the launchers."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(asyncio.to_thread(child.close, 0.0) for child in idle))


def task_record(task: Task, answers: bool = True) -> dict[str, Any]:
    """A task as JSON.

    Args:
        task: the task.
        answers: include the answer and the columns.
    """
    record = {"id": task.id, "prompt": task.prompt, "source": task.source}
    return record | ({"answer": task.answer, "columns": dict(task.columns)} if answers else {})


def without_proxy() -> dict[str, str]:
    """Variables with which requests for the endpoint are not sent to a proxy.

    A proxy cannot reach a loopback address.
    """
    given = {name: os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    return {
        name: ",".join([*filter(None, [hosts]), HOST, "localhost"]) for name, hosts in given.items()
    }


async def _answer(child: Child) -> bytes:
    """Wait for the next answer of a child.

    Raises:
        ChildError: the child has ended or failed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        try:
            for message in child.arrived():
                if message.is_answer and not done.done():
                    done.set_result(message.body)
        except ChildError as error:
            if not done.done():
                done.set_exception(error)

    loop.add_reader(child.replies, read)
    try:
        while not child.flush():  # a task may be larger than the pipe's buffer
            await asyncio.sleep(0.001)
        return await done
    finally:
        loop.remove_reader(child.replies)


def _failure(code: int | None, output: str) -> str:
    """Describe in one line how an agent failed.

    Args:
        code: exit code, minus the number of the signal that ended it, or None if it did not start.
        output: end of its output.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = " | ".join(lines[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]
    if code is None:
        how = "it could not be started"
    elif code > 0:
        how = f"exit code {code}"
    else:
        how = f"it was ended by {signal.Signals(-code).name}"
    return f"{how}{f': {said}' if said else ''}"
