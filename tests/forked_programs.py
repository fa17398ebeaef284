"""Programs of `processes/child.py`, forked from a server that has imported everything.

For tests of what a program answers. Tests of how a program starts and ends start a new interpreter.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

import pytest

from sixfold.processes import child, program

from .forkserver import CONTEXT

NEED_TORCH = ("sixfold.reference.worker", "sixfold.run.sampler_worker", "vllm_worker.py")
"""Ends of the targets that need torch."""
OF_A_RUN = (*NEED_TORCH, "sixfold.checks.worker")
"""Ends of the targets that a run starts. An interpreter for a worker that checks answers takes
longer than the step of a tiny run."""

_FREE = 500  # descriptors from here on are in use by nobody


class Descriptor:
    """An open file that a forked process inherits. It arrives there as a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self.number),)


def _arrived(sent: Any) -> int:
    return int(sent.detach())


class ForkedProgram:
    """Takes the place of `subprocess.Popen` in `Child`: the same supervisor and program, forked.

    Attributes:
        pid: the supervisor.
        returncode: its exit code once `wait` has returned.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Any,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_: Any,
    ) -> None:
        files = {number: Descriptor(number) for number in pass_fds}
        if stdout is not None:
            given = stdout if isinstance(stdout, int) else stdout.fileno()
            files |= dict.fromkeys((1, 2), Descriptor(given))
        # After the options and the path of program.py: PARENT REQUESTS REPLIES TARGET.
        arguments = list(command[-3:])
        self._process = CONTEXT.Process(
            target=_serve, args=(arguments, files, dict(env)), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid or 0
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _serve(arguments: list[str], files: dict[int, int], env: dict[str, str]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p not in sys.path]
    sources = {n: fcntl.fcntl(file, fcntl.F_DUPFD, _FREE) for n, file in files.items()}
    for file in set(files.values()):
        os.close(file)
    for number, source in sources.items():
        os.dup2(source, number)
        os.close(source)
    # The server stands for the parent. The end of the true one shows as the end of its pipe.
    sys.argv = [program.__file__, str(os.getppid()), *arguments]
    program.main()


def _forking(targets: tuple[str, ...]) -> SimpleNamespace:
    """The module `subprocess`, but programs with these targets are forked."""

    def start(command: Sequence[str], **options: Any) -> Any:
        forks = command[0] == sys.executable and command[-1].endswith(targets)
        return (ForkedProgram if forks else subprocess.Popen)(command, **options)

    return SimpleNamespace(**vars(subprocess) | {"Popen": start})


FORKING = _forking(OF_A_RUN)


def fork_programs(
    patch: pytest.MonkeyPatch, forking: bool = True, targets: tuple[str, ...] = NEED_TORCH
) -> None:
    """Fork the programs with these targets. All others start as always; without `forking`, all
    do.
    """
    patch.setattr(child, "subprocess", _forking(targets) if forking else subprocess)


def kill_program(pid: int) -> None:
    """Kill a program with its supervisor, whose pid this is. The program alone could still answer.

    A program that is being started gets a process group of its own a moment later.
    """
    until = time.monotonic() + 20
    while True:
        try:
            return os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
