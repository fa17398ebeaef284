"""Seconds of sampling: a roofline of every decoding step, over the distribution of lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from .architectures import Architecture
from .constants import Constants
from .hardware import Accelerator

POINTS = 64
"""Positions between the first and the last token at which a decoding step is timed."""

HOP_S = 15e-6
"""Seconds of one network hop of a collective between nodes."""

CACHE_SHARE = 0.9
"""Share of memory for weights and KV cache: the default of vLLM."""

LARGEST_BATCH = 256
"""Sequences that an engine runs at once if more are waiting: the default of vLLM."""


@dataclass(frozen=True)
class Sampler:
    """Devices that sample.

    Attributes:
        tensor: devices per replica.
        weight_bytes: bytes per weight: 2 for bf16, 1 for fp8.
        running: most sequences that a replica decodes together, if memory has room for them.
    """

    device: Accelerator
    devices: float
    tensor: int
    weight_bytes: float
    running: float = math.inf

    @property
    def replicas(self) -> float:
        return max(1.0, self.devices / self.tensor)


@dataclass(frozen=True)
class Lengths:
    """Tokens per sequence.

    Attributes:
        prompt: tokens before the first sampled one.
        mean: mean of the sampled tokens.
        longest: bound of the sampled tokens.
        sharing: samples for which a prompt is computed once.
        shared_read: time to read a cached prompt for another of these samples, as a share of that
            for the first.
    """

    prompt: float
    mean: float
    longest: float
    sharing: int = 1
    shared_read: float = 1.0

    @property
    def read(self) -> float:
        """Tokens of a prompt whose reading takes as long as that of one sample's cached prompt."""
        return self.prompt * (1 + (self.sharing - 1) * self.shared_read) / self.sharing


def decay_rate(mean: float, longest: float) -> float:
    """Rate r of the density proportional to exp(-r x / longest) on [0, longest], with that mean.

    It has the largest entropy of all densities with this mean and bound: the least assumption about
    lengths of which only these two are known. A mean above half of the bound gives r < 0.
    """
    share = min(max(mean / longest, 0.02), 0.98)
    low, high = -60.0, 60.0
    for _ in range(60):
        rate = (low + high) / 2
        average = 0.5 if abs(rate) < 1e-6 else 1 / rate - 1 / math.expm1(rate)
        low, high = (rate, high) if average > share else (low, rate)
    return (low + high) / 2


def share_longer(position: float, rate: float) -> float:
    """Share of sequences longer than `position`, which is a share of the bound."""
    if abs(rate) < 1e-6:
        return 1 - position
    return (math.exp(-rate * position) - math.exp(-rate)) / -math.expm1(-rate)


@lru_cache(maxsize=256)
def shares_running(mean: float, longest: float) -> tuple[float, ...]:
    """Share of sequences that still run at each of `POINTS` positions."""
    rate = decay_rate(mean, longest)
    return tuple(share_longer((point + 0.5) / POINTS, rate) for point in range(POINTS))


def step_timer(
    arch: Architecture, sampler: Sampler, k: Constants
) -> Callable[[float, float], float]:
    """Function (batch, context) -> seconds of one decoding step of one replica.

    The step takes the longest of reading weights and cache, arithmetic, and launching kernels.
    Tensor parallelism adds two all-reduces per layer. On a measured device the step takes what the
    engine took. All that does not depend on batch and context is computed once: a drain asks for
    many steps.
    """
    device, tensor = sampler.device, sampler.tensor
    if (measured := device.measured) is not None:
        return lambda batch, context: measured.decode_seconds(arch, batch, context) / tensor
    read_rate = tensor * device.bandwidth_gb_s * 1e9 * k.bandwidth
    rate = tensor * device.peak("bf16") * k.eager
    cached, products = arch.kv_bytes(), 2 * arch.matmul_params
    attention = 2 * arch.attention_flops(1.0)
    read = arch.reading()
    launch = arch.layers * k.decode_layer_s
    hop = per_sequence = 0.0
    if tensor > 1:
        hops = math.ceil(tensor / device.devices_per_node) - 1
        hop = arch.layers * 4 * hops * HOP_S
        per_sequence = arch.layers * 8 * arch.hidden / device.bandwidth_between(tensor)

    def seconds(batch: float, context: float) -> float:
        memory = (read(batch) * sampler.weight_bytes + batch * context * cached) / read_rate
        compute = batch * (products + attention * context) / rate
        return max(memory, compute, launch) + hop + per_sequence * batch

    return seconds


def step_seconds(
    arch: Architecture, sampler: Sampler, batch: float, context: float, k: Constants
) -> float:
    """Seconds of one decoding step of one replica. See `step_timer`."""
    return step_timer(arch, sampler, k)(batch, context)


def fitting_sequences(arch: Architecture, sampler: Sampler, lengths: Lengths) -> float:
    """Sequences of mean length whose KV cache fits beside the weights of one replica.

    At least 8.
    """
    room = sampler.tensor * sampler.device.memory_gb * 1e9 * CACHE_SHARE
    room -= arch.params_b * 1e9 * sampler.weight_bytes
    return max(8.0, room / (arch.kv_bytes() * (lengths.prompt + lengths.mean)))


def prompt_seconds(arch: Architecture, sampler: Sampler, prompt: float, k: Constants) -> float:
    """Seconds in which one replica computes a prompt of `prompt` tokens."""
    if sampler.device.measured is not None:
        return sampler.device.measured.prompt_seconds(arch, prompt) / sampler.tensor
    rate = sampler.tensor * sampler.device.peak("bf16") * k.eager
    return 2 * arch.matmul_params * prompt / rate


def draining_seconds(
    arch: Architecture, sampler: Sampler, sequences: float, lengths: Lengths, k: Constants
) -> float:
    """Seconds until the last of `sequences` ends. The longest one reaches the bound.

    Sequences that do not fit in the KV cache wait, and start as others end.
    """
    batch = max(1.0, sequences / sampler.replicas)
    replica = replace(sampler, devices=sampler.tensor)
    return _replica_drains(arch, replica, batch, lengths, k)


@lru_cache(maxsize=8192)
def _replica_drains(
    arch: Architecture, replica: Sampler, batch: float, lengths: Lengths, k: Constants
) -> float:
    """`draining_seconds` of one replica with `batch` sequences.

    Cached: the search for the best split of the devices asks for equal batches many times.
    """
    running = min(batch, replica.running, fitting_sequences(arch, replica, lengths))
    prompt = lengths.read
    middle = prompt + lengths.mean / 2
    waiting = (batch / running - 1) * lengths.mean
    step = step_timer(arch, replica, k)
    seconds, spacing = waiting * step(running, middle), lengths.longest / POINTS
    for point, share in enumerate(shares_running(lengths.mean, lengths.longest)):
        context = prompt + (point + 0.5) * spacing
        seconds += step(max(1.0, running * share), context) * spacing
    prompts = batch / lengths.sharing
    return seconds + prompts * prompt_seconds(arch, replica, lengths.prompt, k)


def steady_seconds(
    arch: Architecture, sampler: Sampler, sequences: float, lengths: Lengths, k: Constants
) -> float:
    """Seconds per `sequences` if new ones start whenever others end: no drain at the end."""
    batch = min(float(LARGEST_BATCH), max(1.0, 4 * sequences / sampler.replicas))
    step = step_seconds(arch, sampler, batch, lengths.read + lengths.mean / 2, k)
    return sequences / sampler.replicas * lengths.mean / batch * step
