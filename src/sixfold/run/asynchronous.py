"""The parts of an asynchronous run: its ledger and its collector."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..controller.asynchronous import AsyncCollector
from ..controller.ledger import Ledger
from ..controller.oversample import DynamicK
from ..controller.stream import step_seed, task_stream
from ..rollout.meter import RunningMeter
from ..staleness import window_groups
from .assemble import Assembly


def ledger_of(assembly: Assembly) -> Ledger | None:
    """The ledger of an asynchronous run. None: a step samples its own groups."""
    recipe, rollout = assembly.recipe, assembly.recipe.rollout
    if not rollout.staleness:
        return None
    per_step = min(rollout.prompts_per_step, len(assembly.tasks.train))
    window = window_groups(per_step, rollout.staleness, rollout.window)
    return Ledger(per_step, rollout.staleness, window, recipe.run.steps)


def async_collector(assembly: Assembly, ledger: Ledger) -> AsyncCollector:
    """Collector of the groups that train, with a stream of tasks and a player of its own."""
    recipe, tasks = assembly.recipe, assembly.tasks
    config, seed = recipe.rollout, recipe.run.seed
    meter = RunningMeter(config.oversample or config.samples_per_prompt)
    player = replace(assembly.player)
    player.meter = meter
    stream = task_stream(tasks.train, config.prompts_per_step, seed, tasks.weights)
    return AsyncCollector(
        rollout=assembly.rollout(config.oversample, overlapping=player),
        environment=assembly.environment,
        loop=assembly.loop,
        ledger=ledger,
        tasks=lru_cache(2)(stream),  # a group asks for the tasks of its whole step
        seed=lambda step: step_seed(seed, step),
        measure=meter.since_last,
        choose=(
            DynamicK(config.samples_per_prompt, config.oversample) if config.oversample else None
        ),
    )
