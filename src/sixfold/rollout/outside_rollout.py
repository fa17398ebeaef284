"""Rollout with an engine in another process. `EngineRollout` uses the engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from ..types import Group, SamplingParams, Task, Trajectory
from .generator import Generator, Sampled, SampleKey, wait_for
from .renderer.renderer import Renderer
from .trajectories import rollout_metrics


class OutsideRollout:
    """Rollout that samples with a `Generator`.

    Args:
        engine: samples token ids.
        renderer: renders prompts and decodes completions.
        params: sampling parameters. Their seed is replaced at every call.
        samples: completions per task (K).
        stops: stop strings. A completion ends with the token that completes a stop string.
    """

    def __init__(
        self,
        engine: Generator,
        renderer: Renderer,
        params: SamplingParams,
        samples: int,
        stops: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.params = params
        self.samples = samples
        self.stops = tuple(stops)
        self._stats: dict[str, float] = {}

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """Sample K trajectories per task from the engine's current weights.

        Raises:
            ValueError: a task id is repeated. Its samples would get the same seeds.
            RuntimeError: the engine reports another weight version for some tokens.
        """
        if len({t.id for t in tasks}) != len(tasks):
            raise ValueError("generate: a task id is repeated. Give every task a different id")
        started = time.perf_counter()
        asked = [(task, k) for task in tasks for k in range(self.samples)]
        prompts = {task.id: self.renderer.encode(task) for task in tasks}
        done = wait_for(
            self._sample([(prompts[task.id], SampleKey(task.id, k)) for task, k in asked], seed)
        )
        self._check_versions(done)
        trajectories = [
            self._trajectory(task, k, prompts[task.id], s)
            for (task, k), s in zip(asked, done, strict=True)
        ]
        groups = [
            Group(task, trajectories[i * self.samples : (i + 1) * self.samples])
            for i, task in enumerate(tasks)
        ]
        reused = sum(s.reused for s in done)
        total = sum(len(prompts[task.id]) for task, _ in asked)
        sampled = sum(len(s.tokens) for s in done)
        self._stats = rollout_metrics(
            groups, time.perf_counter() - started, total - reused, reused, sampled, len(done)
        )
        return groups

    def stats(self) -> dict[str, float]:
        """Metrics of the last call."""
        return self._stats

    async def _sample(
        self, asked: Sequence[tuple[list[int], SampleKey]], seed: int
    ) -> list[Sampled]:
        params = replace(self.params, seed=seed)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.engine.generate(prompt, params, key, stops=self.stops))
                    for prompt, key in asked
                ]
        except BaseExceptionGroup as errors:  # the first failure has cancelled the other samples
            raise errors.exceptions[0] from None
        await self.engine.rest()
        return [task.result() for task in tasks]

    def _trajectory(
        self, task: Task, sample: int, prompt: list[int], sampled: Sampled
    ) -> Trajectory:
        """Trajectory of one completion.

        Args:
            task: the task of the prompt.
            sample: index of the sample within the task.
            prompt: token ids of the prompt.
            sampled: the engine's completion.
        """
        text = sampled.text
        return Trajectory.one_turn(
            task.id,
            sample,
            prompt,
            sampled.tokens,
            sampled.logp,
            sampled.version,
            sampled.finish_reason,
            text=self.renderer.decode(sampled.tokens) if text is None else text,
            seconds=sampled.seconds,
            opened=self.renderer.opened(prompt),
        )

    def _check_versions(self, done: Sequence[Sampled]) -> None:
        """Raise RuntimeError if a token was not sampled by the version of the last `load`.

        Weights never change during a call, so there must be only one version.
        """
        found = {v for s in done for v in s.version}
        if found - {self.engine.version}:
            raise RuntimeError(
                f"the engine sampled from weights of version {sorted(found)}, but version"
                f" {self.engine.version} was loaded"
            )
