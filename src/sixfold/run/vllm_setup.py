"""vLLM that a Ray actor starts and asks (`sampler_actor.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..backends.vllm_process import VllmProcess
from ..backends.weight_files import weights_folder
from ..renderer.renderer import Renderer
from ..rollout.generator import Activity
from ..rollout.thread_settings import in_thread


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
    """A vLLM process with the methods that the actor needs of an `EngineGenerator`.

    Attributes:
        ready, generate, score: methods of the process.
    """

    def __init__(self, process: VllmProcess, dtype: torch.dtype) -> None:
        self.ready, self.generate, self.score = process.ready, process.generate, process.score
        self._process = process
        self._dtype = dtype
        self._staged: Mapping[str, Tensor] = {}

    async def stage(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As `EngineGenerator.stage`: keep them until the swap."""
        self._staged = weights

    async def swap(self, version: int) -> int:
        """As `EngineGenerator.swap`. vLLM samples until the weights are in a folder."""
        weights, self._staged = self._staged, {}
        with ExitStack() as folder:
            given = weights_folder(weights, version, self._dtype, in_memory=True)
            await self._process.stage(await in_thread(folder.enter_context, given), version)
            return await self._process.swap(version)

    def activities(self) -> list[Activity | None]:
        """None: vLLM reports no counters."""
        return [None]
