"""Duration of collective operations over a ring, from bytes and bandwidth.

The bandwidth is that of one device in one direction, in bytes per second, as in the bus bandwidth
of nccl-tests. NVLink is usually quoted for both directions together: 600 GB/s on an A100 are
300 GB/s in each. The latency is in seconds per message.
"""

from __future__ import annotations


def all_gather_seconds(
    total: float, *, ranks: int, bytes_per_second: float, latency: float
) -> float:
    """An all-gather or a reduce-scatter of S bytes: `(n-1)/n S/BW + (n-1) latency`."""
    return (ranks - 1) / ranks * total / bytes_per_second + (ranks - 1) * latency


def all_reduce_seconds(
    total: float, *, ranks: int, bytes_per_second: float, latency: float
) -> float:
    """An all-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather_seconds(
        total, ranks=ranks, bytes_per_second=bytes_per_second, latency=latency
    )


def broadcast_seconds(total: float, *, bytes_per_second: float) -> float:
    """A pipelined broadcast. Its duration hardly depends on the number of receivers."""
    return total / bytes_per_second
