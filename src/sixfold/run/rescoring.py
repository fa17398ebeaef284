"""Score recorded trajectories again, with the current environment and reward functions.

Each episode is played with its recorded replies. The environment answers them, and the rewards
score the episode, as in training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..checks.scorer import StepScorer
from ..environment.episodes import AGENT
from ..report.replay import Sample, verdict_of
from ..rollout.recorded import RecordedReplies, RecordEnds
from ..types import Group, Reward, SamplingParams, Task, Trajectory, Turn
from .assemble import Assembly

AT_ONCE = 64
"""Groups that are scored at the same time."""


@dataclass
class Rescored:
    """Recorded groups with new rewards.

    Attributes:
        groups: copies of the recorded trajectories with the new rewards.
        turned: (index of the group, index of the trajectory) -> how the episode differs from its
            record. Index -1 is the greedy baseline. Equal episodes are left out.
    """

    groups: list[Group]
    turned: dict[tuple[int, int], str] = field(default_factory=dict)


async def rescored(world: Assembly, groups: Sequence[Group]) -> Rescored:
    """Score recorded groups again, at most AT_ONCE at the same time."""
    every = [t for g in groups for t in (*g.trajectories, *([g.greedy] if g.greedy else ()))]
    scorer = world.environment.scorer(len(every))
    slots = asyncio.Semaphore(AT_ONCE)
    result = Rescored([Group(group.task, [], None) for group in groups])

    async def whole(index: int) -> None:
        async with slots:
            await _group(world, scorer, groups[index], index, result)

    tasks = [asyncio.ensure_future(whole(index)) for index in range(len(groups))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return result


async def _group(
    world: Assembly, scorer: StepScorer, group: Group, index: int, result: Rescored
) -> None:
    """Score one group again, and its greedy baseline as a separate group."""
    played = [
        await _played(world, scorer, group.task, t, (index, k), result)
        for k, t in enumerate(group.trajectories)
    ]
    await scorer.finish(Group(group.task, played))
    again = result.groups[index]
    again.trajectories = [
        replace(old, reward=new.reward, turns=_turns(old, new))
        for old, new in zip(group.trajectories, played, strict=True)
    ]
    if group.greedy:
        baseline = await _played(world, scorer, group.task, group.greedy, (index, -1), result)
        await scorer.finish(Group(group.task, [baseline]))
        again.greedy = replace(group.greedy, reward=baseline.reward)


async def _played(
    world: Assembly,
    scorer: StepScorer,
    task: Task,
    recorded: Trajectory,
    place: tuple[int, int],
    result: Rescored,
) -> Trajectory:
    """Play a trajectory again, and start its checks.

    Args:
        world: supplies player and renderer.
        scorer: scores the trajectory.
        task: task of the trajectory.
        recorded: the trajectory.
        place: key of the trajectory in `Rescored.turned`.
        result: receives how the episode differs from its record.
    """
    if recorded.environment == AGENT:
        return await _agents(scorer, task, recorded)
    player = replace(world.player, generator=RecordedReplies(recorded, world.renderer))
    prompt = world.renderer.encode(task)
    params = SamplingParams(max_tokens=world.recipe.rollout.max_new_tokens)
    try:
        played = await player.play(task, recorded.sample, prompt, params)
    except RecordEnds as problem:
        result.turned[place] = str(problem)
        return replace(recorded, reward=Reward.failed(str(problem)))
    again = played.trajectory
    if again.tokens != recorded.tokens or again.provenance != recorded.provenance:
        result.turned[place] = _first_difference(again, recorded)
    if played.error:
        scorer.fail(again, played.error)
    else:
        await scorer.add(task, again)
    return again


async def _agents(scorer: StepScorer, task: Task, recorded: Trajectory) -> Trajectory:
    """Score an agent's trajectory again, without the agent.

    A reward that the agent gave stays, and so does that of an episode that a limit ended.
    """
    posted = any(event.get("kind") == "posted_reward" for event in recorded.events)
    if posted or recorded.outcome not in ("ended", "length"):
        return replace(recorded)
    again = replace(recorded, reward=None)
    await scorer.add(task, again)
    return again


def _turns(old: Trajectory, new: Trajectory) -> tuple[Turn, ...]:
    """The recorded turns with new rewards. Unchanged if the number of turns differs."""
    if len(old.turns) != len(new.turns):
        return old.turns
    pairs = zip(old.turns, new.turns, strict=True)
    return tuple(replace(before, reward=after.reward) for before, after in pairs)


def _first_difference(again: Trajectory, recorded: Trajectory) -> str:
    """The first token at which two episodes with the same replies differ, as text."""
    pairs = list(zip(again.tokens, recorded.tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if at < recorded.prompt_length:
        return f"the prompt differs from token {at} on"
    return f"the environment answers differently from token {at} on"


def differing(groups: Sequence[Group], again: Rescored) -> list[Sample]:
    """Trajectories whose episode or reward differs.

    Args:
        groups: recorded groups.
        again: the same groups, scored again.
    """
    found = []
    for index, (group, new) in enumerate(zip(groups, again.groups, strict=True)):
        pairs = [
            (str(old.sample), k, old, now)
            for k, (old, now) in enumerate(zip(group.trajectories, new.trajectories, strict=True))
        ]
        if group.greedy and new.greedy:
            pairs.append(("greedy", -1, group.greedy, new.greedy))
        for sample, k, old, now in pairs:
            before, after = old.total_reward, now.total_reward
            turned = again.turned.get((index, k), "")
            if turned or verdict_of(before, after) == "DIFFERS":
                what = "episode" if turned else "reward"
                note = turned or _note(old.reward, now.reward)
                found.append(Sample(group.task.id, sample, what, before, after, note))
    return found


def _note(old: Reward | None, new: Reward | None) -> str:
    """Parts and verdicts that differ, and the error of a failed check."""
    a, b = (dict(reward.parts) if reward else {} for reward in (old, new))
    parts = [
        f"{name} {_number(a.get(name))} -> {_number(b.get(name))}"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]
    errors = [
        f"{when}: {reward.error}"
        for when, reward in (("recorded", old), ("now", new))
        if reward and reward.error
    ]
    verdicts = [reward.verdict if reward else None for reward in (old, new)]
    if verdicts[0] and verdicts[0] != verdicts[1]:
        parts.append(f"verdict {verdicts[0]} -> {verdicts[1]}")
    return "; ".join([*parts, *errors])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
