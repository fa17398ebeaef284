"""Seconds of a reinforcement-learning step, by phase and topology."""

from __future__ import annotations

from dataclasses import dataclass

from .architectures import Architecture
from .constants import Constants
from .decode_time import Lengths, Sampler, draining_seconds, steady_seconds
from .train_time import FORWARD, Engine, Layout, Pass, pass_seconds, training_pass

COLOCATED, ONE_STEP_OFF, ASYNC = "colocated", "one-step-off", "async"
STAGES = 3
"""Stages of a weight sync: gather, broadcast, load. A pipelined sync hides all but one."""


@dataclass(frozen=True)
class RlStep:
    """One step.

    Attributes:
        topology: COLOCATED, ONE_STEP_OFF or ASYNC.
        sampler: devices that sample.
        layout: how the trainer splits the model.
        trained: mean tokens per trajectory that the trainer sees.
        packed: tokens per micro-batch.
        reference: score a reference model.
        critic: train a critic of the policy's size, and score a reward model.
    """

    topology: str
    sampler: Sampler
    layout: Layout
    engine: Engine
    sequences: float
    lengths: Lengths
    trained: float
    packed: float
    reference: bool
    critic: bool


@dataclass(frozen=True)
class Phases:
    """Seconds per phase; `total` is the step."""

    sample: float
    logprob: float
    reference: float
    train: float
    sync: float
    total: float


def sync_seconds(
    arch: Architecture, network_gb_s: float, *, pipelined: bool, k: Constants
) -> float:
    """Seconds to bring bf16 weights from the trainer to the sampler over one network card."""
    size = 2 * arch.params_b * 1e9 * (1 if pipelined else STAGES)
    return size / (network_gb_s * 1e9 * k.sync)


def step_phases(arch: Architecture, step: RlStep, k: Constants) -> Phases:
    """Seconds of every phase of a step.

    Colocated: the phases follow one another, and the devices switch between sampling and training.
    One step off: sampling and training overlap; the weight sync does not. Async: the same, and
    sampling never drains.
    """

    def seconds(work: Pass) -> float:
        packs = max(1.0, step.sequences * step.trained / step.packed / step.layout.replicas)
        return pass_seconds(
            arch, device, step.layout, step.packed, packs, step.trained, work, step.engine, k
        )

    device = step.sampler.device
    models = 2 if step.critic else 1
    logprob = models * seconds(FORWARD)
    reference = models * seconds(FORWARD) if step.reference else 0.0
    train = models * seconds(training_pass("full", adapters=False))
    sampling = steady_seconds if step.topology == ASYNC else draining_seconds
    sample = sampling(arch, step.sampler, step.sequences, step.lengths, k)
    learning = logprob + reference + train
    devices = step.layout.devices + (0 if step.topology == COLOCATED else step.sampler.devices)
    speed = device.bandwidth_between(devices) / 1e9
    if step.topology == COLOCATED:
        sync = sync_seconds(arch, speed, pipelined=True, k=k)
        total = sample + learning + sync + k.switch_s
    else:
        sync = 2 * arch.params_b / (speed * k.bandwidth)
        total = max(sample, learning) + sync
    return Phases(sample, logprob, reference, train, sync, total)
