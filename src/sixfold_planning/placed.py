"""Predicted seconds of a step where samplers work in turn with the trainer, or ahead of it.

Every trainer rank has engines of its own. With `rollout.staleness` S, batches S + 1 of prompts are
always open. Each is sampled, waits for its checks, and is trained. So a step takes the longest of

    training                          one batch after the other: reference, trainer, weight sync
    sampling                          the engines decode up to S + 1 batches together
    (sampling + checks + training) / (S + 1)      a new batch starts when an old one is trained

Trainer and samplers of one machine slow each other down. While both compute, each takes `slowdown`
times as long, so a step takes at least `longer + (slowdown - 1) * shorter` of training and
sampling: the longer of the two with cores of their own, and their sum (slowdown 2) on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import checks
from .architectures import Architecture
from .constants import CONSTANTS
from .decode_time import Sampler
from .hardware import Accelerator, Cluster
from .planner import TopologyPlan, colocated_sync, learning_seconds
from .samplers import sampling_seconds
from .step_time import PhaseSeconds, StepTime
from .workload import Workload

OWN = COLOCATED, IN_TURN, AHEAD = "colocated", "in turn", "ahead"
"""Topologies of Sixfold: samplers in the trainer's process, in their own, and ahead of it."""

HALVINGS = 16
"""Halvings of the interval in which the step of a run ahead is searched."""


@dataclass(frozen=True)
class Placed:
    """Where the roles of a run compute.

    Attributes:
        processes: processes that sample for one rank. 0: the rank itself.
        engines: of these, those that share no device: with N, sampling takes 1 / N of the time.
        staleness: steps by which samples may be older than the weights that they train.
        crowd: time of an engine beside the others, divided by that alone.
        slowdown: time of trainer and samplers while both compute, divided by that of each alone.
    """

    processes: int = 0
    engines: int = 1
    staleness: int = 0
    crowd: float = 1.0
    slowdown: float = 1.0

    @property
    def name(self) -> str:
        """Name of the topology."""
        if self.staleness:
            return AHEAD
        return IN_TURN if self.processes else COLOCATED


def placed_step(
    arch: Architecture,
    cluster: Cluster,
    work: Workload,
    where: Placed,
    *,
    check_s: float = 0.0,
    trained_share: float = 1.0,
) -> TopologyPlan:
    """Predict a step of a run.

    Args:
        where: where the roles compute.
        cluster: devices of the trainer ranks.
        check_s: seconds of a reward check after the last token. 0: it hides behind sampling.
        trained_share: share of the tokens that the trainer computes. It leaves out groups without
            a gradient.

    Returns:
        Phases as they are alone. Training and sync of the step, if it runs ahead, as they are while
        the samplers compute too.

    Raises:
        UserError: if all phases take no time, as a hardware file may say.
    """
    device, count, k = cluster.device, cluster.count, CONSTANTS
    sampler = Sampler(device, count * where.engines, 1, 2.0)

    def sampling(batches: float) -> float:
        own = sampling_seconds(arch, sampler, work, "colocated", k, batches, players=count)
        return own * where.crowd

    reference, train = learning_seconds(arch, device, work, count, k)
    if trained_share != 1.0:
        part = replace(work, prompts=max(1, round(work.prompts * trained_share)))
        train = learning_seconds(arch, device, part, count, k)[1] if trained_share else 0.0
    sync = colocated_sync(arch, device, work, count, k)
    if where.processes:
        sync += file_seconds(arch, device)
    phases = PhaseSeconds(sampling(1.0), check_s, reference, train, sync)
    checks.positive(**{"seconds of all phases": (seconds := phases.total)})
    step = StepTime(seconds, phases.rollout + check_s, reference + train, sync)
    if where.staleness:
        training = reference + train + sync
        seconds = ahead_seconds(sampling, check_s, training, where.staleness, where.slowdown)
        sampled = sampled_seconds(sampling, check_s, training, where.staleness, seconds)
        lost = (where.slowdown - 1) * min(sampled, training)
        slower = 1 + lost / training if training else 1.0
        step = StepTime(seconds, step.sampling, slower * step.training, slower * sync)
    return TopologyPlan(where.name, count, count, 1, phases, step)


def file_seconds(arch: Architecture, device: Accelerator) -> float:
    """Seconds in which all weights pass in float32 through a file in memory."""
    if device.measured is not None:
        return 4e9 * arch.params_b * device.measured.file_byte_s
    return 4 * arch.params_b / CONSTANTS.publish_gb_s


def ahead_seconds(
    sampling: Callable[[float], float],
    check_s: float,
    training: float,
    staleness: int,
    slowdown: float,
) -> float:
    """Seconds of a step in the steady state of a run ahead.

    Of S + 1 open batches, (checks + training) / step are not with the engines, on average (Little's
    law). The engines decode the others together, at least one at a time.

    Args:
        sampling: batches that are sampled together -> seconds of sampling per batch.
        check_s: seconds from the last token of a batch to its last reward.
        training: seconds of reference, trainer and weight sync.
        staleness: S, at least 1.
        slowdown: as in `Placed`.
    """
    batches = staleness + 1

    def needed(step: float) -> float:
        sampled = sampled_seconds(sampling, check_s, training, staleness, step)
        longer, shorter = max(sampled, training), min(sampled, training)
        return max(longer + (slowdown - 1) * shorter, (sampled + check_s + training) / batches)

    # A longer step leaves more batches to the engines, which then need less time for each: `needed`
    # falls, and is equal to the step once.
    low, high = 0.0, sampling(1.0) + check_s + training
    high *= max(1.0, slowdown)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(middle) > middle else (low, middle)
    return needed(high)


def sampled_seconds(
    sampling: Callable[[float], float],
    check_s: float,
    training: float,
    staleness: int,
    step: float,
) -> float:
    """Seconds of sampling per batch of a run ahead, in steps of `step` seconds.

    Args:
        sampling, check_s, training, staleness: as in `ahead_seconds`.
    """
    batches = staleness + 1
    together = batches - (check_s + training) / step
    return sampling(min(batches, max(1.0, together)))
