"""Several sampling processes behind one generator: who samples, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold.backends.process_link import Call
from sixfold.backends.samplers import Samplers
from sixfold.backends.weight_files import streamed_file
from sixfold.rollout.generator import EngineLost, GeneratorClosed, Sampled, SampleKey
from sixfold.types import SamplingParams

PARAMS = SamplingParams(max_tokens=2, seed=1)
WEIGHTS = {"w": torch.zeros(1)}


class FakeProcess:
    """A process that answers at once, unless it is lost.

    Attributes:
        staged: (file, version) of the weights that it has read.
        loads: (file, version) of every swap.
        asked: names of the tasks.
    """

    def __init__(self, number: int, log: list[FakeProcess]) -> None:
        self.number, self.log = number, log
        self.version = -1
        self.given: str | None = None
        self.lost = self.is_ready = self.closed = False
        self.staged: tuple[str, int] | None = None
        self.loads: list[tuple[str, int]] = []
        self.asked: list[str] = []
        self.answer = asyncio.Event()
        self.answer.set()
        log.append(self)

    def ready(self) -> None:
        self.is_ready = True

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, key: SampleKey, **more: Any
    ) -> Sampled:
        assert self.is_ready, "asked before it was ready"
        self.asked.append(key.name)
        await self.answer.wait()
        self._check()
        return Sampled([7, 7], [-1.0, -1.0], [self.version] * 2, "length", 0, 0.0)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        self._check()
        return [float(self.version)]

    async def stage(self, given: str, version: int) -> None:
        self._check()
        self.staged = given, version

    async def swap(self, version: int) -> int:
        self._check()
        assert self.staged is not None and self.staged[1] == version
        self.loads.append(self.staged)
        self.given, self.version = self.staged
        self.staged = None
        return 1

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.lost:
            raise EngineLost(f"sampler {self.number} is gone")


def samplers(log: list[FakeProcess], count: int = 2, restarts: int = 1) -> Samplers:
    made: Any = lambda number: FakeProcess(number, log)  # noqa: E731
    return Samplers(made, partial(streamed_file, 4), count, restarts, lambda line: None)


def test_a_task_stays_where_its_prompt_is_cached() -> None:
    log: list[FakeProcess] = []

    async def play() -> None:
        pool = samplers(log)
        await pool.load(WEIGHTS, 0)
        log[0].answer.clear()
        waiting = asyncio.create_task(pool.generate([1], PARAMS, SampleKey("a")))
        await asyncio.sleep(0)
        await pool.generate([1], PARAMS, SampleKey("b", 0))  # the other has no open call
        log[0].answer.set()
        await waiting
        for name in "abab":
            await pool.generate([1], PARAMS, SampleKey(name, 3))

    asyncio.run(play())
    assert [set(process.asked) for process in log] == [{"a"}, {"b"}]


def test_calls_wait_for_the_process_that_replaces_a_lost_one() -> None:
    """The new process gets the weights of the last sync before its first request."""
    log: list[FakeProcess] = []

    async def play() -> list[Sampled]:
        pool = samplers(log, count=1)
        await pool.load(WEIGHTS, 3)
        log[0].lost = True
        calls = [pool.generate([1], PARAMS, SampleKey(f"t{i}")) for i in range(3)]
        late = asyncio.create_task(asyncio.sleep(0))
        found = asyncio.gather(*calls)
        await late
        more = await pool.generate([1], PARAMS, SampleKey("late"))
        assert pool.replaced == 1
        return [*(await found), more]

    found = asyncio.run(play())
    assert [process.closed for process in log] == [True, False]
    assert log[1].loads == log[0].loads
    assert [one.version for one in found] == [[3, 3]] * 4


def test_a_process_lost_during_a_load_gets_the_new_weights() -> None:
    log: list[FakeProcess] = []

    async def play() -> None:
        pool = samplers(log)
        await pool.load(WEIGHTS, 1)
        log[1].lost = True
        await pool.load(WEIGHTS, 2)
        assert [place.process.version for place in pool.places] == [2, 2]
        assert log[2].loads == log[0].loads  # the old ones first: others may refuse the new ones
        pool.close()

    asyncio.run(play())


def test_a_replacement_that_is_late_gets_the_weights_of_both_loads() -> None:
    """It starts with the old weights, and the new ones are published before it has them."""
    log: list[FakeProcess] = []

    class Slow(FakeProcess):
        async def stage(self, given: str, version: int) -> None:
            await super().stage(given, version)
            await self.answer.wait()

    def start(number: int) -> FakeProcess:
        process = Slow(number, log)
        if len(log) == 3:
            process.answer.clear()
        return process

    async def play() -> None:
        made: Any = start
        pool = Samplers(made, partial(streamed_file, 4), 2, 1, lambda line: None)
        await pool.load(WEIGHTS, 1)
        log[1].answer.clear()  # a load waits for the second process
        loading = asyncio.create_task(pool.load(WEIGHTS, 2))
        while log[0].staged is None:
            await asyncio.sleep(0)
        log[0].lost = True
        asking = asyncio.create_task(pool.generate([1], PARAMS, SampleKey("a")))
        while len(log) < 3 or log[2].staged is None:
            await asyncio.sleep(0)
        log[1].answer.set()
        while pool.version < 2:
            await asyncio.sleep(0)
        log[2].answer.set()
        await asyncio.gather(loading, asking)
        assert [version for _, version in log[2].loads] == [1, 2]
        assert [place.process.version for place in pool.places] == [2, 2]
        pool.close()

    asyncio.run(asyncio.wait_for(play(), 20))


def test_the_last_loss_is_named() -> None:
    log: list[FakeProcess] = []

    async def play() -> None:
        pool = samplers(log, restarts=1)
        for process in log:
            process.lost = True
        with pytest.raises(EngineLost, match=r"(?s)is gone.*placement.restarts = 1.*--resume"):
            await asyncio.gather(*(pool.generate([1], PARAMS, SampleKey(n)) for n in "ab"))

    asyncio.run(play())


def test_samplers_with_different_weights_are_found() -> None:
    log: list[FakeProcess] = []

    async def play() -> None:
        pool = samplers(log, count=3)
        await pool.load(WEIGHTS, 1)
        assert await pool.score([1, 2]) == [1.0]
        log[2].version = 0
        with pytest.raises(RuntimeError, match="sampler 2 has other weights than sampler 0"):
            await pool.score([1, 2])

    asyncio.run(play())


@pytest.mark.parametrize("shared", [False, True])
def test_old_weights_stay_until_all_ranks_have_the_new_ones(shared: bool) -> None:
    """A process of a rank that has not yet loaded the new ones may be replaced, and reads them."""

    async def play() -> None:
        log: list[FakeProcess] = []
        made: Any = lambda number: FakeProcess(number, log)  # noqa: E731
        pool = Samplers(made, partial(streamed_file, 4), 1, 0, lambda line: None, shared=shared)
        paths = []
        for version in (1, 2):
            await pool.load({"w": torch.tensor([float(version)])}, version)
            paths.append(Path(str(pool.places[0].process.given)))
        assert [path.exists() for path in paths] == [shared, True]
        pool.forget()
        assert [path.exists() for path in paths] == [False, True]
        pool.close()
        assert not paths[1].exists()

    asyncio.run(play())


def test_refused_weights_leave_the_old_ones() -> None:
    """Of an older version, or of tensors that a process refuses."""
    log: list[FakeProcess] = []

    async def play() -> None:
        pool = samplers(log)
        await pool.load(WEIGHTS, 4)
        file = log[1].given

        async def refuse(path: str, version: int) -> None:
            raise ValueError("weight 'w' has shape [1]")

        for version in (3, 4):
            with pytest.raises(ValueError, match=f"version = {version} must be greater than 4"):
                await pool.load(WEIGHTS, version)
        log[0].stage = refuse  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="has shape"):
            await pool.load(WEIGHTS, 5)
        assert pool.version == log[1].version == 4  # though the other has read them
        log[0].lost = True
        await pool.generate([1], PARAMS, SampleKey("a"))
        assert log[2].loads == [(file, 4)]

    asyncio.run(play())


def test_an_abort_of_a_call_that_has_just_ended_waits_for_nothing() -> None:
    """The answer was on its way when the abort arrived: no other reply will come."""

    async def play() -> None:
        call = Call(1)
        call.put({"id": 1, "last": True, "sampled": None})
        async with asyncio.timeout(10):
            await call.aborted()

    asyncio.run(play())


def test_a_replacement_that_is_lost_too_is_replaced() -> None:
    log: list[FakeProcess] = []

    def start(number: int) -> FakeProcess:
        process = FakeProcess(number, log)
        process.lost = len(log) in (2, 3)  # the first two replacements
        return process

    async def play() -> None:
        made: Any = start
        pool = Samplers(made, partial(streamed_file, 4), 1, 3, lambda line: None)
        await pool.load(WEIGHTS, 1)
        log[0].lost = True
        sampled = await pool.generate([1], PARAMS, SampleKey("a"))
        assert sampled.version == [1, 1] and pool.replaced == 3

    asyncio.run(play())


def test_a_replacement_goes_on_if_the_call_that_asked_for_it_is_cancelled() -> None:
    """No other call reaches the new process before it has the weights."""
    log: list[FakeProcess] = []
    given, loading = asyncio.Event(), asyncio.Event()

    async def play() -> Sampled:
        pool = samplers(log, count=1)
        await pool.load(WEIGHTS, 3)
        stage = FakeProcess.stage

        async def slowly(self: FakeProcess, path: str, version: int) -> None:
            loading.set()
            await given.wait()
            await stage(self, path, version)

        log[0].lost = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeProcess, "stage", slowly)
            first = asyncio.create_task(pool.generate([1], PARAMS, SampleKey("a")))
            await loading.wait()
            first.cancel()
            other = asyncio.create_task(pool.generate([1], PARAMS, SampleKey("b")))
            for _ in range(10):
                await asyncio.sleep(0)
            assert log[1].asked == []
            given.set()
            return await other

    assert asyncio.run(play()).version == [3, 3]
    assert [process.asked for process in log] == [["a"], ["b"]]


def test_other_calls_of_a_lost_server_end_with_it_and_are_sampled_again() -> None:
    """One call finds that the server is lost. Closing its client ends the others."""
    log: list[FakeProcess] = []
    errors = [EngineLost("no answer"), GeneratorClosed("the connection is closed")]

    async def play() -> None:
        pool = samplers(log, count=1)
        await pool.load(WEIGHTS, 3)

        def fail() -> None:
            raise errors.pop(0)

        log[0]._check = fail  # type: ignore[method-assign]
        calls = [pool.generate([1], PARAMS, SampleKey(name)) for name in "ab"]
        assert [one.version for one in await asyncio.gather(*calls)] == [[3, 3]] * 2
        assert pool.replaced == 1
        pool.close()
        log[1]._check = fail  # type: ignore[method-assign]
        errors.append(GeneratorClosed("closed"))
        with pytest.raises(GeneratorClosed, match="closed"):
            await pool.generate([1], PARAMS, SampleKey("c"))

    asyncio.run(play())


def test_scores_of_other_programs_may_differ_by_rounding() -> None:
    log: list[FakeProcess] = []

    async def play() -> None:
        made: Any = lambda number: FakeProcess(number, log)  # noqa: E731
        pool = Samplers(made, partial(streamed_file, 4), 2, 0, lambda line: None, limit=0.1)
        await pool.load(WEIGHTS, 1)
        for gap in (-0.05, 0.05):
            log[1].version = 1 + gap  # type: ignore[assignment]
            assert await pool.score([1, 2]) == [1.0]
        log[1].version = 1.2  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="sampler 1 has other weights"):
            await pool.score([1, 2])

    asyncio.run(play())
