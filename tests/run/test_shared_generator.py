"""One generator that several processes use by a socket. Here, threads of one process use it."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sixfold.errors import UserError
from sixfold.rollout.generator import EngineLost, Sampled, SampleKey
from sixfold.run.shared_generator import GeneratorOfRanks, SharedGenerator
from sixfold.types import SamplingParams

PARAMS = SamplingParams(max_tokens=4)


class Scripted:
    """A generator that answers with the prompt. A prompt [0] waits for ever, [1] is refused, and
    [2] and [3] end the generator.
    """

    def __init__(self) -> None:
        self.version = -1
        self.waiting = self.cancelled = 0

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        if tokens[0] == 0:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)  # an engine takes a moment to free what it holds
                self.cancelled += 1
        if tokens[0] == 1:
            raise ValueError("too long")
        if tokens[0] == 2:
            raise EngineLost("vLLM's process was killed by SIGKILL")
        if tokens[0] == 3:
            raise KeyError("nothing")
        count = len(tokens)
        return Sampled(list(tokens), [0.0] * count, [self.version] * count, "stop", 0, 0.0)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return [temperature * token for token in tokens[1:]]

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        if version < 0:
            raise ValueError("torn")
        self.version = version
        return len(dict(weights))

    async def sleep(self) -> None:
        raise AssertionError("others may sample")

    def close(self) -> None:
        raise AssertionError("its owner closes it")


@contextmanager
def two() -> Iterator[tuple[Scripted, GeneratorOfRanks, GeneratorOfRanks]]:
    """The generator, that of the rank which has it, and that of another."""
    inner = Scripted()
    shared = SharedGenerator(inner)
    ranks = [GeneratorOfRanks(shared.path, 60.0, have) for have in (shared, None)]
    errors: list[dict[str, Any]] = []
    shared._loop._loop.set_exception_handler(lambda loop, context: errors.append(context))
    try:
        yield inner, ranks[0], ranks[1]
    finally:
        for rank in ranks:
            rank.close()
        shared.close()
    assert not Path(shared.path).parent.exists() and not errors


def sample(generator: GeneratorOfRanks, first: int, count: int = 1) -> list[Sampled]:
    """Completions of prompts of one token."""

    async def all_of() -> list[Sampled]:
        keys = [SampleKey("t", k) for k in range(count)]
        return await asyncio.gather(*(generator.generate([first], PARAMS, key) for key in keys))

    return asyncio.run(all_of())


def test_all_ranks_sample_from_the_weights_that_one_has_loaded() -> None:
    with two() as (inner, owner, other):
        weights = {"w": torch.ones(1)}
        assert asyncio.run(owner.load(weights, 3)) == 1 and asyncio.run(other.load(weights, 3)) == 0
        assert (owner.version, other.version, inner.version) == (3, 3, 3)
        for rank in (owner, other):
            found = sample(rank, 7, count=5)
            assert [(s.tokens, s.version) for s in found] == [([7], [3])] * 5
            assert asyncio.run(rank.score([5, 6, 7], 2.0)) == [12.0, 14.0]
            asyncio.run(rank.sleep())


def test_a_rank_without_the_generator_reads_all_weights() -> None:
    """The others gather them at the same moment, so it must take part."""
    read = []

    class Gathered(dict[str, Tensor]):
        def values(self) -> Any:
            for name in self:
                read.append(name)
                yield self[name]

    with two() as (_, _, other):
        asyncio.run(other.load(Gathered(a=torch.ones(1), b=torch.ones(1)), 1))
    assert read == ["a", "b"]


def test_a_refused_request_or_load_leaves_the_others_alone() -> None:
    with two() as (inner, owner, other):
        with pytest.raises(ValueError, match="too long"):
            sample(other, 1)
        with pytest.raises(ValueError, match="torn"):
            asyncio.run(owner.load({}, -2))
        assert (owner.version, inner.version) == (-1, -1)
        assert sample(other, 7)[0].tokens == [7]


def test_a_cancelled_call_has_ended_in_the_generator() -> None:
    with two() as (inner, _, other):

        async def cancel() -> None:
            call = asyncio.create_task(other.generate([0], PARAMS, SampleKey("t")))
            while not inner.waiting:
                await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.wait([call])
            assert inner.cancelled == 1

        asyncio.run(cancel())
        assert sample(other, 7)[0].tokens == [7]


@pytest.mark.parametrize(
    ("first", "said"),
    [(2, "of this machine failed:\n  vLLM's process was killed by SIGKILL$"), (3, "KeyError")],
)
def test_a_lost_engine_is_told_to_the_rank_that_asked(first: int, said: str) -> None:
    with two() as (_, _, other):
        with pytest.raises(EngineLost, match=said):
            sample(other, first)
        with pytest.raises(EngineLost, match=said):  # also later
            sample(other, 7)


def test_the_calls_of_a_rank_that_has_gone_end() -> None:
    """Other ranks sample on."""
    with two() as (inner, owner, other):

        async def leave() -> None:
            call = asyncio.create_task(other.generate([0], PARAMS, SampleKey("t")))
            while not inner.waiting:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(other.close)
            with pytest.raises(Exception, match="has been closed"):
                await call
            while not inner.cancelled:
                await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(leave(), 60))
        assert sample(owner, 7)[0].tokens == [7]


def test_nothing_is_sampled_or_written_for_a_rank_that_has_gone() -> None:
    """Its answers are dropped: the number of its socket may be that of another file by then."""
    with two() as (inner, owner, other):

        async def fail_and_ask_more() -> None:
            keys = [SampleKey("t", k) for k in range(20)]
            failing = other.generate([3], PARAMS, keys[0])
            waiting = [other.generate([0], PARAMS, key) for key in keys[1:]]
            found = await asyncio.gather(failing, *waiting, return_exceptions=True)
            assert all(isinstance(one, EngineLost) for one in found)
            while inner.cancelled < inner.waiting:
                await asyncio.sleep(0.001)

        opened = len(os.listdir("/proc/self/fd"))
        asyncio.run(asyncio.wait_for(fail_and_ask_more(), 60))
        other.close()
        for _ in range(1000):  # the thread that has read from the socket ends
            gc.collect()
            if len(os.listdir("/proc/self/fd")) < opened:
                break
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) < opened
        assert sample(owner, 7)[0].tokens == [7]


def test_a_rank_hears_that_the_one_with_the_generator_has_ended() -> None:
    shared = SharedGenerator(Scripted())
    other = GeneratorOfRanks(shared.path, 60.0, None)
    assert sample(other, 7)[0].tokens == [7]
    shared.close()
    with pytest.raises(UserError, match="the rank with the samplers of this machine has closed"):
        sample(other, 7)
    other.close()
    with pytest.raises(EngineLost, match="cannot be reached"):
        GeneratorOfRanks(shared.path, 60.0, None)
