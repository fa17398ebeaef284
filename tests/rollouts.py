"""Sample groups with an engine, through the driver, from ordinary code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sixfold.engine.engine import Engine
from sixfold.environment.episode import MakeEpisode
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.player import Limits, OneTurn, Player
from sixfold.rollout.renderer.renderer import Renderer
from sixfold.types import Group, SamplingParams, Task


class EngineRollout:
    """A driver of one-turn episodes on an engine. Every call has an event loop of its own."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        params: SamplingParams,
        samples: int,
        release_kv: bool = False,
        stops: Sequence[str] = (),
        make: MakeEpisode = OneTurn,
        turns: int = 1,
    ) -> None:
        self.engine = engine
        self.params = params
        self.player = Player(
            EngineGenerator(engine, renderer, release_kv),
            renderer,
            Limits(tokens=1 << 20, turns=turns),
            make,
            tuple(stops),
        )
        self.samples = samples
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
