"""A Ray actor that samples with the embedded engine or vLLM. `backends/ray_sampler.py` calls it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..backends.ray_head import machine_name
from ..backends.weight_files import read_sealed
from ..rollout.generator import Activity, Sampled
from .rank_agent import versions
from .sampler_worker import Setup
from .vllm_setup import VllmOfActor, VllmSetup

T = TypeVar("T")
Reply = tuple[T, Activity | None]
"""A result, and the counters of the engine, if it has any."""


class SamplerActor:
    """Samples. Its methods run in one event loop.

    Args:
        setup: the engine to build.
    """

    def __init__(self, setup: Setup | VllmSetup) -> None:
        self._generator = setup.generator()
        self._tasks: dict[int, asyncio.Task[Sampled]] = {}

    async def started(self) -> tuple[dict[str, str], str, int]:
        """Wait until the actor can sample.

        Returns:
            Versions of the packages (`versions`), name of the machine, process id.

        Raises:
            UserError: as `VllmProcess.ready`.
        """
        if isinstance(self._generator, VllmOfActor):
            await asyncio.to_thread(self._generator.ready)
        return versions(), machine_name(), os.getpid()

    async def beat(self) -> None:
        """A sign of life."""

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Start requests together: arguments of `Generator.generate`, and a number `id`."""
        for request in requests:
            arguments = dict(request)
            number = arguments.pop("id")
            self._tasks[number] = asyncio.create_task(self._generator.generate(**arguments))

    async def result(self, number: int) -> Reply[Sampled]:
        """Wait for a request.

        Raises:
            ValueError: it can never run.
        """
        task = self._tasks[number]
        try:
            return self._reply(await asyncio.shield(task))
        finally:
            self._tasks.pop(number, None)

    async def abort(self, number: int) -> None:
        """End a request, and wait until the engine has freed what it held."""
        if task := self._tasks.pop(number, None):
            task.cancel()
            await asyncio.wait([task])

    async def score(self, tokens: Sequence[int], temperature: float) -> Reply[list[float]]:
        """As `Generator.score`."""
        return self._reply(await self._generator.score(tokens, temperature))

    async def stage(self, sealed: bytes, version: int) -> Reply[None]:
        """As `EngineGenerator.stage`, of the weights of `read_sealed`."""
        tensors = await asyncio.to_thread(read_sealed, sealed, version)
        await self._generator.stage(tensors, version)
        return self._reply(None)

    async def swap(self, version: int) -> Reply[int]:
        """As `EngineGenerator.swap`."""
        return self._reply(await self._generator.swap(version))

    def _reply(self, result: T) -> Reply[T]:
        return result, self._generator.activities()[0]
