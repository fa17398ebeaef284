"""Rollout with an engine in another process. `EngineRollout` uses the engine in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..seeds import SAMPLE_BYTES, seed_number
from ..types import Group, SamplingParams, Task, Trajectory
from .outside_engine import OutsideEngine, Sampled
from .renderer.renderer import Renderer
from .stop_watch import cut_at_stop
from .trajectories import rollout_metrics


class OutsideRollout:
    """Rollout that samples with an `OutsideEngine`.

    Args:
        engine: samples token ids.
        renderer: renders prompts and decodes completions.
        params: sampling parameters. Their seed is replaced by one seed per sample.
        samples: completions per task (K).
        stops: stop strings. The engine does not stop at them; tokens after one are discarded.
    """

    def __init__(
        self,
        engine: OutsideEngine,
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
        seeds = [sample_seed(seed, task.id, k) for task, k in asked]
        done = self.engine.generate([prompts[task.id] for task, _ in asked], self.params, seeds)
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
        sampled = [len(s.tokens) for s in done]
        self._stats = rollout_metrics(
            groups, time.perf_counter() - started, total - reused, reused, sampled
        )
        return groups

    def stats(self) -> dict[str, float]:
        """Metrics of the last call."""
        return self._stats

    def _trajectory(
        self, task: Task, sample: int, prompt: list[int], sampled: Sampled
    ) -> Trajectory:
        """Trajectory of one completion, cut after the token that completes a stop string.

        Args:
            task: the task of the prompt.
            sample: index of the sample within the task.
            prompt: token ids of the prompt.
            sampled: the engine's completion.
        """
        found = cut_at_stop(sampled.tokens, self.renderer, self.stops)
        length, text = found or (len(sampled.tokens), self.renderer.decode(sampled.tokens))
        return Trajectory.one_turn(
            task.id,
            sample,
            prompt,
            sampled.tokens[:length],
            sampled.logp[:length],
            sampled.version[:length],
            sampled.finish_reason if found is None else "stop",
            text=text,
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


def sample_seed(seed: int, task_id: str, sample: int) -> int:
    """Seed of one sample (48 bits).

    It depends only on the arguments, so batching, order and restarts do not change the samples.

    Args:
        seed: seed of the `generate` call.
        task_id: id of the task.
        sample: index of the sample within the task.
    """
    return seed_number(f"{seed}\x00{task_id}\x00{sample}", SAMPLE_BYTES)
