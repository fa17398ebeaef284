"""The program of a process that samples with the embedded engine (`processes/program.py`).

The first request is a pickled `Setup`; its answer is empty. Every later message is a pickled list
of requests, tables with a number `id` and a key "do". They run together. A reply has the same `id`,
and the counters of the engine as `activity` (`rollout/generator.py`):

    generate  tokens [id], params, key, stops, priority
              -> sampled (`rollout/generator.py`)
    score     tokens [id], temperature
              -> logp of all tokens but the first
    stage     path (`backends/weight_files.py`), version: read new weights beside sampling
              -> nothing
    swap      version: put the staged weights in force between two steps of the engine
              -> running: number of running sequences that go on with the new weights
    abort     ends the request with this number, if it still runs
              -> aborted: true

A request that can never run is answered with `refused`: the reason. Any other exception ends the
process. Empty notes are heartbeats: the event loop sends them, and an engine that hangs longer than
its deadline raises.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

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

BEAT_S = 1.0


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


class Server:
    """Answers requests in one event loop.

    Args:
        requests: where replies go.
        generator: samples.
    """

    def __init__(self, requests: Requests, generator: EngineGenerator) -> None:
        self._requests = requests
        self._generator = generator
        self._reader = SealedReader()
        self._kinds: dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]] = {
            "generate": self._generate,
            "score": self._score,
            "stage": self._stage,
            "swap": self._swap,
        }
        self._tasks: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the parent closes its end.

        Raises:
            Exception: of a request that should have run.
        """
        threading.Thread(target=self._receive, daemon=True).start()
        while not self._failed.done():
            self._requests.note()
            await asyncio.wait([self._failed], timeout=BEAT_S)
        self._failed.result()

    def _receive(self) -> None:
        """Read requests, in a thread: otherwise the parent would wait for the engine."""
        loop = self._failed.get_loop()
        try:
            for body in self._requests:
                loop.call_soon_threadsafe(self._take, pickle.loads(body))
        except Exception as error:  # noqa: BLE001  ends the process, and the parent hears why
            loop.call_soon_threadsafe(self._end, error)
        else:
            loop.call_soon_threadsafe(self._end)

    def _end(self, error: Exception | None = None) -> None:
        if self._failed.done():
            return
        if error:
            self._failed.set_exception(error)
        else:
            self._failed.set_result(None)

    def _take(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            number, do = request.pop("id"), request.pop("do")
            if do == "abort":
                self._abort(number)
                continue
            task = asyncio.create_task(self._kinds[do](**request))
            self._tasks[number] = task
            task.add_done_callback(partial(self._answer, number))

    def _abort(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is None:
            self._reply(number, aborted=True)
        else:
            task.cancel()  # if it has just ended, its answer is on its way

    def _answer(self, number: int, task: asyncio.Task[dict[str, Any]]) -> None:
        del self._tasks[number]
        if task.cancelled():
            self._reply(number, aborted=True)
        elif (error := task.exception()) is None:
            self._reply(number, **task.result())
        elif isinstance(error, ValueError):  # of this request alone
            self._reply(number, refused=str(error))
        elif isinstance(error, Exception):
            self._end(error)

    def _reply(self, number: int, **reply: Any) -> None:
        (activity,) = self._generator.activities()
        told = {"id": number, "last": True, "activity": activity}
        self._requests.note(pickle.dumps(told | reply))

    async def _generate(self, **request: Any) -> dict[str, Any]:
        return {"sampled": await self._generator.generate(**request)}

    async def _score(self, tokens: list[int], temperature: float) -> dict[str, Any]:
        return {"logp": await self._generator.score(tokens, temperature)}

    async def _stage(self, path: str, version: int) -> dict[str, Any]:
        tensors = await asyncio.to_thread(self._reader.read, path, version)
        await self._generator.stage(tensors, version)
        return {}

    async def _swap(self, version: int) -> dict[str, Any]:
        return {"running": await self._generator.swap(version)}


def serve(requests: Requests) -> None:
    """Answer requests until the parent closes its end."""
    generator = pickle.loads(next(requests)).generator()
    requests.answer()

    async def run() -> None:
        await Server(requests, generator).run()

    asyncio.run(run())
    os._exit(0)  # nothing to flush, and an interpreter with torch takes a second to shut down
