"""Seconds of a reinforcement-learning step on given devices, for each topology.

`sixfold plan` prints the result. Sampling and training are timed by `decode_time` and `train_time`,
a step is put together by `step_time`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from . import checks
from .architectures import Architecture
from .balance import Split, balanced_split
from .constants import Constants
from .decode_time import Lengths, Sampler, draining_seconds, steady_seconds
from .flops import TRAINING, attention_flops_per_token, flops_per_token, model_flops_utilisation
from .hardware import Accelerator, Cluster
from .step_time import PhaseSeconds, StepTime, step_time
from .sync_time import OPERATIONS, SyncLinks, sync_operations
from .train_time import FORWARD, Engine, Layout, Pass, pass_seconds, training_pass

WEIGHT_SHARE = 0.6
"""Share of a device's memory that weights of a sampler may fill, as in `point_inputs`."""


@dataclass(frozen=True)
class Workload:
    """Work of one step.

    Attributes:
        prompts: prompts per step.
        samples: samples per prompt.
        prompt_tokens: mean length of a prompt.
        mean_tokens: mean length of a completion.
        longest_tokens: bound of the length of a completion.
        packed: tokens per micro-batch of one trainer rank.
        recompute: activation checkpointing: "none", "selective" or "full".
        adapters: train adapters (LoRA) only.
        shared_prompt: the trainer computes a prompt once for all of its samples.
        reference: score a reference model.
        critic: train a critic of the policy's size.
        shared_weights: sampler and trainer of one device share one set of weights: no sync.
    """

    prompts: int
    samples: int
    prompt_tokens: float
    mean_tokens: float
    longest_tokens: float
    packed: float
    recompute: str
    adapters: bool
    shared_prompt: bool
    reference: bool
    critic: bool
    shared_weights: bool

    def __post_init__(self) -> None:
        checks.whole(prompts=self.prompts, samples=self.samples)
        checks.positive(
            prompt_tokens=self.prompt_tokens,
            mean_tokens=self.mean_tokens,
            longest_tokens=self.longest_tokens,
            packed=self.packed,
        )
        if self.mean_tokens > self.longest_tokens:
            raise UserError(
                f"the mean length of completions ({self.mean_tokens:g} tokens) is above their bound"
                f" of {self.longest_tokens:g}. Lower the mean, or raise the bound"
            )

    @property
    def sequences(self) -> int:
        """Trajectories per step."""
        return self.prompts * self.samples

    @property
    def trained(self) -> float:
        """Tokens per trajectory in the trainer's forward pass."""
        return self.mean_tokens + self.prompt_tokens / (self.samples if self.shared_prompt else 1)


@dataclass(frozen=True)
class TopologyPlan:
    """Prediction for one topology.

    Attributes:
        name: "colocated", "disaggregated" or "async".
        sampling_devices: devices that sample.
        training_devices: devices that train. Colocated: the same devices.
        phases: seconds of each phase.
        step: duration of a step and idle times.
    """

    name: str
    sampling_devices: int
    training_devices: int
    phases: PhaseSeconds
    step: StepTime


@dataclass(frozen=True)
class Comparison:
    """Topologies on the same devices, and the split between two pools.

    Attributes:
        topologies: by name. Colocated alone if there is one device.
        split: split of the devices with the shortest disaggregated step. None for one device.
    """

    topologies: Mapping[str, TopologyPlan]
    split: Split | None


def sampler_of(arch: Architecture, device: Accelerator, devices: int) -> Sampler:
    """Sampler with the fewest devices per replica that hold the weights in bf16.

    Raises:
        UserError: if all devices together cannot hold them.
    """
    tensor = 1
    while 2 * arch.params_b > WEIGHT_SHARE * device.memory_gb * tensor and 2 * tensor <= devices:
        tensor *= 2
    if 2 * arch.params_b > device.memory_gb * tensor:
        raise UserError(
            f"{devices} x {device.name} cannot hold the weights of {arch.name}:"
            f" {2 * arch.params_b:.0f} GB in bf16, and {tensor} devices have"
            f" {device.memory_gb * tensor:g} GB. Use more devices, or a smaller model"
        )
    return Sampler(device, devices, tensor, 2.0)


def learning_seconds(
    arch: Architecture, device: Accelerator, work: Workload, devices: int, k: Constants
) -> tuple[float, float]:
    """Seconds of the reference and of training on devices that shard the model.

    Args:
        arch: the model.
        device: the accelerator.
        work: work of a step.
        devices: devices that train.
        k: fitted constants.
    """
    layout = Layout(devices, 1, 1, 1)
    packs = max(1.0, work.sequences * work.trained / work.packed / devices)

    def seconds(kind: Pass) -> float:
        return pass_seconds(
            arch, device, layout, work.packed, packs, work.trained, kind, Engine(), k
        )

    train = seconds(training_pass(work.recompute, adapters=work.adapters))
    reference = seconds(FORWARD) if work.reference else 0.0
    # A critic is scored once and trained once.
    critic = seconds(FORWARD) + train if work.critic else 0.0
    return reference, train + critic


def weight_sync(
    arch: Architecture, device: Accelerator, *, trainer_ranks: int, devices: int, k: Constants
) -> dict[str, float]:
    """Seconds of each operation that brings bf16 weights to other devices.

    Args:
        arch: the model.
        device: the accelerator.
        trainer_ranks: devices of the trainer, which shard the weights.
        devices: devices of trainer and sampler together: they decide between link and network.
        k: fitted constants.
    """
    links = SyncLinks(
        gather=device.bandwidth_between(trainer_ranks) * k.bandwidth,
        network=device.bandwidth_between(devices) * k.sync,
        reshard=device.link_gb_s * 1e9 * k.bandwidth,
        memory=device.bandwidth_gb_s * 1e9 * k.bandwidth,
    )
    return sync_operations(
        arch.params_b * 1e9,
        links=links,
        trainer_ranks=trainer_ranks,
        trained_width=2,
        sent_width=2,
        operations=OPERATIONS,
    )


def _phases(
    arch: Architecture,
    device: Accelerator,
    work: Workload,
    k: Constants,
    *,
    sampling: int,
    training: int,
    topology: str,
) -> PhaseSeconds:
    lengths = Lengths(work.prompt_tokens, work.mean_tokens, work.longest_tokens)
    sample = steady_seconds if topology == "async" else draining_seconds
    reference, train = learning_seconds(arch, device, work, training, k)
    sync = 0.0
    if topology != "colocated":
        both = sampling + training
        sync = sum(weight_sync(arch, device, trainer_ranks=training, devices=both, k=k).values())
    elif training > 1 or not work.shared_weights:
        # Every device gets all weights from the shards of the others, and keeps a copy.
        operations = weight_sync(arch, device, trainer_ranks=training, devices=training, k=k)
        sync = operations["gather"] + 4e9 * arch.params_b / (
            device.bandwidth_gb_s * 1e9 * k.bandwidth
        )
    return PhaseSeconds(
        rollout=sample(arch, sampler_of(arch, device, sampling), work.sequences, lengths, k),
        verifier=0.0,
        reference=reference,
        trainer=train,
        sync=sync,
    )


def compare_topologies(
    arch: Architecture, cluster: Cluster, work: Workload, k: Constants
) -> Comparison:
    """Predict a step in each topology. Reward checks are not included: they hide behind sampling.

    Two pools get the split that balances their device-seconds, in whole replicas of the sampler.
    Colocated is the only topology if a replica needs all devices.

    Raises:
        UserError: if the devices cannot hold the model's weights.
    """
    device, count = cluster.device, cluster.count
    together = _phases(arch, device, work, k, sampling=count, training=count, topology="colocated")
    found = {"colocated": _planned("colocated", count, count, together)}
    least = sampler_of(arch, device, count).tensor
    if least >= count:
        return Comparison(found, None)
    splits = {}
    for topology in ("disaggregated", "async"):
        whole = _phases(arch, device, work, k, sampling=count, training=count, topology=topology)
        splits[topology] = balanced_split(
            count,
            rollout_work=whole.rollout * count,
            trainer_work=(whole.reference + whole.trainer) * count,
        )
        sampling = splits[topology].rollout
        sampling = max(least, sampling - sampling % least)  # whole replicas
        phases = _phases(
            arch, device, work, k, sampling=sampling, training=count - sampling, topology=topology
        )
        found[topology] = _planned(topology, sampling, count - sampling, phases)
    return Comparison(found, splits["disaggregated"])


def _planned(name: str, sampling: int, training: int, phases: PhaseSeconds) -> TopologyPlan:
    step = step_time(phases, topology=name, reference_on="trainer", sync_hidden=False)
    return TopologyPlan(name, sampling, training, phases, step)


def training_utilisation(
    arch: Architecture, device: Accelerator, work: Workload, *, seconds: float, devices: int
) -> float:
    """Share of the peak that the useful FLOPs of training reach (MFU).

    Args:
        arch: the model.
        device: the accelerator.
        work: work of a step.
        seconds: predicted duration of training.
        devices: devices that train.
    """
    attention = attention_flops_per_token(
        layers=arch.softmax_layers,
        heads=arch.heads,
        key_dim=arch.head_size,
        value_dim=arch.value_size or arch.head_size,
        length=max(1, round(work.trained)),
        causal=True,
    )
    return model_flops_utilisation(
        flops=flops_per_token(arch.matmul_params, TRAINING) + 3 * attention,
        tokens_per_second=work.sequences * work.trained / seconds,
        devices=devices,
        peak=device.peak("bf16"),
    )
