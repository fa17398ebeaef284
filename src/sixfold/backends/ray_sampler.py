"""Samplers that are actors of a Ray cluster. Ray starts them, passes what they exchange, and finds
those that have died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from ..engine.weight_stages import stage
from ..errors import UserError, one_line
from ..processes.child import last_lines
from ..rollout.generator import Activity, EngineLost, GeneratorClosed, Sampled, SampleKey
from ..types import SamplingParams
from .ray_head import machine_name
from .weight_files import sealed_bytes


@contextmanager
def stored_weights(
    weights: Mapping[str, Tensor],
    version: int,
    dtype: torch.dtype = torch.float32,
    every_name: bool = False,
) -> Iterator[Any]:
    """Reference to the weights in the object store: the bytes of `sealed_bytes`."""
    sealed = sealed_bytes(weights, version, dtype, every_name)
    with stage("broadcast"):
        try:
            reference = ray.put(sealed)
        except RayError as error:
            raise UserError(
                f"Ray's object store does not take the {len(sealed)} bytes of the weights. Start"
                f" the cluster with a larger --object-store-memory. {one_line(error)}"
            ) from error
    yield reference


class RaySampler:
    """An actor that samples (`run/sampler_actor.py`). See `Sampler`.

    Args:
        number: its number, for messages.
        start: starts the actor.
        versions: versions that it must have.
        silence_s: longest time without an answer, in seconds.
        start_s: longest time for its start, in seconds.

    Attributes:
        given: reference to its weights. None before the first `swap`.
        activity: as `Sampler.activity`. None on another machine, whose clock is another.
        actor: the actor.
        pid: its process.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[], Any],
        versions: Mapping[str, str],
        silence_s: float,
        start_s: float,
    ) -> None:
        self.given: Any = None
        self.activity: Activity | None = None
        self.pid = 0
        self.actor = start()
        self._staged: Any = None
        self._name = f"sampler {number}"
        self._versions = versions
        self._silence_s = silence_s
        self._start_s = start_s
        self._numbers = count()
        self._made: list[dict[str, Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: asyncio.Task[None] | None = None
        self._lost: str | None = None
        self._closed = False
        self._here = True

    def ready(self) -> None:
        """Wait until the engine is built.

        Raises:
            EngineLost: it was not.
            UserError: the node has other versions of the packages, or lacks one.
        """
        try:
            reply = ray.get(self.actor.started.remote(), timeout=self._start_s)
        except GetTimeoutError as error:
            raise EngineLost(f"{self._name} has not started within {self._start_s:g} s") from error
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if isinstance(cause, UserError) and not isinstance(cause, EngineLost):
                raise UserError(f"{self._name}: {cause}") from error
            raise self._told(error) from error
        found, machine, self.pid = reply
        self._here = machine == machine_name()
        if found != self._versions:
            raise UserError(
                f"the node of {self._name} has {found}, but this one {dict(self._versions)}: tokens"
                " would differ. Install the same versions on all nodes"
            )

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """As `Generator.generate`. Calls of one iteration of the event loop arrive together."""
        number = next(self._numbers)
        request = {
            "id": number,
            "tokens": list(tokens),
            "params": params,
            "key": key,
            "stops": tuple(stops),
            "priority": priority,
        }
        loop = asyncio.get_running_loop()
        if not self._made or self._loop is not loop:  # an earlier event loop may have ended
            self._made, self._loop = [], loop
            self._sent = loop.create_task(self._submit())
        self._made.append(request)
        sent = self._sent
        assert sent is not None
        try:
            await asyncio.shield(sent)
            sampled: Sampled = await self._result(self.actor.result.remote(number))
            return sampled if self._here else replace(sampled, started=0.0)
        except asyncio.CancelledError:
            with suppress(GeneratorClosed):
                await sent
                await self._answer(self.actor.abort.remote(number))
            raise

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return list(await self._result(self.actor.score.remote(list(tokens), temperature)))

    async def stage(self, given: Any, version: int) -> None:
        await self._result(self.actor.stage.remote(given, version))
        self._staged = given

    async def swap(self, version: int) -> int:
        running: int = await self._result(self.actor.swap.remote(version))
        self.given = self._staged
        return running

    def close(self) -> None:
        """End the actor. Calls that are waiting raise GeneratorClosed."""
        self._closed = True
        with suppress(RayError):  # the cluster may be gone
            ray.kill(self.actor)

    async def _submit(self) -> None:
        """Start the requests of this iteration. Ray may run later calls of an actor first."""
        made, self._made = self._made, []
        await self._answer(self.actor.submit.remote(made))

    async def _result(self, reference: Awaitable[Any]) -> Any:
        """Wait for a reply, keep the counters of the engine in it, and return the result in it."""
        result, activity = await self._answer(reference)
        self.activity = activity if self._here else None
        return result

    async def _answer(self, reference: Awaitable[Any]) -> Any:
        reply = asyncio.ensure_future(reference)
        try:
            while not (await asyncio.wait([reply], timeout=self._silence_s))[0]:
                await self._check_alive()
            return reply.result()
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
                raise ValueError(str(error.cause)) from error  # of this request alone
            if self._closed and self._lost is None:
                raise GeneratorClosed(f"{self._name} has been closed") from error
            raise self._told(error) from error

    async def _check_alive(self) -> None:
        """Ray finds actors that have died, but not one that hangs.

        Raises:
            EngineLost: it does not answer.
        """
        try:
            await asyncio.wait_for(asyncio.ensure_future(self.actor.beat.remote()), self._silence_s)
        except TimeoutError as error:
            self._lost = f"{self._name} has given no sign of life for {self._silence_s:g} s"
            raise EngineLost(self._lost) from error

    def _told(self, error: RayError) -> EngineLost:
        """Error that names the first failure of this actor. Later ones follow from it."""
        if self._lost is None:
            self._lost = f"{self._name} failed:\n{last_lines(str(error))}"
            if isinstance(error, RayActorError):  # the last line of it says why, then what may be
                why = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
                self._lost = f"{self._name} has died. {why}"
        return EngineLost(self._lost)
