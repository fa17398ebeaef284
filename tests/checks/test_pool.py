"""Every check gets its own outcome, and all processes that a check has started end with it."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sixfold.checks.check import Check, Outcome
from sixfold.checks.limits import WORKER_MEMORY_BYTES
from sixfold.checks.queue import WorkerPool
from sixfold.checks.worker import run_check
from sixfold.environment.grade import Grade, plain_value
from sixfold.environment.rewards import RewardFunction
from sixfold.environment.sampled import Sampled
from sixfold.processes.program import ANSWER, HEADER, MARK, descendants
from sixfold.types import Task

SAMPLE = str(Path(__file__).parents[1] / "environment" / "rewards_for_tests" / "sample.py")
TASK = Task(id="t", prompt="q", answer=1)


def check(text: str) -> Check:
    return Check(0, TASK, [text], Sampled(["stop"], [[]], [], ""))


def run(pool: WorkerPool, checks: Sequence[Check]) -> list[Outcome]:
    """Results of checks that are started together."""

    async def together() -> list[Outcome]:
        found = await asyncio.gather(*map(pool.check, checks))
        pool.leave()
        return found

    return asyncio.run(together())


def outcomes(
    reward: str, texts: Sequence[str], workers: int = 1, timeout_s: float = 5.0
) -> dict[int, Outcome]:
    """Result of each check, by its place in `texts`."""
    pool = WorkerPool([f"{SAMPLE}:{reward}"], workers=workers, timeout_s=timeout_s)
    try:
        return dict(enumerate(run(pool, [check(text) for text in texts])))
    finally:
        pool.close()


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["forked", "forked_async"])
@pytest.mark.parametrize("way", ["raise", "return", "exit"])
def test_the_child_of_a_reward_does_not_answer_for_it(way: str, reward: str) -> None:
    """All texts have different lengths, so the reply of another check would be noticed."""
    texts = [way] + ["x" * (20 + n) for n in range(20)] + [way]
    assert {n: o.values for n, o in outcomes(reward, texts, workers=2).items()} == {
        n: [float(len(t))] for n, t in enumerate(texts)
    }


def test_a_child_forked_in_this_process_ends_in_the_reward() -> None:
    def forks(completion: str, task: Task) -> float:
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert run_check(RewardFunction("forks", forks), check("x")).values == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["junk\n", "\xff", "x" * 100_000])
def test_unexpected_line_fails_only_its_own_check(line: str) -> None:
    found = outcomes("stray", ["", line, "", ""])
    assert [found[n].values for n in (0, 2, 3)] == [[1.0]] * 3
    assert str(found[1].error).startswith("process sent something that is not a reply")


NESTED = "[" * 100_000
SOUND = '{"values": [5.0], "error": null, "seconds": 0.1, "cause": ""}'


@pytest.mark.mostly_nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("other_pid", "number", "body", "error"),
    [
        (0, 0, "[1]", "malformed"),
        (0, 0, NESTED, "malformed"),
        (0, 0, SOUND.replace("5.0", "NaN"), "malformed"),
        (0, 0, SOUND.replace("5.0", "5.0, 5.0"), "malformed"),
        (0, 0, SOUND, "malformed"),
        (0, 0, SOUND.replace("{", '{"check": 0, '), "malformed"),
        (0, 1, SOUND, "another request"),
        (1, 0, SOUND, None),
    ],
)
def test_only_a_sound_reply_of_the_worker_to_the_running_check_counts(
    other_pid: int, number: int, body: str, error: str | None
) -> None:
    """The worker itself writes the replies. Number 1 is about the rewards, 2 is the first check."""
    pool = WorkerPool([f"{SAMPLE}:stray"], workers=1, timeout_s=5.0)
    try:
        asyncio.run(pool.rewards())
        pid = pool._workers[0].child.pid + other_pid
        forged = HEADER.pack(MARK, ANSWER, pid, 3 + number, len(body)).decode("latin-1") + body
        found = run(pool, [check(text) for text in ("", forged, "")])
    finally:
        pool.close()
    assert (found[0].values, found[2].values) == ([1.0], [1.0])
    assert found[1].values == ([] if error else [1.0])
    assert error is None or error in str(found[1].error)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot find orphans")
@pytest.mark.parametrize("way", ["return", "hang", "crash"])
def test_processes_started_by_a_check_end_with_it(way: str) -> None:
    before = set(descendants())
    pool = WorkerPool([f"{SAMPLE}:starts_daemons"], workers=1, timeout_s=0.5)
    try:
        pids = [int(v or 0) for outcome in run(pool, [check(way)]) for v in outcome.values]
        assert not any(running(pid) for pid in pids) and len(pids) == (way == "return")
        ours = {worker.child.process.pid for worker in pool._workers} | {
            worker.child.pid for worker in pool._workers
        }
        assert eventually(lambda: sleepers(set(descendants()) - before - ours) == [])
    finally:
        pool.close()
    assert sleepers(set(descendants()) - before) == []


def sleepers(pids: set[int]) -> list[int]:
    """Processes of `pids` that run sleep(1)."""
    return [
        pid for pid in pids if running(pid) and Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    ]


@pytest.mark.slow
def test_a_worker_that_ignores_all_signals_ends_with_its_parent() -> None:
    code = (
        "import asyncio, os, threading, time\nfrom sixfold.checks.queue import WorkerPool\nfrom"
        " sixfold.environment.sampled import Sampled\nfrom sixfold.checks.check import"
        f" Check\nfrom sixfold.types import Task\npool = WorkerPool(['{SAMPLE}:deaf'], workers=1,"
        " timeout_s=100.0)\nasyncio.run(pool.rewards());"
        " print(pool._workers[0].child.process.pid, flush=True)\nthreading.Timer(0.3, lambda:"
        " os._exit(9)).start()\nasyncio.run(pool.check(Check(0, Task(id='t', prompt='q'), ['x'],"
        " Sampled(['stop'], [[]], [], ''))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60
    )
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 2 and eventually(lambda: not any(running(pid) for pid in pids))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_check_that_takes_too_long_after_it_blamed_the_answer_is_no_failure() -> None:
    texts = ["right", "hang", "blame hang", "blame crash", "blame raise", "right"]
    found = outcomes("blames", texts, timeout_s=0.5)
    slow = Grade(0.0, "timeout", "timeout after 0.5 s")
    assert [found[n].values for n in range(6)] == [[1.0], [], [slow], [], [], [1.0]]
    assert found[1].error == "timeout after 0.5 s" and str(found[4].error).startswith("ValueError")
    assert found[3].cause == "died"  # another process or the machine may have killed it


@pytest.mark.slow
def test_workers_of_built_in_rewards_have_bounded_memory() -> None:
    pool = WorkerPool(["math"], workers=1, timeout_s=30.0)
    try:
        task = Task(id="t", prompt="", answer=r"\sqrt{2}")
        found = run(pool, [check(r"\boxed{\frac{2}{\sqrt{2}}}")._replace(task=task)])
        limits = Path(f"/proc/{pool._workers[0].child.pid}/limits").read_text()
    finally:
        pool.close()
    assert [plain_value(value) for value in found[0].values] == [1.0]
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) == WORKER_MEMORY_BYTES


def test_a_pool_without_rewards_starts_no_process() -> None:
    """An environment of functions from Python has such a pool."""
    pool = WorkerPool([], workers=2, timeout_s=1.0)
    pool.start()
    assert pool._workers == []
