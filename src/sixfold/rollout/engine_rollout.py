"""Rollout by the embedded engine, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..engine.engine import Engine
from ..engine.sequence import Sequence as EngineSequence
from ..types import Group, SamplingParams, Task, Trajectory
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
        if len({t.id for t in tasks}) != len(tasks):
            raise ValueError("generate: task ids repeat within one call")
        started, before = time.perf_counter(), replace(self.engine.stats)
        params = replace(self.params, seed=seed)
        for task in tasks:
            self.engine.add(task.id, self.codec.encode(task), params, list(range(self.samples)))
        done = {(s.request.key, s.sample): s for s in self.engine.run()}
        if self.release_kv:
            self.engine.release_memory()
        groups = [Group(t, [self._trajectory(done[t.id, k]) for k in range(self.samples)]) for t in tasks]
        self._stats = self._measure(groups, time.perf_counter() - started, before.prefill_tokens, before.reused_tokens)
        return groups

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
        )

    def _measure(self, groups: list[Group], seconds: float, prefilled: int, reused: int) -> dict[str, float]:
        trajectories = [t for g in groups for t in g.trajectories]
        lengths = [t.completion_length for t in trajectories]
        prefilled, reused = self.engine.stats.prefill_tokens - prefilled, self.engine.stats.reused_tokens - reused
        return {
            "rollout/tokens": float(sum(lengths)),
            "rollout/prompt_tokens": float(prefilled + reused),
            "rollout/reused_frac": reused / max(1, prefilled + reused),
            "rollout/tok_s": sum(lengths) / max(seconds, 1e-9),
            "rollout/length_mean": sum(lengths) / max(1, len(lengths)),
            "rollout/length_max": float(max(lengths, default=0)),
            "rollout/truncated_frac": sum(t.finish_reason == "length" for t in trajectories) / max(1, len(trajectories)),
        }
