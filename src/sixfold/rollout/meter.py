"""Measures the engine during a rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..engine.engine import Engine
from ..engine.stats import EngineStats
from ..types import Group
from .engine_generator import EngineGenerator
from .generator import Generator, Sampled
from .trajectories import rollout_metrics


class Meter(Protocol):
    """Measures one rollout at a time: `begin`, `count` for every reply, `end`, `metrics`."""

    async def begin(self) -> None:
        """Start a rollout."""
        ...

    def count(self, prompt: int, reply: Sampled) -> None:
        """Count a reply that was sampled after `prompt` tokens."""
        ...

    async def end(self) -> None:
        """The last token has been sampled."""
        ...

    def metrics(self, groups: Sequence[Group], started: int, ended: int) -> dict[str, float]:
        """Metrics of the rollout.

        Args:
            groups: the groups that it returned.
            started: number of episodes that it started.
            ended: number of episodes that were not cancelled.
        """
        ...


class ReplyMeter:
    """Meter of an engine in another process: it counts what the replies report."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reused = self.sampled = 0
        self.seconds = 0.0
        self._began = 0.0

    async def begin(self) -> None:
        self.prompt_tokens = self.reused = self.sampled = 0
        self._began = time.perf_counter()

    def count(self, prompt: int, reply: Sampled) -> None:
        self.prompt_tokens += prompt
        self.reused += reply.reused
        self.sampled += len(reply.tokens)

    async def end(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def metrics(self, groups: Sequence[Group], started: int, ended: int) -> dict[str, float]:
        """Metrics of the replies. Tokens of cancelled replies are not known."""
        computed = self.prompt_tokens - self.reused
        return rollout_metrics(groups, self.seconds, computed, self.reused, self.sampled, started)


class RunningMeter(ReplyMeter):
    """Meter of rollouts that overlap: it measures from one `since_last` to the next.

    Args:
        samples: samples that are started per group.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self._began = time.perf_counter()

    def since_last(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of the replies since the last call, and of groups that have ended."""
        self.seconds, self._began = time.perf_counter() - self._began, time.perf_counter()
        metrics = self.metrics(groups, len(groups) * self._samples, 0)
        # Replies of groups that still run are counted, so the difference is not what was dropped.
        del metrics["rollout/dropped_tokens"]
        self.prompt_tokens = self.reused = self.sampled = 0
        return metrics


class EngineMeter:
    """Meter of the engine in this process: it reads the engine's counters.

    Args:
        generator: owns the engine.
    """

    def __init__(self, generator: EngineGenerator) -> None:
        self._generator = generator
        self._replies = ReplyMeter()
        self._before = self._after = EngineStats()

    async def begin(self) -> None:
        """Read the counters and reset the peaks."""
        await self._replies.begin()
        self._before = await self._generator.call(_restart_stats)

    def count(self, prompt: int, reply: Sampled) -> None:
        self._replies.count(prompt, reply)

    async def end(self) -> None:
        await self._replies.end()
        self._after = await self._generator.call(lambda engine: replace(engine.stats))

    def metrics(self, groups: Sequence[Group], started: int, ended: int) -> dict[str, float]:
        engine, now, before = self._generator.engine, self._after, self._before
        # Only the engine knows the tokens of cancelled replies. Otherwise ask the replies: with
        # speculation the engine has also counted tokens behind a stop string.
        decoded = now.decoded_tokens - before.decoded_tokens
        sampled = self._replies.sampled if ended == started else decoded
        prefilled, reused = (
            now.prefill_tokens - before.prefill_tokens,
            now.reused_tokens - before.reused_tokens,
        )
        metrics = rollout_metrics(
            groups, self._replies.seconds, prefilled, reused, sampled, started
        )
        metrics |= {
            "rollout/preemptions": float(now.preemptions - before.preemptions),
            "rollout/recomputed_tokens": float(now.recomputed_tokens - before.recomputed_tokens),
            "rollout/kv_peak_frac": now.peak_blocks / engine.scheduler.blocks.count,
            "rollout/queue_peak": float(now.peak_waiting),
        }
        if engine.speculator is not None:
            proposed = now.proposed_tokens - before.proposed_tokens
            accepted = now.accepted_tokens - before.accepted_tokens
            metrics["rollout/accepted_frac"] = accepted / max(1, proposed)
        if engine.scheduler.host.count:
            metrics["rollout/swapped_bytes"] = float(now.taken_out_bytes - before.taken_out_bytes)
        return metrics


def meter_of(generator: Generator) -> Meter:
    return EngineMeter(generator) if isinstance(generator, EngineGenerator) else ReplyMeter()


def _restart_stats(engine: Engine) -> EngineStats:
    """Prepare the engine for a rollout. Returns a copy of its counters."""
    engine.restart()  # in supervised training, weights change without a new version
    before = replace(engine.stats)
    engine.stats.restart_peaks()
    return before
