"""A sampler on Ray, without Ray: an actor that hangs counts as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sixfold.backends.ray_sampler import RaySampler
from sixfold.rollout.generator import EngineLost


def actor(**methods: Callable[[], asyncio.Future[Any]]) -> Any:
    """An actor whose methods return these futures, whatever their arguments."""

    def remote(method: Callable[[], asyncio.Future[Any]]) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given: method())

    return SimpleNamespace(**{name: remote(method) for name, method in methods.items()})


def test_an_actor_that_hangs_is_lost() -> None:
    async def play() -> None:
        never = asyncio.get_running_loop().create_future
        sampler = RaySampler(2, lambda: actor(score=never, beat=never), {}, 0.001, 1.0)
        with pytest.raises(EngineLost, match=r"sampler 2 has given no sign of life for 0\.001 s"):
            await sampler.score([1, 2])

    asyncio.run(play())


def test_an_actor_that_is_slow_is_not() -> None:
    beats = 0

    async def play() -> list[float]:
        scored = asyncio.get_running_loop().create_future()

        def beat() -> asyncio.Future[None]:
            nonlocal beats
            beats += 1
            if beats == 3:
                scored.set_result(([-0.5], None))
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(None)
            return answer

        sampler = RaySampler(0, lambda: actor(score=lambda: scored, beat=beat), {}, 0.001, 1.0)
        return await sampler.score([1, 2])

    assert asyncio.run(play()) == [-0.5]
    assert beats == 3
