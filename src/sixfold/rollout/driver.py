"""The driver plays the episodes of a step concurrently, and scores each as it ends.

While one episode waits for a tool or a check, others sample. So a step takes as long as its slowest
episode and its slowest check, not as long as their sum.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..environment.base import Scorer
from ..environment.episode import End, final_reward
from ..errors import one_line
from ..types import Group, Reward, SamplingParams, Task, Trajectory
from .base import Choose
from .branches import Branching, Trunk
from .environment_fault import EnvironmentFault, call_environment
from .generator import Peers
from .player import Played, Player, Plays

Member = asyncio.Task[tuple[Played, asyncio.Task[None]]]
"""Task that plays one episode. Returns the played episode, and the task that scores it."""


class Driver:
    """Rollout that plays K episodes per task.

    Args:
        player: plays one episode.
        params: sampling parameters of each reply. The seed is replaced at every call.
        samples: episodes per task (K).
        whole: True: groups contain all trajectories of an episode (`Played.more`). False: only the
            first.
        branching: where samples of a task diverge, if they share their first turns.
        overlapping: calls of `play` overlap. The generator never sleeps then, and the caller
            measures it.

    Raises:
        ValueError: if the samples cannot be divided among trunks, or the player plays no
            environments.
    """

    def __init__(
        self,
        player: Plays,
        params: SamplingParams,
        samples: int,
        branching: Branching | None = None,
        *,
        whole: bool = True,
        overlapping: bool = False,
    ) -> None:
        branching = branching or Branching()
        if samples % branching.count:
            raise ValueError(
                f"samples = {samples} must be a multiple of {branching.count} branches"
            )
        if branching.count > 1 and not isinstance(player, Player):
            raise ValueError("branches need a player of environments: an agent cannot be copied")
        self.player = player
        self.params = params
        self.samples = samples
        self.branching = branching
        self.whole = whole
        self.overlapping = overlapping
        self._stats: dict[str, float] = {}

    @property
    def version(self) -> int:
        return self.player.generator.version

    def stats(self) -> dict[str, float]:
        return self._stats

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        """Play K episodes per task, see `Rollout.play`.

        With `choose`, samples count in the order of their sampled lengths, so the members of a
        group do not depend on timing or on `engine.max_running`.

        Raises:
            ValueError: a task id is repeated. Its samples would get the same noise.
        """
        if len({t.id for t in tasks}) != len(tasks):
            raise ValueError("play: a task id is repeated. Give every task a different id")
        step = _Step(self, tasks, replace(self.params, seed=seed), scorer, choose)
        if not self.overlapping:
            await self.player.meter.begin()
        prompts = self.player.renderer.encode_all(tasks)
        # All groups start now, in order: their requests then reach the engine together, in order.
        groups = [
            asyncio.create_task(step.group(task, prompt))
            for task, prompt in zip(tasks, prompts, strict=True)
        ]
        sampled = asyncio.create_task(self._last_token(step, on_sampled))
        try:
            for group in asyncio.as_completed(groups):
                yield await group
            await sampled
            if self.overlapping:
                return
            # In task order: the sums of floats must not depend on which group ended first.
            done = [group.result() for group in groups]
            self._stats = self.player.meter.metrics(done, len(tasks) * self.samples, step.ended)
            if self.branching.count > 1:
                played = [t for group in done for t in group.trajectories]
                branched = sum(1 for t in played if t.branch)
                self._stats["rollout/branched_frac"] = branched / max(1, len(played))
        finally:
            await _end([*groups, sampled])

    async def _last_token(self, step: _Step, on_sampled: Callable[[], None]) -> None:
        """Wait for the end of the last episode."""
        await step.sampled.wait()
        if not self.overlapping:
            await self.player.meter.end()
            await self.player.generator.sleep()
        on_sampled()


class _Step:
    """Episodes of one call.

    Attributes:
        sampled: set when every episode has ended or was cancelled.
        ended: number of episodes that were not cancelled.
    """

    def __init__(
        self,
        driver: Driver,
        tasks: Sequence[Task],
        params: SamplingParams,
        scorer: Scorer | None,
        choose: Choose | None,
    ) -> None:
        self.sampled = asyncio.Event()
        self.ended = 0
        self._driver = driver
        self._timeline = driver.player.timeline
        self._params = params
        self._scorer = scorer
        self._choose = choose
        self._open = {(task.id, k) for task in tasks for k in range(driver.samples)}

    async def group(self, task: Task, prompt: Sequence[int]) -> Group:
        """Play and score the episodes of one task."""
        began = time.perf_counter()
        members, checks = [], set[asyncio.Task[None]]()
        more: dict[int, Sequence[Trajectory]] = {}
        branching = self._driver.branching
        trunk = None
        for k in range(self._driver.samples):
            if branching.count > 1 and k % branching.count == 0:
                trunk = Trunk[Any](branching.turn)
            members.append(asyncio.create_task(self._member(task, k, prompt, checks, trunk)))
            members[-1].add_done_callback(partial(self._left, (task.id, k)))
        ended, peers, offered = list[Trajectory](), list[Peers](), 0
        try:
            for member in asyncio.as_completed(members):
                played, check = await member
                await check
                ended.append(played.trajectory)
                more[played.trajectory.sample] = played.more if self._driver.whole else ()
                if played.peers.count == self._driver.samples:
                    peers.append(played.peers)
                ordered = self._in_order(ended, _floor(peers))
                while offered < len(ordered):
                    offered += 1
                    if (kept := await self._complete(task, ordered[:offered])) is not None:
                        self._timeline.add("groups", task.id, began)
                        return Group(task, self._with_more(kept, more))
        finally:
            await _end([*members, *checks])
        raise RuntimeError(f"no trajectories were chosen for task {task.id}")

    def _with_more(
        self, kept: Sequence[Trajectory], more: Mapping[int, Sequence[Trajectory]]
    ) -> list[Trajectory]:
        """The trajectories of a group, and then the further ones of their episodes."""
        further = []
        for first in kept:
            for number, trajectory in enumerate(more[first.sample], 1):
                trajectory.sample = first.sample + number * self._driver.samples
                trajectory.reward = first.reward and replace(first.reward, steps=())
                further.append(trajectory)
        return [*kept, *further]

    def _in_order(self, ended: Sequence[Trajectory], floor: int) -> list[Trajectory]:
        """Trajectories whose place in the order of sampled lengths is certain, in that order.

        The order in which episodes end depends on timing: on the slots of the engine, and on when
        other groups were complete. The order of lengths does not.

        Args:
            ended: scored trajectories.
            floor: lower bound of the sampled length of every unfinished episode.
        """
        every = len(ended) == self._driver.samples
        known = [t for t in ended if every or t.sampled_length <= floor]
        return sorted(known, key=lambda t: (t.sampled_length, t.sample))

    async def _member(
        self,
        task: Task,
        sample: int,
        prompt: Sequence[int],
        checks: set[asyncio.Task[None]],
        trunk: Trunk[Any] | None,
    ) -> tuple[Played, asyncio.Task[None]]:
        """Play one episode and start to score it."""
        player, params = self._driver.player, self._params
        played = await (
            player.play(task, sample, prompt, params, trunk)
            if isinstance(player, Player)
            else player.play(task, sample, prompt, params)
        )
        self.ended += 1
        check = asyncio.create_task(self._check(task, played))
        checks.add(check)
        return played, check

    async def _check(self, task: Task, played: Played) -> None:
        trajectory = played.trajectory
        with self._timeline.checking(f"{task.id} #{trajectory.sample}"):
            error = await _wait_for_reward(played)
            if self._scorer is None:
                if error:
                    trajectory.reward = Reward.failed(error)
            elif error:
                self._scorer.fail(trajectory, error)
            else:
                await self._scorer.add(task, trajectory)

    async def _complete(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Trajectories of the group if it is complete, in sample order."""
        least = self._driver.samples if self._choose is None else self._choose.keep
        if len(ended) < least:
            return None
        ordered = sorted(ended, key=lambda t: t.sample)
        if self._scorer is not None:
            with self._timeline.checking(task.id):
                await self._scorer.finish(Group(task, ordered))
        return ordered if self._choose is None else self._choose(task, ended)

    def _left(self, episode: tuple[str, int], member: Member) -> None:
        """An episode has ended or was cancelled, before it started or later."""
        self._open.discard(episode)
        if not self._open:
            self.sampled.set()


async def _wait_for_reward(played: Played) -> str:
    """Wait for a reward that comes later. Returns how the episode failed, in one line, or ""."""
    if played.later is None or played.error:
        return played.error
    try:
        reward = final_reward(End(await call_environment(played.later, "later")))
    except EnvironmentFault as fault:
        return str(fault)
    except Exception as error:  # noqa: BLE001 - boundary: a failed environment is data
        return one_line(error)
    if reward is None or reward.value is None:
        return (reward.error if reward else "") or "End.later gave no reward"
    played.trajectory.reward = reward
    return ""


def _floor(known: Sequence[Peers]) -> int:
    """Lower bound of the sampled length of every unfinished episode.

    A bound holds for the episodes whose replies had not ended when it was recorded. An episode
    whose reply has ended may still wait for its environment. So a bound is used only once all
    replies that had ended by then are in `known`.

    Args:
        known: `Peers` of each finished episode.
    """
    return max(
        (p.floor for p in known if sum(other.ended <= p.ended for other in known) == p.ended),
        default=0,
    )


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run, and wait until all have ended."""
    tasks = list(tasks)
    for task in tasks:
        if not task.cancelling():  # a second time would interrupt its cleanup
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
