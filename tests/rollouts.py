"""Sample groups through the driver from ordinary code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sixfold.engine.engine import Engine
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Generator
from sixfold.rollout.player import Limits, Player
from sixfold.types import Group, SamplingParams, Task


class GeneratorRollout:
    """A driver of one-turn episodes on a generator. Every call has an event loop of its own."""

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        params: SamplingParams,
        samples: int,
        stops: Sequence[str] = (),
    ) -> None:
        self.params = params
        self.samples = samples
        self.player = Player(generator, renderer, Limits(tokens=1 << 20), stops=tuple(stops))
        self._stats: dict[str, float] = {}

    def driver(self) -> Driver:
        return Driver(self.player, self.params, self.samples)

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        driver = self.driver()
        groups = asyncio.run(groups_in_order(driver.play(tasks, seed), tasks))
        self._stats = driver.stats()
        return groups

    def stats(self) -> dict[str, float]:
        return self._stats


class EngineRollout(GeneratorRollout):
    """The same on an engine in this process."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        params: SamplingParams,
        samples: int,
        release_kv: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        super().__init__(
            EngineGenerator(engine, renderer, release_kv), renderer, params, samples, stops
        )
        self.engine = engine
