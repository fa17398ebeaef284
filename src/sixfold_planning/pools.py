"""Memory of separate pools of devices, trainer with reference and sampler, and their models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .architectures import Architecture
from .hardware import Accelerator
from .memory import (
    INFERENCE_WIDTH,
    STATES,
    cache_tokens,
    chunked_logits_bytes,
    devices_needed,
    group_tokens,
    inference_bytes,
    layer_activation_bytes,
    sharded_bytes_per_parameter,
    training_bytes,
    whole_logits_peak,
)
from .planner import TopologyPlan
from .workload import Workload

USABLE = 0.9
"""Share of a device's memory that a plan may fill. The rest is headroom for fragmentation."""

STATE = STATES["bfloat16"]
"""State of the trainer of a pool."""


@dataclass(frozen=True)
class PoolFit:
    """Memory per device of two pools, in bytes.

    Attributes:
        state: trainer: weights, gradients and optimizer state.
        activations: trainer: activations of a micro-batch.
        reference: weights of the reference model, which is on the trainer's devices.
        logits: logits of a micro-batch and their gradient.
        room: bytes of a device that may be filled.
        cached: tokens of the KV caches that one step needs at the same time.
        cache_room: tokens that fit in all KV caches together.
        least_devices: fewest devices that hold the training state.
        zero_stage: smallest ZeRO stage whose state fits on the trainer's devices. None: none does.
    """

    state: float
    activations: float
    reference: float
    logits: float
    engine_weights: float
    room: float
    cached: int
    cache_room: int
    least_devices: int
    zero_stage: int | None

    @property
    def trainer(self) -> float:
        """Bytes per training device."""
        return self.state + self.activations + self.reference + self.logits

    @property
    def trainer_fits(self) -> bool:
        return self.trainer <= self.room

    @property
    def sampler_fits(self) -> bool:
        """The sampler's weights and the KV cache of at least one sequence in eight fit.

        Sequences that do not fit wait.
        """
        return self.cache_room >= self.cached / 8


def pool_fit(
    arch: Architecture, device: Accelerator, plan: TopologyPlan, work: Workload, *, chunk: int
) -> PoolFit:
    """Memory per device of a topology with two pools.

    Args:
        chunk: tokens whose logits exist at once. 0: all of a micro-batch.
    """
    parameters, tokens = arch.params_b * 1e9, max(1, round(work.packed))
    sampling = plan.sampling_devices - plan.sampling_devices % plan.engine_devices
    training = plan.training_devices
    cached = work.prompts * group_tokens(
        prompt=max(1, round(work.prompt_tokens)),
        completion=max(1, round(work.mean_tokens)),
        samples=work.samples,
        shared=True,
    )
    weights = inference_bytes(parameters, INFERENCE_WIDTH)
    room, activations = USABLE * device.memory_gb * 1e9, _activations(arch, work, tokens)
    logits = whole_logits_peak(tokens=tokens, vocabulary=arch.vocab, width=2)
    if chunk:
        logits = 4 * chunked_logits_bytes(
            tokens=tokens,
            vocabulary=arch.vocab,
            token_chunk=chunk,
            vocabulary_chunk=arch.vocab,
            width=2,
        )
    stages = [
        stage
        for stage in range(4)
        if parameters * sharded_bytes_per_parameter(STATE, stage=stage, ranks=training)
        + activations
        + logits
        <= room
    ]
    state, engine_weights = training_bytes(parameters, STATE), weights / plan.engine_devices
    return PoolFit(
        state=state / training,
        activations=activations,
        reference=weights / training if work.reference else 0.0,
        logits=logits,
        engine_weights=engine_weights,
        room=room,
        cached=cached,
        cache_room=cache_tokens(
            device_bytes=room * sampling,
            used_bytes=engine_weights * sampling,
            per_token=arch.kv_bytes(),
        ),
        least_devices=devices_needed(state, device_bytes=room, devices_per_node=1),
        zero_stage=min(stages, default=None),
    )


def _activations(arch: Architecture, work: Workload, tokens: int) -> float:
    """Bytes of the activations of one micro-batch. One more layer is whole while it is computed."""

    def layer(recompute: str) -> float:
        return layer_activation_bytes(
            length=tokens,
            sequences=1,
            hidden=arch.hidden,
            heads=arch.heads,
            tensor=1,
            sequence_parallel=False,
            recompute=recompute,
        )

    # "none" and "selective" keep no attention scores: the kernel is fused.
    kept = "full" if work.recompute == "full" else "selective"
    return arch.layers * layer(kept) + (layer("selective") if kept == "full" else 0)


@dataclass(frozen=True)
class ModelCopy:
    """One copy of the weights.

    Attributes:
        role: "policy", "critic", "reference", "reward", "judge", "engine" or "snapshot".
        pool: pool of devices that shards the copy.
        bytes_per_parameter: training state for a trained model, else the width of a weight.
    """

    role: str
    pool: str
    bytes_per_parameter: float


POOLS = ("trainer", "reference", "rollout")
COPIES = {
    role: ModelCopy(role, pool, STATE.total if role in ("policy", "critic") else INFERENCE_WIDTH)
    for pool, roles in (
        ("trainer", ("policy", "critic", "snapshot")),
        ("reference", ("reference", "reward", "judge")),
        ("rollout", ("engine",)),
    )
    for role in roles
}
"""Role -> copy. `snapshot` is the old policy that async training keeps for importance ratios."""


@dataclass(frozen=True)
class Method:
    """Models that a method needs.

    Attributes:
        required: roles of models that it always has.
        optional: roles of models that some recipes add or leave out.
        samples: it samples, so an engine holds one more copy of the policy.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    samples: bool = True

    @property
    def models(self) -> tuple[int, int]:
        """Smallest and largest number of distinct models. The engine's copy is not one."""
        return len(self.required), len(self.required) + len(self.optional)


METHODS = {
    "sft": Method(("policy",), samples=False),
    "dpo": Method(("policy", "reference"), samples=False),
    "ppo": Method(("policy", "critic", "reference", "reward")),
    "grpo": Method(("policy", "reference"), ("reward",)),
    "rlaif": Method(("policy", "judge"), ("reference", "critic")),
}
"""Method -> models. GRPO is PPO without a critic; DPO also has no reward model and no engine."""


def model_copies(
    method: str, *, optional: tuple[str, ...], asynchronous: bool
) -> tuple[ModelCopy, ...]:
    """Copies of the weights that a method keeps in memory.

    Args:
        method: a key of `METHODS`.
        optional: optional roles that are present, such as ("reward",).
        asynchronous: keep a snapshot of the old policy.
    """
    chosen = METHODS[method]
    others = ["engine"] * chosen.samples + ["snapshot"] * asynchronous
    return tuple(COPIES[role] for role in (*chosen.required, *optional, *others))


def bytes_per_device(
    copies: tuple[ModelCopy, ...], parameters: float, devices: Mapping[str, int]
) -> dict[str, float]:
    """Bytes of weights and training state on each device of each pool, for pools with a copy.

    All models have the same size and are sharded evenly over the devices of their pool.

    Args:
        devices: pool -> devices that shard a copy. For an engine with replicas, the devices of one
            replica.
    """
    total: dict[str, float] = {}
    for copy in copies:
        size = copy.bytes_per_parameter * parameters / devices[copy.pool]
        total[copy.pool] = total.get(copy.pool, 0.0) + size
    return total
