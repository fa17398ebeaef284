"""A Ray actor that samples with the embedded engine. `backends/ray_sampler.py` asks it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from safetensors.torch import load

import sixfold

from ..rollout.generator import Sampled
from .sampler_worker import Setup


def versions() -> dict[str, str]:
    """Versions that must be equal wherever the tokens of a run are sampled."""
    return {"sixfold": sixfold.__version__, "torch": torch.__version__.partition("+")[0]}


class SamplerActor:
    """Samples. Its methods run in one event loop.

    Args:
        setup: the engine to build.
    """

    def __init__(self, setup: Setup) -> None:
        self._generator = setup.generator()
        self._tasks: dict[int, asyncio.Task[Sampled]] = {}

    async def versions(self) -> dict[str, str]:
        """As `versions`, here."""
        return versions()

    async def pid(self) -> int:
        """Process that this actor is."""
        return os.getpid()

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Start requests together: arguments of `Generator.generate`, and a number `id`."""
        for request in requests:
            arguments = dict(request)
            number = arguments.pop("id")
            self._tasks[number] = asyncio.create_task(self._generator.generate(**arguments))

    async def result(self, number: int) -> Sampled:
        """Wait for a request.

        Raises:
            ValueError: it can never run.
        """
        task = self._tasks[number]
        try:
            return await asyncio.shield(task)
        finally:
            self._tasks.pop(number, None)

    async def abort(self, number: int) -> None:
        """End a request, and wait until the engine has freed what it held."""
        if task := self._tasks.pop(number, None):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def score(self, tokens: Sequence[int], temperature: float) -> list[float]:
        """As `Generator.score`."""
        return await self._generator.score(tokens, temperature)

    async def load(self, weights: bytes, version: int) -> int:
        """As `Generator.load`, of the bytes of a safetensors file."""
        return await self._generator.load(load(weights), version)
