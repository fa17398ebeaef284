"""Sandboxed programs end with their owner, for any reason that the owner ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sixfold.processes.program import end_descendants, helpers
from sixfold_environments.sandbox.job import Ended, Job, Limits
from sixfold_environments.sandbox.sandbox import Sandbox

JOBS = 6

OWNER = """
import asyncio, sys
from sixfold_environments.sandbox.job import Job, Limits
from sixfold_environments.sandbox.sandbox import Sandbox

async def main():
    job = Job(("sleep", sys.argv[1]), limits=Limits(wall_s=60.0))
    with Sandbox(slots=int(sys.argv[2])) as sandbox:
        await asyncio.gather(*(sandbox.run(job) for _ in range(int(sys.argv[2]))))

asyncio.run(main())
"""


def processes_with(word: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(int(name))
    return found


def tree(pid: int) -> dict[int, str]:
    """Start time of each process below `pid`: a process with another one is not the same."""
    stats = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                rest = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            stats[int(name)] = (int(rest[1]), rest[19], rest[0])
    below, waiting = {}, [pid]
    while waiting:
        parent = waiting.pop()
        for child, (above, start, state) in stats.items():
            if above == parent and state != "Z":
                below[child] = start
                waiting.append(child)
    return below


def still_there(processes: dict[int, str]) -> list[int]:
    found = []
    for pid, start in processes.items():
        try:
            rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if rest[19] == start and rest[0] != "Z":
            found.append(pid)
    return found


@pytest.mark.mostly_nightly(1)
@pytest.mark.parametrize("victim", ["owner", "supervisor", "launcher"])
def test_nothing_survives_a_kill(victim: str) -> None:
    mark = f"77{time.time_ns() % 10**7}.{os.getpid()}"
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, mark, str(JOBS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        deadline = time.monotonic() + 60
        while len(processes_with(mark)) < JOBS + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        everything = tree(owner.pid)
        assert len(everything) > 3 * JOBS
        # The two largest trees: the supervisor, and the launcher below it.
        sizes = {pid: len(tree(pid)) for pid in everything}
        supervisor, launcher = sorted(sizes, key=lambda pid: -sizes[pid])[:2]
        os.kill({"owner": owner.pid, "supervisor": supervisor, "launcher": launcher}[victim], 9)
        began = time.monotonic()
        while still_there(everything) and time.monotonic() < began + 10:
            time.sleep(0.02)
        assert still_there(everything) == []
        assert len(Path("/proc/self/mountinfo").read_text().splitlines()) == mounts
    finally:
        owner.kill()
        owner.wait()


def test_a_killed_launcher_is_a_failure_of_the_machine_and_is_replaced() -> None:
    async def killed(sandbox: Sandbox) -> tuple[Ended, Ended]:
        mark = f"9.{os.getpid()}"
        task = asyncio.create_task(sandbox.run(Job(("sleep", mark), limits=Limits(30.0))))
        while not processes_with(mark):
            await asyncio.sleep(0.05)
        for pid in helpers - before:
            os.kill(pid, signal.SIGKILL)
        return await task, await sandbox.run(Job(("echo", "1")))

    before = set(helpers)
    with Sandbox(slots=1) as sandbox:
        first, second = asyncio.run(killed(sandbox))
    assert first.verdict == "infrastructure_error"
    assert second.stdout == b"1\n"


def test_waiting_cells_outlive_the_end_of_a_check() -> None:
    """A reward process ends all its other descendants after a check."""
    before = set(helpers)  # other tests of this process may share a sandbox
    others = frozenset(tree(os.getpid()))  # such as the fork server of other tests
    with Sandbox(slots=1) as sandbox:
        asyncio.run(sandbox.run(Job(("true",))))
        (launcher,) = helpers - before
        idle = tree(launcher)
        end_descendants(helpers | others)
        assert still_there(idle) == list(idle)
        assert asyncio.run(sandbox.run(Job(("true",)))).verdict == "passed"
    deadline = time.monotonic() + 5
    while still_there(idle) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert still_there(idle) == []
    assert helpers == before
