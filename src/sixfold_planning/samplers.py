"""Devices per replica of the sampler."""

from __future__ import annotations

from dataclasses import replace

from sixfold.errors import UserError

from .architectures import Architecture
from .constants import Constants
from .decode_time import Lengths, Sampler, draining_seconds, steady_seconds
from .hardware import Accelerator
from .workload import Workload

WEIGHT_SHARE = 0.6
"""Share of a device's memory that weights of a sampler may fill, as in `point_inputs`."""


class TooLarge(UserError):
    """The devices cannot hold the weights of a model."""


def sampler_of(arch: Architecture, device: Accelerator, devices: int) -> Sampler:
    """Sampler with the fewest devices per replica that hold the weights in bf16.

    Raises:
        TooLarge: if all devices together cannot hold them.
    """
    tensor = 1
    while 2 * arch.params_b > WEIGHT_SHARE * device.memory_gb * tensor and 2 * tensor <= devices:
        tensor *= 2
    if 2 * arch.params_b > device.memory_gb * tensor:
        have = "1 device has" if tensor == 1 else f"{tensor} devices have"
        raise TooLarge(
            f"{devices} x {device.name} cannot hold the weights of {arch.name}:"
            f" {2 * arch.params_b:.0f} GB in bf16, and {have} {device.memory_gb * tensor:g} GB."
            " Use more devices, or a smaller model"
        )
    return Sampler(device, devices, tensor, 2.0)


def fastest_sampler(
    arch: Architecture,
    device: Accelerator,
    devices: int,
    work: Workload,
    topology: str,
    k: Constants,
) -> tuple[Sampler, float]:
    """Sampler with the shortest sampling phase, and the seconds of that phase.

    More devices per replica than the weights need leave room for more sequences, and read the
    weights sooner. Tried are twice the fewest, four times and so on, up to a whole node, if they
    divide the devices.

    Args:
        topology: "colocated", "disaggregated" or "async".

    Raises:
        UserError: if all devices together cannot hold the weights.
    """
    least = sampler_of(arch, device, devices)
    tried, tensor = [least], 2 * least.tensor
    while tensor <= min(devices, device.devices_per_node):
        if devices % tensor == 0:
            tried.append(replace(least, tensor=tensor))
        tensor *= 2
    timed = [(one, sampling_seconds(arch, one, work, topology, k)) for one in tried]
    return min(timed, key=lambda pair: pair[1])


def sampling_seconds(
    arch: Architecture,
    sampler: Sampler,
    work: Workload,
    topology: str,
    k: Constants,
    batches: float = 1.0,
    players: float | None = None,
) -> float:
    """Seconds of the sampling phase of a topology. Other arguments as for `fastest_sampler`.

    Args:
        batches: number of batches of a step that are sampled together. The result is for one.
        players: processes that play the episodes. None: as many as devices sample.
    """
    # Published engines are modelled without shared prompts. Sixfold's computes a prompt once.
    rates = sampler.device.measured
    sharing = 1 if rates is None else work.samples
    again = 1.0 if rates is None else rates.shared_read
    lengths = Lengths(work.prompt_tokens, work.mean_tokens, work.longest_tokens, sharing, again)
    seconds = steady_seconds if topology == "async" else draining_seconds
    # On published hardware, episodes cost nothing beside the model.
    each = work.sequences / (players or sampler.devices)
    outside = 0.0 if rates is None else each * rates.episode_s
    return seconds(arch, sampler, work.sequences * batches, lengths, k) / batches + outside
