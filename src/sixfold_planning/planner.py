"""Seconds of a reinforcement-learning step on given devices, for each topology.

`sixfold plan` prints the result. Sampling and training are timed by `decode_time` and `train_time`,
a step is put together by `step_time`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from .architectures import Architecture
from .balance import Split, balanced_split
from .constants import Constants
from .decode_time import Sampler
from .flops import TRAINING, attention_flops_per_token, flops_per_token, model_flops_utilisation
from .hardware import Accelerator, Cluster
from .samplers import fastest_sampler, sampler_of, sampling_seconds
from .step_time import PhaseSeconds, StepTime, step_time
from .sync_time import OPERATIONS, SyncLinks, sync_operations
from .train_time import FORWARD, Engine, Layout, Pass, pass_seconds, training_pass
from .workload import Workload


@dataclass(frozen=True)
class TopologyPlan:
    """Prediction for one topology.

    Attributes:
        name: "colocated", "disaggregated" or "async".
        engine_devices: devices per replica of the sampler (tensor parallelism).
    """

    name: str
    sampling_devices: int
    training_devices: int
    engine_devices: int
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


@lru_cache(maxsize=8192)
def learning_seconds(
    arch: Architecture,
    device: Accelerator,
    work: Workload,
    devices: int,
    k: Constants,
    layout: Layout | None = None,
) -> tuple[float, float]:
    """Seconds of scoring and of training on devices that shard the model.

    Scoring is one forward pass for each of reference, critic and proximal log-probs. A critic has
    the policy's size and is trained as often.

    Args:
        layout: how they split the model. None: they only shard it.
    """
    layout = layout or Layout(devices, 1, 1, 1)
    engine = Engine(ring_attention=layout.context > 1)
    packs = max(1.0, work.sequences * work.trained / work.packed / layout.replicas)

    def seconds(kind: Pass) -> float:
        return pass_seconds(arch, device, layout, work.packed, packs, work.trained, kind, engine, k)

    if device.measured is not None:
        forward, train = device.measured.learning_seconds(arch, work, devices)
    else:
        forward = seconds(FORWARD)
        train = seconds(training_pass(work.recompute, adapters=work.adapters))
    scored = work.reference + work.critic + work.proximal
    return scored * forward, train * work.epochs * (2 if work.critic else 1)


def weight_sync(
    arch: Architecture,
    device: Accelerator,
    *,
    trainer_ranks: int,
    devices: int,
    sent_width: float,
    k: Constants,
) -> dict[str, float]:
    """Seconds of each operation that brings the trainer's bf16 weights to other devices.

    Args:
        devices: devices of trainer and sampler together: they decide between link and network.
        sent_width: bytes per parameter after the cast.
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
        sent_width=sent_width,
        operations=OPERATIONS,
    )


def colocated_sync(
    arch: Architecture, device: Accelerator, work: Workload, ranks: int, k: Constants
) -> float:
    """Seconds of a weight sync between trainer and engine of each of several ranks.

    Every device gets all weights from the shards of the others, and keeps a copy. If the copy is
    narrower, the cast writes it.
    """
    if ranks == 1 and work.shared_weights:
        return 0.0
    found = weight_sync(
        arch, device, trainer_ranks=ranks, devices=ranks, sent_width=work.sent_width, k=k
    )
    copy = 4e9 * arch.params_b / (device.bandwidth_gb_s * 1e9 * k.bandwidth)
    if device.measured is not None:
        copy = device.measured.sync_seconds(arch)
    return found["gather"] + (found["cast"] or copy)


def _phases(
    arch: Architecture,
    device: Accelerator,
    work: Workload,
    k: Constants,
    *,
    rollout: float,
    sampling: int,
    training: int,
    topology: str,
) -> PhaseSeconds:
    reference, train = learning_seconds(arch, device, work, training, k)
    if topology != "colocated":
        operations = weight_sync(
            arch,
            device,
            trainer_ranks=training,
            devices=sampling + training,
            sent_width=work.sent_width,
            k=k,
        )
        sync = sum(operations.values())
    else:
        sync = colocated_sync(arch, device, work, training, k)
    return PhaseSeconds(
        rollout=rollout, verifier=0.0, reference=reference, trainer=train, sync=sync
    )


def compare_topologies(
    arch: Architecture, cluster: Cluster, work: Workload, k: Constants
) -> Comparison:
    """Predict a step in each topology. Reward checks are not included: they hide behind sampling.

    Two pools get the split with the shortest step. Colocated is the only topology if a replica
    needs all devices.

    Raises:
        UserError: if the devices cannot hold the model's weights.
    """
    device, count = cluster.device, cluster.count
    together = planned_topology(
        arch, device, work, k, sampling=count, training=count, topology="colocated"
    )
    found = {"colocated": together}
    least = sampler_of(arch, device, count).tensor
    if least >= count:
        return Comparison(found, None)
    for topology in ("disaggregated", "async"):
        found[topology] = _apart(arch, device, work, k, count, topology)
    plan = found["disaggregated"]
    learning = plan.phases.reference + plan.phases.trainer
    split = Split(plan.sampling_devices, plan.training_devices, plan.phases.rollout, learning)
    return Comparison(found, split)


def _apart(
    arch: Architecture, device: Accelerator, work: Workload, k: Constants, count: int, topology: str
) -> TopologyPlan:
    """Two pools with the split that has the shortest step. Whole replicas sample.

    The search starts at the balanced split, which takes rates as proportional to the number of
    devices. It ends where no move of up to 16 replicas, or of a power of two up to a 64th of all,
    makes the step shorter: fewer sequences per replica are not decoded in proportionally less time.
    """
    least = sampler_of(arch, device, count).tensor
    most = (count - 1) // least

    @cache
    def planned(replicas: int) -> TopologyPlan:
        used = replicas * least
        return planned_topology(
            arch, device, work, k, sampling=used, training=count - used, topology=topology
        )

    whole = planned_topology(
        arch, device, work, k, sampling=count, training=count, topology=topology
    ).phases
    balanced = balanced_split(
        count,
        rollout_work=whole.rollout * count,
        trainer_work=(whole.reference + whole.trainer) * count,
    )
    best = min(most, max(1, balanced.rollout // least))
    sizes = [2**power for power in range(max(5, (most // 64).bit_length()))]
    while True:
        moves = (best + sign * size for size in sizes for sign in (-1, 1))
        tried = [best, *(move for move in moves if 1 <= move <= most)]
        better = min(tried, key=lambda replicas: planned(replicas).step.seconds)
        if better == best:
            return planned(best)
        best = better


def planned_topology(
    arch: Architecture,
    device: Accelerator,
    work: Workload,
    k: Constants,
    *,
    sampling: int,
    training: int,
    topology: str,
    engine_devices: int = 0,
) -> TopologyPlan:
    """Predict a step on given devices.

    Args:
        training: devices that train. Colocated: the same ones.
        topology: "colocated", "disaggregated" or "async".
        engine_devices: devices per replica of the sampler, 1 for a run of Sixfold: each of its
            ranks has an engine of its own. 0: as many as sample fastest.

    Raises:
        UserError: if the sampling devices cannot hold the model's weights.
    """
    if engine_devices:
        sampler = Sampler(device, sampling, engine_devices, 2.0)
        rollout = sampling_seconds(arch, sampler, work, topology, k)
    else:
        sampler, rollout = fastest_sampler(arch, device, sampling, work, topology, k)
    phases = _phases(
        arch,
        device,
        work,
        k,
        rollout=rollout,
        sampling=sampling,
        training=training,
        topology=topology,
    )
    step = step_time(phases, topology=topology, sync_hidden=False)
    return TopologyPlan(topology, sampling, training, sampler.tensor, phases, step)


def training_utilisation(
    arch: Architecture, device: Accelerator, work: Workload, *, seconds: float, devices: int
) -> float:
    """Share of the peak that the useful FLOPs of training reach (MFU)."""
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
