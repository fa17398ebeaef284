"""Seconds on a device, and what the device can do: its memory bandwidth and matmul rate, measured
in the run whose results are held against them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 10
FLUSH_BYTES = 256 << 20  # more than any GPU's last cache
COPIED_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


class Clock:
    """Times work on one device. On a GPU its caches are emptied before every measurement: a step
    finds them full of another layer's weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.on_gpu else None
        )

    def synchronize(self) -> float:
        """Wait for all work that was asked for; the time, in seconds."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one call."""
        if self._flush is None:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        before.record()
        work()
        after.record()
        self.synchronize()
        return before.elapsed_time(after) / 1e3

    def median(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Median seconds of a call, after two that do not count."""
        return statistics.median([self.once(work) for _ in range(repeats + 2)][2:])

    def best(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Fewest seconds of a call, after two that do not count."""
        return min([self.once(work) for _ in range(repeats + 2)][2:])


@dataclass(frozen=True)
class Limits:
    """bandwidth: bytes/s, the better of copying and of reading. matmul: FLOP/s of a large square
    product in the dtype of the run.
    """

    bandwidth: float
    matmul: float

    def seconds(self, bytes_moved: float, flops: float) -> float:
        """The roofline: no program that moves these bytes and computes these FLOPs takes less."""
        return max(bytes_moved / self.bandwidth, flops / self.matmul)


def measure_limits(clock: Clock, dtype: torch.dtype) -> Limits:
    """Both limits of the clock's device."""
    kind = clock.device.type
    source = torch.ones(COPIED_BYTES[kind] // 4, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    copying = 2 * source.nbytes / clock.best(lambda: target.copy_(source))
    reading = source.nbytes / clock.best(lambda: source.sum())
    size = MATMUL_SIZE[kind]
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    return Limits(max(copying, reading), 2 * size**3 / clock.best(lambda: a @ b))
