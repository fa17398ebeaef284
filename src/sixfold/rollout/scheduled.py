"""A generator that samples every token of some trajectories from a version of the weights that is
given in advance: the replay of an asynchronous run.

A call waits until the weights have the version of its first token. The engine holds a sequence
whose next token needs a later version, and `load` waits until every token of the old version is
sampled. So it does not matter when calls, weights and steps of the engine arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..engine.engine import Engine
from ..errors import RunFailed
from ..types import SamplingParams
from .engine_generator import EngineGenerator
from .generator import Activity, Sampled, SampleKey

POLL_S = 0.002

TrajectoryName = tuple[int, str, int]
"""Seed of the step, task id, sample."""


class ReplayDiverged(RunFailed):
    """A replay samples other tokens than the recorded run."""


def diverged(task: str, sample: int) -> ReplayDiverged:
    """The error of a trajectory that is not the recorded one."""
    return ReplayDiverged(
        f"the replay of task {task}, sample {sample}, differs from the recorded run: the recipe,"
        " the environment, the packages or the machine are others"
    )


@dataclass
class _Part:
    """Sampled tokens of one trajectory.

    Attributes:
        versions: version of each.
        done: tokens of the replies that have ended.
    """

    versions: Sequence[int]
    done: int = 0

    def before(self, version: int) -> int:
        """Number of tokens of earlier versions."""
        return next((i for i, v in enumerate(self.versions) if v >= version), len(self.versions))


class ScheduledGenerator:
    """Generator on an `EngineGenerator`. Calls for other trajectories pass through.

    Args:
        inner: samples.

    Attributes:
        failure: set by the caller when a trajectory has failed or differs. `load` raises it then,
            instead of waiting for tokens that do not come.
    """

    def __init__(self, inner: EngineGenerator) -> None:
        self._inner = inner
        self._parts: dict[TrajectoryName, _Part] = {}
        self.failure: Exception | None = None
        self._loaded = asyncio.Event()

    @property
    def version(self) -> int:
        return self._inner.version

    def follow(self, versions: Mapping[TrajectoryName, Sequence[int]]) -> None:
        """Replay trajectories.

        Args:
            versions: for each trajectory, the weight version that sampled each of its tokens.
        """
        self._parts = {key: _Part(own) for key, own in versions.items()}

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
            ReplayDiverged: if a trajectory gets other tokens than the recorded one.
        """
        name = (params.seed, key.name, key.sample)
        part = self._parts.get(name)
        due = () if part is None else part.versions[part.done :]
        while due and self.version < due[0]:
            self._loaded.clear()
            await self._loaded.wait()
        sampled = await self._inner.generate(
            tokens, params, key, stops=stops, priority=priority, due=due
        )
        if part is not None:
            if sampled.version != list(due[: len(sampled.version)]):
                raise diverged(key.name, key.sample)
            part.done += len(sampled.tokens)
        return sampled

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        return await self._inner.score(tokens, temperature)

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """As `Generator.load`, once every token of earlier versions is sampled."""
        while not await self._ready(version):
            if self.failure:
                raise self.failure
            await asyncio.sleep(POLL_S)
        running = await self._inner.load(weights, version)
        self._loaded.set()
        return running

    def activities(self) -> list[Activity]:
        """As `EngineGenerator.activities`."""
        return self._inner.activities()

    async def sleep(self) -> None:
        """Does nothing: sampling goes on."""

    def close(self) -> None:
        self._inner.close()

    async def _ready(self, version: int) -> bool:
        waited = {
            name: part for name, part in self._parts.items() if part.done < part.before(version)
        }
        if not waited:
            return True
        held = await self._inner.call(lambda engine: _held(engine, version))
        return waited.keys() <= held


def _held(engine: Engine, version: int) -> set[TrajectoryName]:
    """Trajectories whose sequence waits for this version, or a later one."""
    return {
        (s.request.params.seed, s.request.key, s.sample)
        for s in engine.scheduler.running
        if s.needs >= version
    }
