"""Checks that arrive and are cancelled at any time, in processes that fail in every way. Every
check that is not cancelled gets exactly its own outcome.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from sixfold.checks.check import Check, Outcome, RewardInfo
from sixfold.checks.environment import Environment
from sixfold.checks.queue import WorkerPool
from sixfold.environment.sampled import Sampled
from sixfold.processes.program import descendants
from sixfold.types import Group, Task, Trajectory

SAMPLE = str(Path(__file__).parents[1] / "environment" / "rewards_for_tests" / "sample.py")
T = TypeVar("T")
TASK = Task(id="t", prompt="q", answer=1)


def check(text: str, reward: int = 0) -> Check:
    return Check(reward, TASK, [text], Sampled(["stop"], [[]], [], ""))


def with_pool(
    rewards: Sequence[str],
    use: Callable[[WorkerPool], Awaitable[T]],
    workers: int = 1,
    timeout_s: float = 20.0,
) -> T:
    """Result of `use`. Afterwards no process of the pool and no task is left."""
    before = set(descendants())
    pool = WorkerPool(
        [f"{SAMPLE}:{reward}" for reward in rewards], workers=workers, timeout_s=timeout_s
    )

    async def main() -> T:
        result = await use(pool)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    try:
        return asyncio.run(main())
    finally:
        pool.close()
        assert set(descendants()) <= before


async def outcomes(pool: WorkerPool, texts: Sequence[str]) -> list[Outcome]:
    return await asyncio.gather(*(pool.check(check(text)) for text in texts))


@pytest.mark.slow
def test_64_async_checks_take_the_slowest_not_the_sum() -> None:
    async def use(pool: WorkerPool) -> tuple[list[Outcome], float]:
        await pool.rewards()
        start = time.monotonic()
        return await outcomes(pool, ["sleep 0.5"] * 64), time.monotonic() - start

    found, seconds = with_pool(["told_async"], use)
    assert found[-1].values == [64.0]  # so many were running together
    assert seconds < 8


@pytest.mark.slow
def test_async_checks_end_at_their_own_time_limit() -> None:
    """Even a check that ignores its cancellation. All checks run in the same process."""

    async def use(pool: WorkerPool) -> tuple[list[Outcome], list[Outcome]]:
        texts = ["process", "hang", "stubborn", "raise", "exit", "sleep 0.5", "process"]
        return await outcomes(pool, texts), await outcomes(pool, ["process"])

    found, after = with_pool(["told_async"], use, timeout_s=1.0)
    assert [outcome.error for outcome in found] == [
        None,
        "timeout after 1 s",
        "timeout after 1 s",
        "ValueError: two lines",
        "SystemExit: 3",
        None,
        None,
    ]
    assert found[0].values == found[-1].values == after[0].values


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "error"),
    [("crash", "process was killed by SIGKILL"), ("block", "timeout after 1 s")],
)
def test_only_the_async_check_that_ends_its_process_fails(word: str, error: str) -> None:
    texts = ["sleep 0.1|" + "x" * n for n in range(4)]
    texts[2] = f"{word} 0.05"

    async def use(pool: WorkerPool) -> list[Outcome]:
        return await outcomes(pool, texts)

    found = with_pool(["length_async"], use, timeout_s=1.0)
    assert str(found[2].error).startswith(error)
    assert [o.values for n, o in enumerate(found) if n != 2] == [
        [float(len(t))] for n, t in enumerate(texts) if n != 2
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_async_and_plain_rewards_have_processes_of_their_own() -> None:
    async def use(pool: WorkerPool) -> list[float | None]:
        hung = asyncio.ensure_future(pool.check(check("hang")))
        both = [await pool.check(check("process")), await pool.check(check("x", 1))]
        assert not hung.done()
        assert (await hung).error == "timeout after 3 s"
        return [value for outcome in both for value in outcome.values]

    pids = with_pool(["told_async", "process"], use, timeout_s=3.0)
    assert len(set(pids)) == 2 and os.getpid() not in pids


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("reward", ["length_told", "length_async"])
def test_300_cancelled_checks_leave_nothing_behind(reward: str) -> None:
    async def use(pool: WorkerPool) -> tuple[Outcome, float, int]:
        await pool.rewards()
        hung = [asyncio.ensure_future(pool.check(check("hang"))) for _ in range(300)]
        await asyncio.sleep(0.2)  # some have been sent
        for one in hung:
            one.cancel()
        start = time.monotonic()
        assert all(
            isinstance(e, asyncio.CancelledError)
            for e in await asyncio.gather(*hung, return_exceptions=True)
        )
        found = await pool.check(check("ok"))
        return found, time.monotonic() - start, len(pool._workers)

    found, seconds, processes = with_pool([reward], use, workers=2)
    assert found.values == [2.0]
    assert seconds < 10  # none of them was waited for until its time limit of 20 s
    assert processes == (1 if reward == "length_async" else 2)


@pytest.mark.slow
def test_a_cancelled_check_behind_another_delays_no_other_check() -> None:
    """Several checks share a request. The cancelled one begins after the first has ended."""

    async def use(pool: WorkerPool) -> tuple[list[float | None], float]:
        await pool.rewards()
        start = time.monotonic()
        texts = ["ok 0.5", "hang", "ok", *["ok"] * 13]
        running = [asyncio.ensure_future(pool.check(check(text))) for text in texts]
        await asyncio.sleep(0.1)
        assert len(pool._workers[0].pending) == 8
        running.pop(1).cancel()
        values = [(await one).values[0] for one in running]
        return values, time.monotonic() - start

    values, seconds = with_pool(["length_told"], use)
    assert values == [6.0, *[2.0] * 14] and seconds < 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot find orphans")
def test_processes_started_by_async_checks_end_when_none_is_running() -> None:
    async def use(pool: WorkerPool) -> bool:
        first = asyncio.ensure_future(pool.check(check("1.0")))
        (pid,) = (await pool.check(check("0.0"))).values
        stat = Path(f"/proc/{int(pid or 0)}/stat")
        assert stat.exists()  # the first check is still running
        await first
        return stat.exists()

    assert not with_pool(["starts_daemons_async"], use)


@pytest.mark.slow
def test_a_pool_that_leaves_the_event_loop_ends_busy_processes() -> None:
    async def use(pool: WorkerPool) -> tuple[list[int], list[int]]:
        await pool.rewards()
        before = [worker.child.process.pid for worker in pool._workers]
        hung = asyncio.ensure_future(pool.check(check("hang")))
        await asyncio.sleep(0.1)
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)
        pool.leave()
        return before, descendants()

    before, after = with_pool(["told"], use, workers=2)
    assert len(set(before) & set(after)) == 1  # the idle one stays


@pytest.mark.slow
def test_one_event_loop_at_a_time() -> None:
    """A check that waits in an event loop that does not run would never get its outcome."""

    async def begin(pool: WorkerPool) -> None:
        waiting.append(asyncio.ensure_future(pool.check(check("ok"))))
        await asyncio.sleep(0)

    async def finish() -> Outcome:
        return await waiting[0]

    waiting: list[asyncio.Future[Outcome]] = []
    pool = WorkerPool([f"{SAMPLE}:told"], workers=1, timeout_s=20.0)
    pool._rewards = [RewardInfo("told", False, False)]
    try:
        with asyncio.Runner() as runner:
            runner.run(begin(pool))
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(pool.check(check("ok")))
            assert runner.run(finish()).values == [1.0]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_process_that_dies_without_a_check_harms_none() -> None:
    async def use(pool: WorkerPool) -> list[Outcome]:
        await pool.rewards()
        os.kill(pool._workers[0].child.pid, 9)
        while pool._workers[0].child.process.poll() is None:
            time.sleep(0.01)  # the event loop must not see it before the check is sent
        return [await pool.check(check("ok"))]

    assert with_pool(["length_told"], use)[0].values == [2.0]


@pytest.mark.slow
def test_a_process_that_does_not_read_delays_no_other_work() -> None:
    """A request is larger than the pipe. The rest is sent when the process continues to read."""
    large = "x" * 3_000_000

    async def use(pool: WorkerPool) -> tuple[int, Outcome, Outcome]:
        await pool.rewards()
        worker = pool._workers[0]
        os.kill(worker.child.pid, 19)  # SIGSTOP
        running = asyncio.ensure_future(pool.check(check(large)))
        turns = 0
        while not running.done():
            await asyncio.sleep(0.01)
            turns += 1
            if turns == 30:
                os.kill(worker.child.pid, 18)  # SIGCONT
        stopped = await running
        os.kill(pool._workers[0].child.pid, 19)
        return turns, stopped, await pool.check(check(large))

    turns, stopped, lost = with_pool(["length"], use, timeout_s=2.0)
    assert turns >= 30 and stopped.values == [3_000_000.0]
    assert lost.error == "timeout after 2 s"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_streams_give_every_check_its_own_outcome(seed: int) -> None:
    """Checks arrive over time, crash, hang, write junk and are cancelled. Lengths differ, so an
    outcome of another check would show.
    """
    rng = random.Random(seed)
    plans = []
    for number in range(120):
        word = rng.choices(["ok", "raise", "crash", "hang", "junk"], [30, 3, 1, 1, 1])[0]
        pause = rng.choice([0.0, 0.0, 0.01])
        cancel = rng.uniform(0.0, 0.3) if rng.random() < 0.2 else None
        asynchronous = rng.random() < 0.5
        if asynchronous and word == "junk":
            word = "ok"
        plans.append((number, word, pause, cancel, asynchronous, rng.uniform(0.0, 1.0)))

    def text(plan: tuple[int, str, float, float | None, bool, float]) -> str:
        number, word, pause, *_ = plan
        return f"{word} {pause}|" + "x" * number

    async def play(pool: WorkerPool, plan: tuple[int, str, float, float | None, bool, float]):
        *_, cancel, asynchronous, begin = plan
        await asyncio.sleep(begin)
        running = asyncio.ensure_future(pool.check(check(text(plan), int(asynchronous))))
        if cancel is not None:
            await asyncio.sleep(cancel)
            running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
        return result

    async def use(pool: WorkerPool) -> list[Outcome | BaseException]:
        return await asyncio.gather(*(play(pool, plan) for plan in plans))

    found = with_pool(["length_told", "length_async"], use, workers=2, timeout_s=2.0)
    for plan, result in zip(plans, found, strict=True):
        _, word, _, cancel, *_ = plan
        if isinstance(result, asyncio.CancelledError):
            assert cancel is not None
            continue
        assert isinstance(result, Outcome)
        if word == "ok":
            assert result.values == [float(len(text(plan)))] and result.error is None
        else:
            assert result.values == [] and result.error
            part = {"raise": "ValueError", "hang": "timeout"}.get(word, "process")
            assert part in result.error


def group(texts: Sequence[str]) -> Group:
    return Group(
        TASK,
        [
            Trajectory.one_turn("t", k, [1], [7], [-1.0], [0], "stop", text=text)
            for k, text in enumerate(texts)
        ],
    )


@pytest.mark.slow
def test_trajectories_are_scored_while_others_wait() -> None:
    """64 slow judges run together, and a cheap check does not wait for them."""

    async def step(environment: Environment) -> tuple[list[str], float]:
        ended: list[str] = []
        scorer = environment.scorer(65)

        async def add(name: str, one: Trajectory) -> None:
            await scorer.add(TASK, one)
            ended.append(name)

        await scorer.add(TASK, group(["sleep 0"]).trajectories[0])  # the process has started
        start = time.monotonic()
        slow = [add("slow", one) for one in group(["sleep 0.5"] * 64).trajectories]
        quick = add("quick", group(["sleep 0"]).trajectories[0])
        await asyncio.gather(*slow, quick)
        return ended, time.monotonic() - start

    with Environment([f"{SAMPLE}:told_async"]) as environment:
        ended, seconds = asyncio.run(step(environment))
    assert ended == ["quick", *["slow"] * 64] and seconds < 8


class Stopped(KeyboardInterrupt):
    """Exception that the handler of a run raises."""


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["length_told", "length_async"])
def test_a_signal_leaves_the_event_loop_and_no_process(reward: str) -> None:
    def stop(number: int, frame: object) -> None:
        raise Stopped

    async def step(environment: Environment, texts: Sequence[str]) -> Group:
        scored = group(texts)
        await environment.scorer(len(texts)).finish(scored)
        return scored

    before, handler = set(descendants()), signal.signal(signal.SIGALRM, stop)
    environment = Environment([f"{SAMPLE}:{reward}"], timeout_s=60.0, workers=2)
    try:
        asyncio.run(step(environment, ["ok"]))
        with pytest.raises(Stopped), asyncio.Runner() as runner:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            runner.run(step(environment, ["hang"] * 20))
        again = asyncio.run(step(environment, ["ok", "okay"]))
        assert again.rewards == [2.0, 4.0]
    finally:
        signal.signal(signal.SIGALRM, handler)
        environment.close()
    assert set(descendants()) <= before


def test_async_callables_run_concurrently_here_and_have_a_time_limit() -> None:
    running: list[str] = []

    async def judge(completion: str, task: Task) -> float:
        running.append(completion)
        while len(running) < 8:
            await asyncio.sleep(0.001)
        if completion == "hang":
            await asyncio.sleep(60)
        return float(len(completion))

    texts = ["a", "hang", "bb", "ccc", "a", "b", "c", "d"]
    judged = group(texts)
    with Environment([judge], timeout_s=1.0, error_budget=0.5) as environment:
        environment.score([judged])
    assert judged.rewards == [1.0, None, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    reward = judged.trajectories[1].reward
    assert reward and reward.error == "judge: timeout after 1 s"
