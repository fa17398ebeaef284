"""Agents that are programs. Each episode starts the command in a new process."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from sixfold.errors import UserError
from sixfold.processes.child import Child, ChildError
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold.types import Task

HOST = "127.0.0.1"
SHOWN_LINES, SHOWN_CHARACTERS = 3, 400
"""Maximum lines and characters of a failed agent's output in the error."""
_TRACEBACK = "Traceback (most recent call last):"


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
        self._folder = os.getcwd()
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
        job = {"command": self._words, "environment": variables, "folder": self._folder}
        child = self._idle.pop() if self._idle else Child("sixfold_serving.agents.launcher")
        try:
            child.post(json.dumps(job).encode())
            ended = json.loads(await _answer(child))
        except BaseException as problem:
            await asyncio.shield(asyncio.to_thread(child.close, 0.0))
            if isinstance(problem, ChildError):
                raise EnvironmentFault(f"the launcher of the agent {problem}") from problem
            raise
        self._idle.append(child)
        code = ended["code"]
        if code != 0:
            failure = _failure(code, ended["output"], ended["errors"])
            raise EnvironmentFault(failure, by_agent=bool(code and code > 0))

    async def close(self) -> None:
        """End the launchers."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(asyncio.to_thread(child.close, 0.0) for child in idle))


def task_record(task: Task, answers: bool = True) -> dict[str, Any]:
    """A task as JSON.

    Args:
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


def _failure(code: int | None, output: str, errors: str) -> str:
    """Describe in one line how an agent failed.

    Args:
        code: exit code, minus the number of the signal that ended it, or None if it did not start.
        output: end of its standard output.
        errors: end of its standard error.
    """
    lines = [line.strip() for line in (errors or output).splitlines() if line.strip()]
    raised = _raised(errors) or _raised(output)
    said = raised[:SHOWN_CHARACTERS] or " | ".join(lines[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]
    if code is None:
        how = "it could not be started"
    elif code > 0:
        how = f"exit code {code}"
    else:
        how = f"it was ended by {signal.Signals(-code).name}"
    return f"{how}{f': {said}' if said else ''}"


def _raised(output: str) -> str:
    """The exception of the last traceback in an output, with its place. "" if there is none.

    What a program prints at its end, such as warnings, may follow the traceback. Exceptions that
    Python ignores at the end do not count.
    """
    lines = output.splitlines()
    heads = [
        at
        for at, line in enumerate(lines)
        if line.endswith(_TRACEBACK) and not (at and lines[at - 1].startswith("Exception ignored"))
    ]
    if not heads:
        return ""
    # Inside a group of exceptions, every line has a margin.
    margin = lines[heads[-1]].partition(_TRACEBACK)[0].replace("+ Exception Group ", "| ")
    rest = [line.removeprefix(margin) for line in lines[heads[-1] + 1 :]]
    frames = list(takewhile(lambda line: line.startswith("  "), rest))
    place = next((one.strip() for one in reversed(frames) if one.startswith("  File ")), "")
    said = rest[len(frames) :][:1] + list(
        takewhile(lambda line: line.startswith("  "), rest[len(frames) + 1 :])
    )
    return " ".join(" ".join(said[:SHOWN_LINES]).split()) + (f" ({place})" if place else "")
