"""Several samplers, each in a process of its own, behind one `Generator`.

All calls of a task go to the process that has its prompt in its cache. A process that ends or hangs
is replaced: the new one gets the weights of the last sync, and the calls of the old one are sampled
again there. Noise depends on the task, the sample and the position alone, so the tokens are those
that the lost process would have sampled from the same weights. A server is not started again: its
calls wait until it answers again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..rollout.generator import Activity, EngineLost, GeneratorClosed, Sampled, SampleKey
from ..rollout.thread_settings import in_thread
from ..types import SamplingParams

T = TypeVar("T")

REMEMBERED = 4096
"""Tasks whose process is remembered: those that were last asked for."""


Publish = Callable[[Mapping[str, Tensor], int], AbstractContextManager[Any]]
"""Makes weights of a version readable for all processes, until the block is left."""


class Sampler(Protocol):
    """A process that samples. It starts when it is made.

    Attributes:
        given: the published weights that it has. None before the first `swap`.
        activity: counters of its engine at its last reply. None: unknown.
    """

    given: Any
    activity: Activity | None

    def ready(self) -> None:
        """Wait until it can be asked.

        Raises:
            EngineLost: it has not started.
        """
        ...

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
        ...

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """As `Generator.score`."""
        ...

    async def stage(self, given: Any, version: int) -> None:
        """Read and check published weights, while requests run. `swap` puts them in force.

        Args:
            given: the published weights.
            version: their version.

        Raises:
            ValueError: if they are torn or altered or do not fit, or the version is not greater.
        """
        ...

    async def swap(self, version: int) -> int:
        """As `Generator.load`, of the staged weights. vLLM and servers read them only here."""
        ...

    def close(self) -> None:
        """End the process. Calls that are waiting raise GeneratorClosed."""
        ...


Start = Callable[[int], Sampler]
"""Starts the process with a number, without waiting for it."""


@dataclass(eq=False)
class Place:
    """Place of one process.

    Attributes:
        number: its number.
        process: the process that has it now.
        starting: the process that will have it, until that has the weights.
        calls: calls that are open.
        lock: held while the process is replaced or gets weights.
        ready: set unless the process is being replaced.
    """

    number: int
    process: Sampler
    starting: Sampler | None = None
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.ready.set()

    async def current(self) -> Sampler:
        """The process, once it is ready."""
        await self.ready.wait()
        return self.process


class Samplers:
    """Processes that sample from the same weights.

    Args:
        start: starts a process.
        publish: passes weights to all of them.
        count: number of processes.
        restarts: times that a process is replaced before its loss ends the run.
        say: gets a line about each replacement.
        limit: largest mean difference between the scores of two processes, in nats.
        setting: the setting that has `restarts`.
        shared: other ranks read the published weights too, which stay until `forget` is called.

    Attributes:
        version: version of the weights; -1 before the first `load`.
        replaced: number of processes that were replaced.
        places: the processes.

    Raises:
        EngineLost: if a process does not start.
    """

    def __init__(
        self,
        start: Start,
        publish: Publish,
        count: int,
        restarts: int,
        say: Callable[[str], None],
        limit: float = 0.0,
        setting: str = "placement.restarts",
        shared: bool = False,
    ) -> None:
        self.version = -1
        self.replaced = 0
        self._start = start
        self._publish = publish
        self._restarts = restarts
        self._say = say
        self._limit = limit
        self._setting = setting
        self._closed = False
        self._shared = shared
        self._weights = ExitStack()
        self._earlier = ExitStack()
        self._replacing = set[asyncio.Task[None]]()
        self._published: Any = None
        self._affine: OrderedDict[tuple[int, str], Place] = OrderedDict()
        with ExitStack() as on_failure:
            processes = [start(number) for number in range(count)]
            for process in processes:
                on_failure.callback(process.close)
            for process in processes:
                process.ready()
            on_failure.pop_all()
        self.places = [Place(number, process) for number, process in enumerate(processes)]

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """As `Generator.generate`.

        Raises:
            EngineLost: if processes were lost more often than they are replaced.
        """
        place = self._place((params.seed, key.name))
        place.calls += 1
        try:
            while True:
                process = await place.current()
                try:
                    sampled = await process.generate(
                        tokens, params, key, stops=stops, priority=priority
                    )
                    return replace(sampled, sampler=place.number)
                except GeneratorClosed as error:  # other calls of a lost server end with it
                    await self._replace(place, process, error)
        finally:
            place.calls -= 1

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """As `Generator.score`, asked of all processes.

        Raises:
            RuntimeError: if their numbers differ by more than the limit.
        """
        found = await asyncio.gather(*(self._score(p, tokens, temperature) for p in self.places))
        for place, other in zip(self.places, found, strict=True):
            gaps = [abs(a - b) for a, b in zip(other, found[0], strict=True)]
            if not sum(gaps) <= self._limit * len(gaps):
                raise RuntimeError(f"sampler {place.number} has other weights than sampler 0")
        return found[0]

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """As `Generator.load`, of weights with the names that the processes expect.

        No process uses them before all have read and checked them; vLLM and servers first check
        that the file is whole. They stay published until the next call: a process that replaces
        another reads them. Version 0 is accepted again, as in `EngineGenerator.load`.

        Raises:
            ValueError: if the tensors do not fit or were altered on the way, or the version is not
                greater. The old weights stay in use in all processes.
            UserError: if a server refuses them, or
            EngineLost: if vLLM does, more often than it is replaced. Other processes may have them
                then, as the versions of their tokens say. The run cannot go on.
        """
        if version < self.version or version == self.version != 0:
            raise ValueError(f"version = {version} must be greater than {self.version}")
        before = self._published, self.version
        with ExitStack() as kept:
            # In a thread: weights may be gathered from ranks that wait for an answer meanwhile.
            published = await in_thread(kept.enter_context, self._publish(weights, version))
            staged = await _all(self._stage(place, published, version) for place in self.places)
            self._published, self.version = published, version
            try:
                running = await _all(map(self._swap, self.places, staged))
            except BaseException:
                self._published, self.version = before
                raise
            self._earlier.callback(self._weights.close)
            self._weights = kept.pop_all()
            if not self._shared:
                self.forget()
        return sum(running)

    def forget(self) -> None:
        """Delete published weights that newer ones have replaced. All ranks have the newer ones."""
        self._earlier.close()

    def activities(self) -> list[Activity | None]:
        """Counters of each process at its last reply. None: it has not replied yet."""
        return [place.process.activity for place in self.places]

    async def sleep(self) -> None:
        """Does nothing: the processes keep their memory."""

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._closed = True
        for place in self.places:
            place.process.close()
            if place.starting:
                place.starting.close()
        self._earlier.close()
        self._weights.close()

    def _place(self, task: tuple[int, str]) -> Place:
        """The process of a task: that of its earlier calls, else the one with the fewest calls."""
        place = self._affine.pop(task, None) or min(self.places, key=lambda p: p.calls)
        self._affine[task] = place
        if len(self._affine) > REMEMBERED:
            self._affine.popitem(last=False)
        return place

    async def _score(self, place: Place, tokens: Sequence[int], temperature: float) -> list[float]:
        while True:
            process = await place.current()
            try:
                return await process.score(tokens, temperature)
            except GeneratorClosed as error:
                await self._replace(place, process, error)

    async def _stage(self, place: Place, published: Any, version: int) -> Sampler:
        """Stage weights in the process of a place, and return it."""
        while True:
            async with place.lock:
                process = place.process
                try:
                    await process.stage(published, version)
                    return process
                except GeneratorClosed as error:
                    lost = error
            await self._replace(place, process, lost)

    async def _swap(self, place: Place, staged: Sampler) -> int:
        """Put the published weights in force in a place. `staged`: the process that has them."""
        async with place.lock:
            process = place.process
            if process.given is self._published:  # it was replaced meanwhile
                return 0
            try:
                if process is not staged:
                    await process.stage(self._published, self.version)
                return await process.swap(self.version)
            except GeneratorClosed as error:
                lost = error
        await self._replace(place, process, lost)
        return 0

    async def _replace(self, place: Place, lost: Sampler, error: GeneratorClosed) -> None:
        """Start a new process in place of a lost one, unless that has been done.

        The work goes on if the call that asks for it is cancelled: others wait for the process.

        Raises:
            EngineLost: if it may not be replaced any more.
            GeneratorClosed: if the samplers have been closed.
        """
        if self._closed:
            raise error
        work = asyncio.create_task(self._replace_now(place, lost, error))
        self._replacing.add(work)
        work.add_done_callback(self._replacing.discard)
        await asyncio.shield(work)

    async def _replace_now(self, place: Place, lost: Sampler, error: GeneratorClosed) -> None:
        async with place.lock:
            if place.process is not lost:
                return
            place.ready.clear()
            try:
                while True:
                    if self.replaced == self._restarts:
                        raise EngineLost(
                            f"{error}\n{self.replaced} processes have been replaced, and"
                            f" {self._setting} = {self._restarts}. Continue with --resume"
                        )
                    self.replaced += 1
                    self._say(f"{error}\nIt is replaced, and its requests are sampled again")
                    try:
                        return await self._start_again(place)
                    except EngineLost as again:
                        error = again
            finally:
                place.ready.set()

    async def _start_again(self, place: Place) -> None:
        await asyncio.to_thread(place.process.close)
        if self._closed:
            raise GeneratorClosed("the samplers have been closed")
        place.starting = new = self._start(place.number)  # at once, so that `close` ends it
        try:
            await asyncio.to_thread(new.ready)
            # Read once: a load may publish others meanwhile. It then finds them missing here.
            published, version = self._published, self.version
            if published is not None:
                await new.stage(published, version)
                await new.swap(version)
        except BaseException:
            await asyncio.to_thread(new.close)
            raise
        place.process, place.starting = new, None


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines that run together. All have ended before the first error is raised."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
