"""The generator of a replay: weights wait for tokens, and for none that does not come.

Whole replays are in `tests/run/test_placement.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.rollout.scheduled import ReplayDiverged, ScheduledGenerator, diverged
from sixfold.types import SamplingParams

PARAMS = SamplingParams(max_tokens=3, seed=5)


class FakeEngine:
    """An engine that holds no sequence, and samples `length` tokens with the versions due.

    Attributes:
        loaded: versions in the order in which they were loaded.
    """

    def __init__(self, length: int = 3) -> None:
        self.version, self.length = 0, length
        self.loaded: list[int] = []

    async def generate(
        self, tokens: Any, params: SamplingParams, key: SampleKey, *, due: Any, **more: Any
    ) -> Sampled:
        versions = [*due, *[9] * self.length][: self.length]
        return Sampled([1] * self.length, [-1.0] * self.length, versions, "length", 0, 0.0)

    async def load(self, weights: Any, version: int) -> int:
        self.loaded.append(version)
        self.version = version
        return 0

    async def call(self, function: Any) -> set[Any]:
        return set()


def following(engine: Any, versions: list[int]) -> ScheduledGenerator:
    generator = ScheduledGenerator(engine)
    generator.follow({(5, "t", 0): versions})
    return generator


def test_weights_wait_until_every_token_of_the_old_ones_is_sampled() -> None:
    engine = FakeEngine()

    async def play() -> None:
        generator = following(engine, [0, 0, 0])
        loading = asyncio.create_task(generator.load({}, 1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.loaded == []
        await generator.generate([1], PARAMS, SampleKey("t"))
        await loading
        assert engine.loaded == [1]

    asyncio.run(play())


def test_a_call_waits_for_the_weights_of_its_first_token() -> None:
    engine = FakeEngine()

    async def play() -> None:
        generator = following(engine, [1, 1, 1])
        calling = asyncio.create_task(generator.generate([1], PARAMS, SampleKey("t")))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not calling.done()
        await generator.load({}, 1)
        assert (await calling).version == [1, 1, 1]

    asyncio.run(play())


def test_weights_do_not_wait_for_a_trajectory_that_has_failed() -> None:
    async def play() -> None:
        generator = following(FakeEngine(), [0, 0, 0])
        loading = asyncio.create_task(generator.load({}, 1))
        await asyncio.sleep(0)
        generator.failure = diverged("t", 0)
        async with asyncio.timeout(10):
            with pytest.raises(ReplayDiverged, match="task t, sample 0"):
                await loading

    asyncio.run(play())


def test_more_tokens_than_recorded_are_found() -> None:
    async def play() -> None:
        generator = following(FakeEngine(length=4), [0, 0, 0])
        with pytest.raises(ReplayDiverged):
            await generator.generate([1], PARAMS, SampleKey("t"))
        other = await generator.generate([1], PARAMS, SampleKey("heldout"))  # passes through
        assert len(other.tokens) == 4

    asyncio.run(play())
