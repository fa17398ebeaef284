"""Generator on the embedded engine, which runs in its own thread in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from ..engine.engine import Engine
from ..engine.weights import Staged
from ..processes.deadline import Deadline
from ..renderer.renderer import Renderer
from ..types import SamplingParams
from .engine_guard import EngineGuard
from .engine_job import Delta, Job
from .engine_thread import EngineThread, QueueFull, check_newer, load_newer
from .generator import Activity, GeneratorClosed, Sampled, SampleKey
from .thread_settings import release_workers

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    """One call of `generate`.

    Attributes:
        tokens: token ids to continue.
        params: sampling parameters.
        key: names the noise.
        stops: stop strings.
        priority: larger values are served first.
        result: set when the completion has ended.
        due: weight version that must sample each token. Empty: the current one.
        job: the job that samples it, once it is submitted.
        choice: index of the choice in the job.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    key: SampleKey
    stops: tuple[str, ...]
    priority: int
    result: asyncio.Future[Sampled]
    due: Sequence[int] = ()
    job: Job | None = None
    choice: int = 0

    @property
    def shared(self) -> tuple[object, ...]:
        """Equal for calls that can be samples of one engine request."""
        return (
            self.key.name,
            self.key.origin,
            self.params,
            self.stops,
            self.priority,
            self.tokens,
        )


class EngineGenerator:
    """Generator on an `Engine` in this process. See the contract, `Generator`.

    Calls made in the same iteration of the event loop reach the engine together, in the order of
    the calls. Those that differ only in the sample index become one request of the engine. So the
    prompt is computed once, and the engine's work does not depend on timing.

    The engine keeps its prefix cache from call to call. If weights change other than by `load` or
    `Engine.set_version`, call `Engine.restart` (through `call`) before the next request.

    While no call is in progress, the owner of the engine may use the engine directly. A cancelled
    call ends when the engine has freed what it held for it.

    Args:
        engine: the engine.
        renderer: decodes completions for stop strings. The generator makes a copy. None: stop
            strings are refused.
        release_kv: free the memory of the KV cache between rollouts (`sleep`).
        deadline: longest silence of the engine while a call waits for it. None: no limit.
        thread: the engine's thread, if others use it too; its owner closes it, and calls raise
            QueueFull if its queue is full. None: a thread of this generator.
        adapter: name of the LoRA adapter that samples, or None for the base model.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer | None = None,
        release_kv: bool = False,
        deadline: Deadline | None = None,
        *,
        thread: EngineThread | None = None,
        adapter: str | None = None,
    ) -> None:
        self.engine = engine
        self.release_kv = release_kv
        self._decodes = renderer is not None
        self._thread = thread or EngineThread(engine, renderer.copy() if renderer else None)
        self._adapter = adapter
        self._calls: list[_Call] = []
        self._guard = EngineGuard(self._thread.pulse, deadline)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made = time.perf_counter()
        self._loaded = 0.0, 0.0
        self._staged: tuple[int, Staged] | None = None

    def activities(self) -> list[Activity]:
        """The counters of the engine."""
        now, thread = time.perf_counter(), self._thread
        tokens = self.engine.stats.decoded_tokens
        return [Activity(self._made, now, thread.busy.seconds(now), tokens, self._loaded)]

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
        due: Sequence[int] = (),
    ) -> Sampled:
        """As `Generator.generate`.

        Args:
            tokens: as there, as are `params`, `key`, `stops` and `priority`.
            due: weight version that must sample each token (`Engine.add`). Empty: the current one.
        """
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens = {params.max_tokens} must be at least 1")
        if stops and not self._decodes:
            raise ValueError(f"stops = {list(stops)} need a generator with a renderer")
        loop = asyncio.get_running_loop()
        call = _Call(tuple(tokens), params, key, tuple(stops), priority, loop.create_future())
        call.due = due
        if self._loop is not loop:  # calls that an earlier event loop left behind
            self._loop, self._calls = loop, []
        if not self._calls:
            release_workers()
            loop.call_soon(self._submit_all)
        self._calls.append(call)
        try:
            return await self._guard.answer(call.result)
        except asyncio.CancelledError:
            if call.job is not None:
                await self._guard.outcome(self._thread.abort(call.job, call.choice))
            raise

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive(message: Delta | Exception) -> None:
            if done.done():
                return
            if isinstance(message, Exception):
                done.set_exception(message)
            else:
                done.set_result(None)

        params = SamplingParams(max_tokens=0, temperature=temperature)
        job = Job(["score"], [list(tokens)], params, [0], receive, scored=True)
        self._thread.submit(job)
        try:
            await self._guard.answer(done)
        except asyncio.CancelledError:
            await self._guard.outcome(self._thread.abort(job))
            raise
        return job.scores[0].logp

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Replace all weights, between two engine steps. See `Generator.load`.

        Version 0 is accepted again while no request runs: before the first step of RL, weights
        change without a new version.

        Raises:
            ValueError: if the tensors do not fit, or the version is not greater. The old weights
                stay in use.
        """

        def load(engine: Engine) -> int:
            began = time.perf_counter()
            if version == engine.version == 0 and not engine.busy:
                engine.load_weights(weights, version)
            else:
                load_newer(weights, version, engine)
            self._loaded = began, time.perf_counter()
            return len(engine.scheduler.running)

        return await self.call(load)

    async def stage(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Check new weights in another thread, beside the engine. `swap` puts them in force.

        Args:
            weights: tensors on the host, as for `load`. They must not change until the swap.
            version: their version, as for `load`.

        Raises:
            ValueError: as `load` does.
        """
        self._staged = None
        if version or self.engine.version:
            check_newer(version, self.engine)
        self._staged = version, await asyncio.to_thread(self.engine.weights.stage, weights)

    async def swap(self, version: int) -> int:
        """Overwrite the weights with the staged ones, between two engine steps.

        Returns:
            Number of running sequences that continue with the new weights.

        Raises:
            ValueError: if the staged weights have another version, or there are none.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged[0] != version:
            raise ValueError(f"weights of version {version} have not been staged")

        def swap(engine: Engine) -> int:
            began = time.perf_counter()
            engine.swap_weights(staged[1], version)
            self._loaded = began, time.perf_counter()
            return len(engine.scheduler.running)

        return await self.call(swap)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` in the engine's thread between two steps.

        Returns:
            The function's result.
        """
        return await self._guard.outcome(self._thread.call(function))

    async def sleep(self) -> None:
        """Free the memory of the KV cache until the next call, if `release_kv` is set."""
        await self.call(self._rest)

    def _rest(self, engine: Engine) -> None:
        if self.release_kv:
            engine.release_memory()
        release_workers()

    def close(self) -> None:
        """End the engine's thread. Calls that are waiting raise GeneratorClosed.

        This does not wait for an engine that has missed its deadline.
        """
        self._thread.close(self._guard.left)

    def _submit_all(self) -> None:
        calls, self._calls = self._calls, []
        groups: dict[tuple[object, ...], dict[int, _Call]] = {}
        requests: list[list[_Call]] = []
        for call in calls:
            if call.result.cancelled():
                continue
            group = groups.setdefault(call.shared, {})
            if group.setdefault(call.key.sample, call) is not call:
                requests.append([call])  # the same key twice
        requests += [[*group.values()] for group in groups.values()]
        try:
            # In one command: otherwise the engine could make a step after the first of them.
            self._thread.submit(*(_job(request, self._adapter) for request in requests))
        except (GeneratorClosed, QueueFull) as error:
            for request in requests:
                _receive(request, error)


def _job(calls: Sequence[_Call], adapter: str | None) -> Job:
    """Job with calls as the samples of one request.

    Args:
        calls: the calls.
        adapter: name of the LoRA adapter that samples, or None.
    """
    first = calls[0]
    job = Job(
        [first.key.name],
        [list(first.tokens)],
        first.params,
        [call.key.sample for call in calls],
        partial(_receive, calls),
        first.stops,
        origin=first.key.origin,
        adapter=adapter,
        priority=first.priority,
        due={call.key.sample: call.due for call in calls if call.due},
    )
    for choice, call in enumerate(calls):
        call.job, call.choice = job, choice
    return job


def _receive(calls: Sequence[_Call], message: Delta | Exception) -> None:
    if isinstance(message, Exception):
        for call in calls:
            if not call.result.done():
                call.result.set_exception(message)
        return
    result = calls[message.index].result
    if not result.done():
        result.set_result(_to_sampled(message))


def _to_sampled(delta: Delta) -> Sampled:
    sequence, reason = delta.sequence, delta.finish_reason
    if sequence is None or reason is None:
        raise RuntimeError("the engine's thread returned an unfinished sequence")
    return Sampled(
        sequence.tokens[len(sequence.request.prompt) :],
        sequence.logp,
        sequence.version,
        reason,
        sequence.reused,
        sequence.seconds,
        sequence.kept or None,
        delta.text if delta.stopped else None,
        delta.peers,
        sequence.routes,
        sequence.started,
    )
