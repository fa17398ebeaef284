"""Samplers that are actors of a Ray cluster. Ray starts them, passes what they exchange, and finds
those that have died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from safetensors.torch import save
from torch import Tensor

from ..engine.weight_stages import stage
from ..errors import UserError, one_line
from ..processes.child import Child, ChildError, last_lines
from ..rollout.generator import Activity, EngineLost, GeneratorClosed, Sampled, SampleKey
from ..types import SamplingParams
from .ray_head import forget_token, machine_name, private_cluster
from .weight_files import prepare_for_file

_REACH_S = 10.0
_CONCURRENT = 1 << 20
"""Calls that an actor may run at once: more than can be open."""


@dataclass(frozen=True)
class Reserved:
    """Resources of a Ray cluster, one bundle for each sampler.

    Attributes:
        group: the placement group.
        cpus: CPUs of a sampler.
        gpus: its GPUs.
    """

    group: Any
    cpus: int
    gpus: int

    def start(self, actor: type, number: int, *arguments: object) -> Any:
        """Start an actor in a bundle, without waiting for it."""
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
        resources = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        made: Any = ray.remote(actor)
        return made.options(
            **resources, max_concurrency=_CONCURRENT, scheduling_strategy=place
        ).remote(*arguments)


@contextmanager
def reserved(
    address: str, samplers: int, cpus: int, gpus: int, wait_s: float
) -> Iterator[Reserved]:
    """Connect to a Ray cluster and reserve a bundle for each sampler, until the block is left.

    Args:
        address: the cluster. Empty: a new one on this machine, which ends with the block. A program
            that is connected to a cluster already stays so.
        samplers: number of bundles.
        cpus: CPUs of each.
        gpus: GPUs of each.
        wait_s: longest time to wait for resources that others use, in seconds.

    Raises:
        UserError: if there is no such cluster, or it has too few resources.
    """
    with connected(address, samplers * cpus, wait_s):
        _check_size(ray.cluster_resources(), {"CPU": samplers * cpus, "GPU": samplers * gpus})
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        group = placement_group([bundle] * samplers)
        try:
            if not group.wait(wait_s):
                raise UserError(
                    f"the Ray cluster has not given {samplers} samplers their resources within"
                    f" {wait_s:g} s ({bundle} each): others use them, or no node has as many. Lower"
                    " placement.samplers or placement.threads"
                )
            yield Reserved(group, cpus, gpus)
        finally:
            remove_placement_group(group)


@contextmanager
def connected(address: str, cpus: int, wait_s: float) -> Iterator[None]:
    """Connect to a cluster, or to a new one on this machine, until the block is left."""
    if ray.is_initialized():
        yield
        return
    with ExitStack() as ending:
        try:
            _reach(address)
            ending.callback(lambda: None if address else forget_token())
            with nullcontext() if address else private_cluster():
                found = address or ending.enter_context(_new_cluster(cpus, wait_s))
                ray.init(address=found, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            # RuntimeError: also a cluster of another version of Ray or Python
            why = str(error).strip().replace("\n", " ")
            raise UserError(
                f"placement.address = {address!r}: {why}. Start a cluster with `ray start --head`,"
                " or leave the address empty: the run starts one on this machine"
            ) from error
        ending.callback(ray.shutdown)
        yield


def _reach(address: str) -> None:
    """Check that somebody listens at an address. Ray itself would try for minutes.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), _REACH_S).close()


@contextmanager
def _new_cluster(cpus: int, wait_s: float) -> Iterator[str]:
    """Address of a new cluster on this machine, which ends with the block or this process."""
    # Paths of sockets are limited to about 100 characters.
    files = TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with files as folder:
        head = Child("sixfold.backends.ray_head", keeps_output=True)
        try:
            head.send(json.dumps({"cpus": cpus, "folder": folder}).encode(), wait_s)
            address = head.receive(wait_s).decode()
        except ChildError as error:
            words = head.last_words()
            head.close(grace_s=0.0)
            raise UserError(
                f"placement.kind = 'ray': no cluster started on this machine. The process {error}."
                f" Its last output:\n{words}"
            ) from error
        try:
            yield address
        finally:
            head.close()


def _check_size(has: Mapping[str, float], needed: Mapping[str, int]) -> None:
    for what, amount in needed.items():
        if amount > (there := has.get(what, 0)):
            raise UserError(
                f"the samplers need {amount} {what}s, and the Ray cluster has {there:g}. Lower"
                " placement.samplers or placement.threads, or add a node"
            )


@contextmanager
def stored_weights(weights: Mapping[str, Tensor]) -> Iterator[Any]:
    """Reference to the weights in the object store: the bytes of a safetensors file in float32."""
    own, _ = prepare_for_file(weights, torch.float32)
    size = sum(tensor.nbytes for tensor in own.values())
    with stage("broadcast", size):
        try:
            reference = ray.put(save(own))
        except RayError as error:
            raise UserError(
                f"Ray's object store does not take the {size} bytes of the weights. Start the"
                f" cluster with a larger --object-store-memory. {one_line(error)}"
            ) from error
    yield reference


class RaySampler:
    """An actor that samples (`run/sampler_actor.py`). See `Sampler`.

    Args:
        number: its number, for messages.
        start: starts the actor.
        versions: versions that it must have.
        silence_s: longest time for its start, in seconds.

    Attributes:
        given: reference to its weights. None before the first `load`.
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
    ) -> None:
        self.given: Any = None
        self.activity: Activity | None = None
        self.pid = 0
        self.actor = start()
        self._name = f"sampler {number}"
        self._versions = versions
        self._silence_s = silence_s
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
            UserError: the node has other versions of the packages.
        """
        try:
            reply = ray.get(self.actor.started.remote(), timeout=self._silence_s)
        except GetTimeoutError as error:
            raise EngineLost(
                f"{self._name} has not started within {self._silence_s:g} s"
            ) from error
        except RayError as error:
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

    async def load_published(self, given: Any, version: int) -> int:
        """As `Generator.load`, of weights in the object store."""
        running: int = await self._result(self.actor.load.remote(given, version))
        self.given = given
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
