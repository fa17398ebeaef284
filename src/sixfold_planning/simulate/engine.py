"""Engines with continuous batching: they decode one token per running sequence and step."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .timing import Timing


@dataclass(eq=False)
class GroupRun:
    """A group on its way from the sampler to the trainer.

    Attributes:
        lengths: sampled tokens of each sample.
        mixed: the rewards differ.
        attempt: how often this place of the batch has been sampled, from 1.
        begun: version of the weights when its first sample started. None before that.
        waiting: samples that have not ended.
        ended: tokens of samples that have ended.
    """

    lengths: tuple[int, ...]
    mixed: bool
    attempt: int
    begun: int | None = None
    waiting: int = field(init=False)
    ended: int = 0

    def __post_init__(self) -> None:
        self.waiting = len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


Sample = tuple[GroupRun, int]
"""Group and length of one sample."""


class Engine:
    """One engine.

    All running sequences advance together, so a sequence that starts when the engine has decoded
    p tokens finishes at p + length.

    Attributes:
        tokens: tokens that it has sampled.
        busy: seconds in which it had sequences.
        load: integral of the number of its sequences over time.
        up: False while it restarts.
        generation: increases whenever the time of the next event changes.
    """

    def __init__(self, timing: Timing) -> None:
        self.tokens = self.busy = self.load = 0.0
        self.up, self.generation = True, 0
        self._timing = timing
        self._running: list[tuple[float, int, Sample]] = []
        self._number = 0
        self._position = self._starts = self._target = 0.0
        self._rate = self._now = self._resume = 0.0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def in_flight(self) -> float:
        """Tokens of the sequences that run."""
        return len(self) * self._position - self._starts

    def advance(self, now: float) -> None:
        """Decode until `now`, which must not be after the next event."""
        if self._running:
            self.busy += now - self._now
            self.load += (now - self._now) * len(self)
            self._decode(max(0.0, now - max(self._now, self._resume)) * self._rate)
        self._now = now

    def _decode(self, steps: float) -> None:
        self._position += steps
        self.tokens += len(self) * steps

    def admit(self, sample: Sample) -> None:
        """Start a sequence now. `advance` and then `next_event` must be called around it."""
        if not self._running:
            self._position = self._starts = 0.0
        self._number += 1
        heapq.heappush(self._running, (self._position + sample[1], self._number, sample))
        self._starts += self._position
        self._resume = max(self._resume, self._now) + self._timing.prefill

    def next_event(self) -> float:
        """Time of the next event: a sequence ends, or decoding steps must be timed again."""
        self.generation += 1
        if not self._running:
            return math.inf
        self._target = min(self._running[0][0], self._position + self._timing.stride)
        steps, count = self._target - self._position, len(self)
        middle = self._position - self._starts / count + steps / 2
        seconds = self._timing.decode(count, middle)
        self._rate = 1 / seconds
        return max(self._now, self._resume) + steps * seconds

    def finish(self, now: float) -> list[Sample]:
        """Advance to the event at `now`.

        Returns:
            Samples that have ended.
        """
        self.advance(now)
        self._decode(self._target - self._position)
        # Rounding must not leave a sequence just before its end.
        self._position = self._target
        ended = []
        while self._running and self._running[0][0] <= self._position:
            end, _, sample = heapq.heappop(self._running)
            self._starts -= end - sample[1]
            ended.append(sample)
        return ended

    def drop(self) -> list[Sample]:
        """Abort all sequences, in the order in which they started."""
        dropped = [sample for _, _, sample in sorted(self._running, key=lambda run: run[1])]
        self._running.clear()
        self._starts = self._position = self._resume = 0.0
        self.generation += 1
        return dropped


class SamplerPool:
    """Engines and the samples that wait for a place in one of them.

    Args:
        timing: durations and sizes.
    """

    def __init__(self, timing: Timing) -> None:
        self.engines = [Engine(timing) for _ in range(timing.replicas)]
        self._slots = timing.slots
        self._queue: deque[Sample] = deque()
        self._loads: list[tuple[int, int]] = []
        for index in range(len(self.engines)):
            self.changed(index)

    @property
    def in_flight(self) -> float:
        """Tokens of all sequences that run."""
        return sum(engine.in_flight for engine in self.engines)

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        for engine in self.engines:
            engine.advance(now)

    def submit(self, group: GroupRun) -> None:
        """Queue the samples of a group."""
        self._queue.extend((group, length) for length in group.lengths)

    def requeue(self, samples: Iterable[Sample]) -> None:
        """Queue samples in front of all others, in their order."""
        self._queue.extendleft(reversed(list(samples)))

    def changed(self, index: int) -> None:
        """Note that the number of sequences of an engine has changed, or that it is up again."""
        heapq.heappush(self._loads, (len(self.engines[index]), index))

    def dispatch(self, now: float, version: int) -> list[int]:
        """Start queued samples, each on the engine with the fewest sequences.

        Returns:
            Engines that have started samples.
        """
        touched: dict[int, None] = {}
        while self._queue and self._loads:
            load, index = self._loads[0]
            engine = self.engines[index]
            if load != len(engine) or not engine.up or load >= self._slots:
                heapq.heappop(self._loads)  # out of date, or no place: `changed` adds it again
                continue
            if index not in touched:
                engine.advance(now)
                touched[index] = None
            sample = self._queue.popleft()
            if sample[0].begun is None:
                sample[0].begun = version
            engine.admit(sample)
            heapq.heapreplace(self._loads, (load + 1, index))
        return list(touched)

    def clear(self) -> None:
        """Abort everything. All engines are up and empty."""
        self._queue.clear()
        for index, engine in enumerate(self.engines):
            engine.drop()
            engine.up = True
            self.changed(index)
