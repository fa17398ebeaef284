"""vLLM that a Ray actor starts and asks (`sampler_actor.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..backends.vllm_process import VllmProcess
from ..backends.weight_files import weights_folder
from ..renderer.renderer import Renderer
from ..rollout.generator import Activity, Sampled, SampleKey
from ..rollout.thread_settings import in_thread
from ..types import SamplingParams


@dataclass(frozen=True)
class VllmSetup:
    """The vLLM process to start, with the arguments of `VllmProcess`."""

    config: PreTrainedConfig
    dtype: torch.dtype
    engine: Mapping[str, Any]
    renderer: Renderer
    python: str
    threads: int

    def generator(self) -> VllmOfActor:
        """Start the process. It sees the GPUs that Ray has given to the actor."""
        settings = self.config, self.dtype, self.engine, self.renderer, self.python, self.threads
        return VllmOfActor(VllmProcess(*settings), self.dtype)


class VllmOfActor:
    """A vLLM process with the methods that the actor needs of an `EngineGenerator`."""

    def __init__(self, process: VllmProcess, dtype: torch.dtype) -> None:
        self._process = process
        self._dtype = dtype
        self._staged: Mapping[str, Tensor] = {}

    def ready(self) -> None:
        """As `VllmProcess.ready`."""
        self._process.ready()

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        return await self._process.generate(tokens, params, key, stops=stops, priority=priority)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return await self._process.score(tokens, temperature)

    async def stage(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As `EngineGenerator.stage`: keep them until the swap."""
        self._staged = weights

    async def swap(self, version: int) -> int:
        """As `EngineGenerator.swap`. vLLM samples on while they are written to a folder."""
        weights, self._staged = self._staged, {}
        with ExitStack() as folder:
            given = weights_folder(weights, version, self._dtype, in_memory=True)
            await self._process.stage(await in_thread(folder.enter_context, given), version)
            return await self._process.swap(version)

    def activities(self) -> list[Activity | None]:
        """None: vLLM reports no counters."""
        return [None]
