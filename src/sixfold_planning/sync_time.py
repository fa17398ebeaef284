"""Duration and volume of a weight sync from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .collectives import all_gather_seconds, broadcast_seconds

OPERATIONS = ("gather", "cast", "broadcast", "reshard")
"""The operations of a sync in the usual order. "invalidate" may follow: it drops caches."""


@dataclass(frozen=True)
class SyncLinks:
    """Bandwidths of a sync, of one device in one direction, in bytes per second.

    Attributes:
        gather: between the trainer's ranks. 300e9 for the NVLink of an A100, whose 600 GB/s count
            both directions.
        network: from the trainer to the engines. 25e9 and 50e9 for 200 and 400 Gb/s InfiniBand.
        reshard: between the ranks of an engine, or from the trainer to each of them.
        memory: device memory. 3.35e12 for an H100.
    """

    gather: float
    network: float
    reshard: float
    memory: float


def sync_operations(
    parameters: float,
    *,
    links: SyncLinks,
    trainer_ranks: int,
    trained_width: float,
    sent_width: float,
    operations: Sequence[str],
) -> dict[str, float]:
    """Seconds of each operation of a sync.

    - gather: each rank receives the shards of all others;
    - cast: reads the weights twice (largest value per tensor, then conversion) and writes them
      once. No time if the widths are equal. Later operations move the new width;
    - broadcast: sends all weights once over the network, pipelined;
    - reshard: moves all weights once to the layout of the engine;
    - invalidate: drops caches of old weights. It moves no weights.

    Args:
        parameters: number of parameters.
        trainer_ranks: ranks that shard the weights. 1: nothing to gather.
        trained_width: bytes per parameter in the trainer, such as 2.
        sent_width: bytes per parameter in the engine, such as 1 for FP8.
        operations: operations in the order in which they run, such as `OPERATIONS`.

    Returns:
        Operation -> seconds, in the order of `operations`.
    """
    width, seconds = trained_width, dict[str, float]()
    for name in operations:
        size = parameters * width
        if name == "gather":
            seconds[name] = all_gather_seconds(
                size, ranks=trainer_ranks, bytes_per_second=links.gather, latency=0
            )
        elif name == "cast":
            moved = 0 if sent_width == width else 2 * size + parameters * sent_width
            seconds[name], width = moved / links.memory, sent_width
        elif name == "broadcast":
            seconds[name] = broadcast_seconds(size, bytes_per_second=links.network)
        else:
            seconds[name] = size / links.reshard if name == "reshard" else 0.0
    return seconds


def broadcast_sends(engines: int, *, tree: bool) -> list[int]:
    """How often each node sends all weights in a broadcast, the trainer's first.

    In a star the trainer sends them to every engine. In a tree every node that has them sends them
    to one that has not, round by round, so no node sends more than ceil(log2(engines + 1)) times,
    which is the number of rounds.

    Args:
        engines: nodes that receive the weights. The list has them in the order of their rounds.
        tree: whether engines pass the weights on.
    """
    if not tree:
        return [engines] + [0] * engines
    sends = [0]
    while (missing := engines + 1 - len(sends)) > 0:
        senders = min(len(sends), missing)
        sends = [count + (node < senders) for node, count in enumerate(sends)] + [0] * senders
    return sends


OPTIMISATIONS = {"tree": 0.55, "buckets": 0.45, "fp8": 0.30, "zero-copy": 0.22, "overlap": 0.0}
"""Remaining share of the time of a sync after this optimisation and all before it.

Published for a 70B model and engines on other nodes; the shares are not derived. tree: broadcast
over a tree; buckets: send many tensors at once; fp8: send FP8 instead of
bfloat16; zero-copy: receive into the engine's weights; overlap: load during the next prefill, so
that one batch is sampled with weights that are one version older.
"""


def optimised_sync_seconds(seconds: float, enabled: Collection[str]) -> float:
    """Duration of a sync with some of the optimisations.

    Each optimisation multiplies the time by its share divided by the share before it.

    Args:
        seconds: duration without any of them.
        enabled: names from `OPTIMISATIONS`, in any order.
    """
    before = 1.0
    for name, share in OPTIMISATIONS.items():
        if name in enabled:
            seconds *= share / before
        before = share
    return seconds


def cumulative_sync_seconds(seconds: float, enabled: Collection[str]) -> dict[str, float]:
    """Optimisation -> seconds with it and all before it, in the order of `OPTIMISATIONS`."""
    names = [name for name in OPTIMISATIONS if name in enabled]
    return {
        name: optimised_sync_seconds(seconds, names[: count + 1])
        for count, name in enumerate(names)
    }


@dataclass(frozen=True)
class SyncVolume:
    """Bytes that a weight sync sends, and the time to send them.

    Attributes:
        seconds: time to send all copies one after the other.
        tax: `seconds` divided by the duration of a step.
        verdict: "broadcast" (tax up to 0.25): a plain broadcast will do; "bucket" (up to 1): send
            buckets and overlap them with other work; "relay": pass weights on between engines.
    """

    model_bytes: float
    sent_bytes: float
    seconds: float
    tax: float
    verdict: str


def sync_bytes(parameters: float, *, width: float, copies: int) -> float:
    """Bytes of a sync to as many engines as `copies`, with `width` bytes per parameter."""
    return parameters * width * copies


def sync_volume(
    parameters: float, *, width: float, copies: int, bytes_per_second: float, step_seconds: float
) -> SyncVolume:
    """Volume of a sync to several engines, and whether a plain broadcast will do.

    Args:
        parameters: number of parameters.
        width: bytes per parameter.
        copies: engines that receive all weights.
        bytes_per_second: bandwidth of the sender.
        step_seconds: duration of a training step without sync.
    """
    sent = sync_bytes(parameters, width=width, copies=copies)
    seconds = sent / bytes_per_second
    tax = seconds / step_seconds
    verdict = "broadcast" if tax <= 0.25 else "bucket" if tax <= 1 else "relay"
    return SyncVolume(parameters * width, sent, seconds, tax, verdict)
