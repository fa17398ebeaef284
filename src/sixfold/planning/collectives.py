"""Duration of collective operations over a ring, from bytes and bandwidth.

The bandwidth is that of one device in one direction, as in the bus bandwidth of nccl-tests. NVLink
is usually quoted for both directions together: 600 GB/s on an A100 are 300 GB/s in each.
"""

from __future__ import annotations

from . import checks


def all_gather_seconds(
    total: float, *, ranks: int, bytes_per_second: float, latency: float
) -> float:
    """Duration of an all-gather or a reduce-scatter: `(n-1)/n S/BW + (n-1) latency`.

    Args:
        total: bytes S of the gathered tensor.
        ranks: ranks n.
        bytes_per_second: bandwidth of one device in one direction.
        latency: seconds per message.

    Raises:
        UserError: if a number is out of range.
    """
    checks.not_negative(total=total, latency=latency)
    checks.whole(ranks=ranks)
    checks.positive(bytes_per_second=bytes_per_second)
    return (ranks - 1) / ranks * total / bytes_per_second + (ranks - 1) * latency


def all_reduce_seconds(
    total: float, *, ranks: int, bytes_per_second: float, latency: float
) -> float:
    """Duration of an all-reduce: a reduce-scatter and an all-gather.

    Args:
        total: bytes of the reduced tensor.
        ranks: ranks.
        bytes_per_second: bandwidth of one device in one direction.
        latency: seconds per message.

    Raises:
        UserError: if a number is out of range.
    """
    return 2 * all_gather_seconds(
        total, ranks=ranks, bytes_per_second=bytes_per_second, latency=latency
    )


def broadcast_seconds(total: float, *, bytes_per_second: float) -> float:
    """Duration of a pipelined broadcast. It hardly depends on the number of receivers.

    Args:
        total: bytes to send.
        bytes_per_second: bandwidth of one device in one direction.

    Raises:
        UserError: if a number is out of range.
    """
    checks.not_negative(total=total)
    checks.positive(bytes_per_second=bytes_per_second)
    return total / bytes_per_second
