"""Rollout with the embedded engine, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..engine.engine import Engine
from ..engine.sequence import Sequence as EngineSequence
from ..engine.stats import EngineStats
from ..types import Group, SamplingParams, Task, Trajectory
from .base import Enough
from .renderer.renderer import Renderer
from .stop_watch import StopWatch
from .trajectories import rollout_metrics


class EngineRollout:
    """Rollout that samples with an `Engine` in this process.

    Args:
        engine: samples completions.
        renderer: renders prompts and decodes completions.
        params: sampling parameters. The seed is replaced at every call.
        samples: completions per task (K).
        release_kv: free the memory of the KV cache after each call.
        stops: stop strings. A completion ends with the token that completes a stop string, and its
            text ends before the stop string.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        params: SamplingParams,
        samples: int,
        release_kv: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.params = params
        self.samples = samples
        self.release_kv = release_kv
        self.stops = tuple(stops)
        self._stats: dict[str, float] = {}

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """Sample K trajectories per task from the engine's current weights.

        Raises:
            ValueError: a task id is repeated. Its samples would get the same noise.
        """
        return self.generate_until(tasks, seed, self._all)

    def generate_until(self, tasks: Sequence[Task], seed: int, enough: Enough) -> list[Group]:
        """As `generate`, with groups chosen by `enough`. Other samples of a task are discarded.

        The choice depends on the order in which samples end, and therefore on `engine.max_running`.
        The tokens of each trajectory do not depend on it.

        Args:
            tasks: tasks with distinct ids.
            seed: seed of the sampling noise.
            enough: returns the trajectories of a group, or None to continue.

        Raises:
            ValueError: a task id is repeated. Its samples would get the same noise.
        """
        if len({t.id for t in tasks}) != len(tasks):
            raise ValueError("generate: a task id is repeated. Give every task a different id")
        started, before = time.perf_counter(), replace(self.engine.stats)
        self.engine.stats.restart_peaks()
        params = replace(self.params, seed=seed)
        requests = {
            t.id: (
                t,
                self.engine.add(t.id, self.renderer.encode(t), params, list(range(self.samples))),
            )
            for t in tasks
        }
        ended: dict[str, list[Trajectory]] = {t.id: [] for t in tasks}
        whole: dict[str, list[Trajectory]] = {}
        begun: list[EngineSequence] = []
        watch = StopWatch(self.renderer, self.stops)

        def on_end(sequence: EngineSequence) -> None:
            begun.append(sequence)
            text = watch.text(sequence)
            task, request = requests[sequence.request.key]
            if task.id in whole:
                return  # ended in the same step that completed its group
            ended[task.id].append(self._trajectory(sequence, text))
            kept = enough(task, ended[task.id])
            if kept is not None:
                whole[task.id] = kept
                begun.extend(self.engine.abort(request))

        self.engine.run(on_end=on_end, ends=watch.ends if self.stops else None)
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

    def _trajectory(self, sequence: EngineSequence, text: str | None) -> Trajectory:
        """Trajectory of a finished sequence.

        Args:
            sequence: a sequence that has ended.
            text: text of the completion if a stop string ended it; None to decode its tokens.
        """
        prompt = sequence.request.prompt
        completion = sequence.tokens[len(prompt) :]
        if sequence.finish_reason is None:
            raise RuntimeError(
                f"the engine returned an unfinished sequence of task {sequence.request.key}"
            )
        return Trajectory.one_turn(
            sequence.request.key,
            sequence.sample,
            prompt,
            completion,
            sequence.logp,
            sequence.version,
            sequence.finish_reason,
            text=self.renderer.decode(completion) if text is None else text,
            seconds=sequence.seconds,
            kept=sequence.kept or None,
            opened=self.renderer.opened(prompt),
        )

    def _measure(
        self,
        groups: list[Group],
        begun: Sequence[EngineSequence],
        seconds: float,
        before: EngineStats,
    ) -> dict[str, float]:
        """Metrics of one call.

        Args:
            groups: the groups that the call returns.
            begun: every sequence that was started, including the aborted ones.
            seconds: duration of the call.
            before: the engine's counters at the start of the call. Its peaks were reset then.
        """
        now = self.engine.stats
        accepted = (now.accepted_tokens - before.accepted_tokens) / max(
            1, now.proposed_tokens - before.proposed_tokens
        )
        slots, rows = now.decode_slots - before.decode_slots, now.decode_rows - before.decode_rows
        idle = (slots - rows) / max(1, slots)
        swapped = float(now.taken_out_bytes - before.taken_out_bytes)
        scheduler = self.engine.scheduler
        prefilled, reused = (
            now.prefill_tokens - before.prefill_tokens,
            now.reused_tokens - before.reused_tokens,
        )
        return (
            rollout_metrics(
                groups, seconds, prefilled, reused, sum(len(s.logp) for s in begun), len(begun)
            )
            | {
                "rollout/preemptions": float(now.preemptions - before.preemptions),
                "rollout/recomputed_tokens": float(
                    now.recomputed_tokens - before.recomputed_tokens
                ),
                "rollout/kv_peak_frac": now.peak_blocks / self.engine.scheduler.blocks.count,
                "rollout/queue_peak": float(now.peak_waiting),
            }
            | ({"rollout/accepted_frac": accepted} if self.engine.speculator is not None else {})
            | ({} if scheduler.continuous else {"rollout/padding_frac": idle})
            | ({"rollout/swapped_bytes": swapped} if scheduler.host.count else {})
        )
