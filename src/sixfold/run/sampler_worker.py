"""The program of a process that samples with the embedded engine (`processes/program.py`).

The first request is a pickled `Setup`; its answer is empty. Later messages are those of
`backends/generator_server.py`, with two more kinds of requests:

    stage     path (`backends/weight_files.py`), version: read new weights beside sampling
              -> nothing
    swap      version: put the staged weights in force between two steps of the engine
              -> running: number of running sequences that go on with the new weights

An error ends the process. An engine that hangs longer than its deadline raises.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.generator_server import GeneratorServer, Kinds
from ..backends.weight_deltas import SealedReader
from ..engine.speculative import Speculation
from ..model.causal_lm import CausalLM
from ..model.empty import Architecture, copy_buffers
from ..processes.deadline import Deadline
from ..processes.program import Requests
from ..recipe.schema import EngineConfig
from ..renderer.renderer import Renderer
from ..rollout.engine_generator import EngineGenerator
from .embedded import embedded_engine


@dataclass(frozen=True)
class Setup:
    """The engine to build.

    Attributes:
        architecture: of the policy.
        buffers: the policy's buffers by name.
        dtypes: dtype of each parameter of the policy.
        device: device of the engine.
        threads: CPU threads.
        engine: settings of the engine.
        kv_tokens: tokens that its KV cache holds.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        speculation: speculative decoding, without a draft model.
        renderer: decodes completions to find stop strings.
        silence_s: longest silence of the engine while a request runs, in seconds.
    """

    architecture: Architecture
    buffers: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    device: str
    threads: int
    engine: EngineConfig
    kv_tokens: int
    autocast: torch.dtype | None
    speculation: Speculation | None
    renderer: Renderer
    silence_s: float

    def generator(self) -> EngineGenerator:
        """Build the engine with random weights, and its generator."""
        torch.set_num_threads(self.threads)
        model = self.architecture.build("placement.kind = 'local'")
        copy_buffers(model, self.buffers)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name])
        body = CausalLM(model)
        if self.autocast and self.device != "cpu":  # kernels of the CPU read float32
            body.keep_only(self.autocast)
        model.to(self.device)  # type: ignore[arg-type]
        engine = embedded_engine(body, self.engine, self.kv_tokens, self.autocast, self.speculation)
        return EngineGenerator(
            engine, self.renderer, deadline=Deadline("the engine", self.silence_s)
        )


class Weights:
    """Requests for new weights.

    Args:
        generator: gets them.
    """

    def __init__(self, generator: EngineGenerator) -> None:
        self._generator = generator
        self._reader = SealedReader()

    async def stage(self, path: str, version: int) -> dict[str, Any]:
        """As `EngineGenerator.stage`, of a file."""
        tensors = await asyncio.to_thread(self._reader.read, path, version)
        await self._generator.stage(tensors, version)
        return {}

    async def swap(self, version: int) -> dict[str, Any]:
        """As `EngineGenerator.swap`."""
        return {"running": await self._generator.swap(version)}


def serve(requests: Requests) -> None:
    """Answer requests until the parent closes its end."""
    generator = pickle.loads(next(requests)).generator()
    requests.answer()

    async def run() -> None:
        weights = Weights(generator)
        kinds: Kinds = {"stage": weights.stage, "swap": weights.swap}
        await GeneratorServer(requests, generator, lambda: generator.activities()[0], kinds).run()

    asyncio.run(run())
    os._exit(0)  # nothing to flush, and an interpreter with torch takes a second to shut down
