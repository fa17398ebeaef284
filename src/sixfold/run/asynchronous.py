"""The parts of an asynchronous run, recorded or replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ..algorithm.method import Method
from ..controller.asynchronous import AsyncCollector, Observe
from ..controller.curriculum import Curriculum
from ..controller.dead_letters import DeadLetters
from ..controller.ledger import Ledger
from ..controller.mixture import too_small
from ..controller.oversample import DynamicK
from ..controller.schedule import GREEDY, Admits, ReplayLedger, ScheduledGroup
from ..controller.stream import greedy_seed, step_seed, task_stream
from ..errors import UserError
from ..rollout.meter import RunningMeter
from ..rollout.player import Plays
from ..rollout.scheduled import ScheduledGenerator, diverged
from ..staleness import window_groups
from ..types import Group, Task
from .assemble import Assembly, agent_player
from .shared_groups import RankLedgers, SharedCollector, share_of

Schedule = Sequence[Sequence[ScheduledGroup]]
"""Groups of every step of a recorded run."""


def ledger_of(assembly: Assembly, schedule: Schedule | None) -> Admits | RankLedgers | None:
    """The ledger of an asynchronous run. None: a step samples its own groups."""
    recipe, rollout, ranks = assembly.recipe, assembly.recipe.rollout, assembly.ranks
    if not rollout.staleness:
        return None
    tasks = assembly.tasks
    per_step = min(rollout.prompts_per_step, len(tasks.train))
    if small := too_small(tasks.train, rollout.prompts_per_step, tasks.weights):
        raise UserError(
            f"source '{small}' has fewer tasks than its share of a step, so steps would differ in"
            f" size. That does not work with rollout.staleness = {rollout.staleness}: lower its"
            " weight or rollout.prompts_per_step"
        )
    if per_step < ranks.size:
        raise UserError(
            f"rollout.prompts_per_step = {per_step} gives no group to some of the {ranks.size}"
            f" ranks. With rollout.staleness = {rollout.staleness} it must be at least {ranks.size}"
        )

    def ledger(rank: int) -> Admits:
        own = len(range(rank, per_step, ranks.size))
        if schedule is not None:
            return ReplayLedger(share_of(schedule, rank, ranks.size, per_step), own)
        window = window_groups(own, rollout.staleness, rollout.window)
        return Ledger(own, rollout.staleness, window, recipe.run.steps)

    if ranks.size == 1:
        return ledger(0)
    return RankLedgers([ledger(rank) for rank in range(ranks.size)], ranks.rank)


def async_collector(
    assembly: Assembly,
    ledger: Admits | RankLedgers,
    dead: DeadLetters,
    method: Method,
    curriculum: Curriculum | None = None,
) -> AsyncCollector | SharedCollector:
    """Collector of the groups that train, with a stream of tasks and a player of its own.

    Args:
        assembly: model, tasks and settings.
        ledger: that of the run, or of the schedule that is replayed.
        dead: prompts that were set aside.
        method: the algorithm's method.
        curriculum: decides which tasks are drawn, or None.

    Raises:
        UserError: if a schedule is replayed that followed a curriculum.
    """
    own = ledger.own if isinstance(ledger, RankLedgers) else ledger
    if isinstance(own, ReplayLedger) and curriculum:
        raise UserError(
            "the run followed a curriculum (data.curriculum.every > 0), and its schedule does not"
            " say which tasks were drawn: it cannot be replayed"
        )
    recipe, tasks = assembly.recipe, assembly.tasks
    config, seed = recipe.rollout, recipe.run.seed
    meter = RunningMeter(config.oversample or config.samples_per_prompt)
    player = replace(assembly.player)
    player.meter = meter
    plays: Plays = player
    if agent := agent_player(recipe.environment.agent, assembly.policy, player):
        # Not the agent of evaluations: another meter counts its replies.
        assembly.ending.callback(lambda: assembly.loop.run(agent.close()))
        plays = agent
    ranks = assembly.ranks

    def streamed() -> Callable[[int], Sequence[Task]]:
        """A stream of one thread. A group asks for the tasks of its whole step."""
        return lru_cache(4)(task_stream(tasks.train, config.prompts_per_step, seed, tasks.weights))

    stream = curriculum or streamed()
    observe: Observe = curriculum.observe_step if curriculum else lambda groups: None
    shared, replays = isinstance(ledger, RankLedgers), isinstance(own, ReplayLedger)
    collector = AsyncCollector(
        rollout=assembly.rollout(config.oversample, overlapping=plays),
        environment=assembly.environment,
        loop=assembly.loop,
        ledger=own,
        tasks=lambda step: stream(step)[ranks.rank :: ranks.size],
        seed=lambda step: step_seed(seed, step),
        measure=meter.since_last,
        choose=(
            DynamicK(config.samples_per_prompt, config.oversample) if config.oversample else None
        ),
        dead=dead,
        max_rounds=0 if replays else method.dynamic_sampling,  # a schedule has what was trained
        greedy=assembly.prober(agent or replace(assembly.player)) if method.needs_greedy else None,
        observe=(lambda groups: None) if shared else observe,
    )
    if isinstance(own, ReplayLedger):
        assert isinstance(player.generator, ScheduledGenerator)
        _follow(collector, player.generator, own.steps)
    if isinstance(ledger, RankLedgers):
        by_id = {task.id: task for task in tasks.train}
        return SharedCollector(collector, ledger, by_id, ranks, dead, observe)
    return collector


def _follow(collector: AsyncCollector, generator: ScheduledGenerator, schedule: Schedule) -> None:
    """Make a collector and its generator follow a schedule."""
    groups = {group.number: group for step in schedule for group in step}
    names = {number: collector.group(number) for number in groups}
    generator.follow(
        {
            (greedy_seed(seed), task.id, 0)
            if sample == GREEDY
            else (seed, task.id, sample): versions
            for number, (task, seed) in names.items()
            for sample, versions in groups[number].versions.items()
        }
    )

    def check(number: int, group: Group) -> None:
        recorded = groups[number].versions
        played = ScheduledGroup.of(number, 0, group).versions
        for sample in recorded.keys() | played.keys():
            if recorded.get(sample) != played.get(sample):
                raise diverged(group.task.id, sample)

    def fail(error: Exception) -> None:
        generator.failure = error

    collector.on_finished, collector.on_failure = check, fail
