"""Rollout by the embedded engine, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..engine.engine import Engine
from ..engine.sequence import Sequence as EngineSequence
from ..engine.stats import EngineStats
from ..types import Group, SamplingParams, Task, Trajectory
from .base import Enough
from .prompts import PromptCodec


class EngineRollout:
    """Tasks in, groups out. params: how completions are drawn; its seed is replaced at every call. release_kv: give the cache's memory back
    after each call."""

    def __init__(self, engine: Engine, codec: PromptCodec, params: SamplingParams, samples: int, release_kv: bool = False) -> None:
        self.engine = engine
        self.codec = codec
        self.params = params
        self.samples = samples
        self.release_kv = release_kv
        self._stats: dict[str, float] = {}

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """K trajectories of every task from the engine's current weights. Raises ValueError on repeated task ids: their noise would be the same."""
        return self.generate_until(tasks, seed, self._all)

    def generate_until(self, tasks: Sequence[Task], seed: int, enough: Enough) -> list[Group]:
        """As `generate`; a task's group is what `enough` keeps of it, and its other samples are aborted. Which they are depends on the order of
        ending, so on `engine.max_running` too; each trajectory's tokens do not."""
        if len({t.id for t in tasks}) != len(tasks):
            raise ValueError("generate: task ids repeat within one call")
        started, before = time.perf_counter(), replace(self.engine.stats)
        params = replace(self.params, seed=seed)
        requests = {t.id: (t, self.engine.add(t.id, self.codec.encode(t), params, list(range(self.samples)))) for t in tasks}
        ended: dict[str, list[Trajectory]] = {t.id: [] for t in tasks}
        whole: dict[str, list[Trajectory]] = {}
        begun: list[EngineSequence] = []

        def on_end(sequence: EngineSequence) -> None:
            begun.append(sequence)
            task, request = requests[sequence.request.key]
            if task.id in whole:
                return  # ended in the very step in which its group was whole
            ended[task.id].append(self._trajectory(sequence))
            kept = enough(task, ended[task.id])
            if kept is not None:
                whole[task.id] = kept
                begun.extend(self.engine.abort(request))

        self.engine.run(on_end=on_end)
        if self.release_kv:
            self.engine.release_memory()
        groups = [Group(t, whole[t.id]) for t in tasks]
        self._stats = self._measure(groups, begun, time.perf_counter() - started, before)
        return groups

    def _all(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
        return sorted(ended, key=lambda t: t.sample) if len(ended) == self.samples else None

    def stats(self) -> dict[str, float]:
        """Metrics of the last call."""
        return self._stats

    def _trajectory(self, sequence: EngineSequence) -> Trajectory:
        prompt = len(sequence.request.prompt)
        completion = sequence.tokens[prompt:]
        if sequence.finish_reason is None:
            raise RuntimeError(f"engine gave back an unfinished sequence of task {sequence.request.key}")
        return Trajectory(
            task_id=sequence.request.key,
            sample=sequence.sample,
            tokens=sequence.tokens,
            prompt_length=prompt,
            mask=[False] * prompt + [True] * len(completion),
            logp=[0.0] * prompt + sequence.logp,
            version=[-1] * prompt + sequence.version,
            finish_reason=sequence.finish_reason,
            text=self.codec.decode(completion),
            turns=[prompt],
            seconds=sequence.seconds,
            kept=sequence.kept or None,
        )

    def _measure(self, groups: list[Group], begun: Sequence[EngineSequence], seconds: float, before: EngineStats) -> dict[str, float]:
        """begun: every sequence that was, in the groups or not; tokens and speed are of all of them."""
        trajectories = [t for g in groups for t in g.trajectories]
        lengths = [t.completion_length for t in trajectories]
        sampled = sum(len(s.logp) for s in begun)
        prefilled, reused = self.engine.stats.prefill_tokens - before.prefill_tokens, self.engine.stats.reused_tokens - before.reused_tokens
        kept = [t.kept for t in trajectories if t.kept]
        cut = {
            "rollout/kept_mean": sum(len(k.ids) for k in kept) / max(1, sum(map(len, kept))),
            "rollout/kept_mass_frac": sum(sum(k.mass) for k in kept) / max(1, sum(map(len, kept))),
        }
        return {
            "rollout/tokens": float(sampled),
            "rollout/prompt_tokens": float(prefilled + reused),
            "rollout/reused_frac": reused / max(1, prefilled + reused),
            "rollout/tok_s": sampled / max(seconds, 1e-9),
            "rollout/length_mean": sum(lengths) / max(1, len(lengths)),
            "rollout/length_max": float(max(lengths, default=0)),
            "rollout/truncated_frac": sum(t.finish_reason == "length" for t in trajectories) / max(1, len(trajectories)),
            "rollout/kept_frac": len(trajectories) / max(1, len(begun)),
            "rollout/dropped_tokens": float(sampled - sum(lengths)),
            **(cut if kept else {}),
        }
