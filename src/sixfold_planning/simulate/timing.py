"""Durations that the simulation uses, from the time model of `planning`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .. import checks
from ..architectures import Architecture
from ..constants import Constants
from ..decode_time import (
    LARGEST_BATCH,
    POINTS,
    Lengths,
    Sampler,
    fitting_sequences,
    prompt_seconds,
    step_timer,
)
from ..hardware import Accelerator
from ..planner import TopologyPlan, learning_seconds
from ..workload import Workload


@dataclass(frozen=True)
class Timing:
    """Durations of one topology.

    Attributes:
        replicas: engines that sample.
        slots: sequences that an engine runs at once. Others wait.
        stride: most tokens that are decoded before a decoding step is timed again.
        decode: seconds of one decoding step of an engine, from the number of its sequences and the
            mean number of tokens that they have sampled so far.
        prefill: seconds in which an engine computes one prompt, and decodes nothing. 0 if prompts
            are computed beside decoding.
        learn: seconds of reference and training for a batch, from the mean length of its samples.
        sync: seconds of a weight sync.

    Raises:
        UserError: if a decoding step takes no time, as a hardware file may say.
    """

    sampling_devices: int
    training_devices: int
    replicas: int
    slots: int
    stride: float
    decode: Callable[[int, float], float]
    prefill: float
    learn: Callable[[float], float]
    sync: float

    def __post_init__(self) -> None:
        checks.positive(decode_seconds=self.decode(1, 0.0))


def planned_timing(
    arch: Architecture, device: Accelerator, plan: TopologyPlan, work: Workload, k: Constants
) -> Timing:
    """Durations of a planned topology.

    An asynchronous engine computes prompts beside decoding, as in `steady_seconds`, and runs at
    most `LARGEST_BATCH` sequences. The KV cache limits the sequences in every topology.
    """
    sampler = Sampler(device, plan.sampling_devices, plan.engine_devices, 2.0)
    lengths = Lengths(work.prompt_tokens, work.mean_tokens, work.longest_tokens)
    steady = plan.name == "async"
    slots = int(fitting_sequences(arch, sampler, lengths))

    step = step_timer(arch, sampler, k)

    def decode(sequences: int, sampled: float) -> float:
        return step(sequences, work.prompt_tokens + sampled)

    def learn(mean: float) -> float:
        batch = replace(work, mean_tokens=min(mean, work.longest_tokens))
        return sum(learning_seconds(arch, device, batch, plan.training_devices, k))

    prefill = prompt_seconds(arch, sampler, work.prompt_tokens, k)
    if device.measured is not None:
        prefill /= work.samples  # one computation for all samples of a group
    return Timing(
        sampling_devices=plan.sampling_devices,
        training_devices=plan.training_devices,
        replicas=int(sampler.replicas),
        slots=min(slots, LARGEST_BATCH) if steady else slots,
        stride=work.longest_tokens / POINTS,
        decode=decode,
        prefill=0.0 if steady else prefill,
        learn=learn,
        sync=plan.phases.sync,
    )
