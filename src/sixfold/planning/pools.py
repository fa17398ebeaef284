"""Memory of separate pools of devices: trainer, reference and sampler."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import layer_activation_bytes
from .architectures import Architecture
from .hardware import Accelerator
from .kv_cache import cache_tokens, group_tokens
from .logits import chunked_logits_bytes, whole_logits_peak
from .memory_envelope import PoolMemory, pool_memory
from .planner import TopologyPlan
from .training_bytes import STATES, devices_needed, sharded_bytes_per_parameter, training_bytes
from .workload import Workload

USABLE = 0.9
"""Share of a device's memory that a plan may fill. The rest is headroom for fragmentation."""


@dataclass(frozen=True)
class PoolFit:
    """Memory per device of two pools, in bytes.

    Attributes:
        memory: by purpose. The reference is on the trainer's devices.
        logits: logits of a micro-batch and their gradient.
        room: bytes of a device that may be filled.
        cached: tokens of the KV caches that one step needs at the same time.
        cache_room: tokens that fit in all KV caches together.
        least_devices: fewest devices that hold the training state.
        zero_stage: smallest ZeRO stage whose state fits on the trainer's devices. None: none does.
    """

    memory: PoolMemory
    logits: float
    room: float
    cached: int
    cache_room: int
    least_devices: int
    zero_stage: int | None

    @property
    def trainer(self) -> float:
        """Bytes per training device."""
        return self.memory.trainer + self.memory.reference + self.logits

    @property
    def trainer_fits(self) -> bool:
        """The trainer fits."""
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
        arch: the model.
        device: the accelerator.
        plan: the topology.
        work: work of a step.
        chunk: tokens whose logits exist at once. 0: all of a micro-batch.
    """
    parameters, tokens = arch.params_b * 1e9, max(1, round(work.packed))
    sampling = plan.sampling_devices - plan.sampling_devices % plan.engine_devices
    cached = work.prompts * group_tokens(
        prompt=max(1, round(work.prompt_tokens)),
        completion=max(1, round(work.mean_tokens)),
        samples=work.samples,
        shared=True,
    )
    memory = pool_memory(
        parameters,
        trainer_devices=plan.training_devices,
        reference_devices=plan.training_devices,
        rollout_devices=sampling,
        devices_per_engine=plan.engine_devices,
        activations_per_device=_activations(arch, work, tokens),
        cached_tokens=cached,
        kv_per_token=round(arch.kv_bytes()),
    )
    room = USABLE * device.memory_gb * 1e9
    if not work.reference:
        memory = PoolMemory(
            memory.state, memory.activations, 0.0, memory.engine_weights, memory.kv_cache
        )
    logits = whole_logits_peak(tokens=tokens, vocabulary=arch.vocab, width=2)
    if chunk:
        logits = 4 * chunked_logits_bytes(
            tokens=tokens,
            vocabulary=arch.vocab,
            token_chunk=chunk,
            vocabulary_chunk=arch.vocab,
            width=2,
        )
    state = STATES["bfloat16"]
    stages = [
        stage
        for stage in range(4)
        if parameters * sharded_bytes_per_parameter(state, stage=stage, ranks=plan.training_devices)
        + memory.activations
        + logits
        <= room
    ]
    return PoolFit(
        memory=memory,
        logits=logits,
        room=room,
        cached=cached,
        cache_room=cache_tokens(
            device_bytes=room * sampling,
            used_bytes=memory.engine_weights * sampling,
            per_token=arch.kv_bytes(),
        ),
        least_devices=devices_needed(
            training_bytes(parameters, state), device_bytes=room, devices_per_node=1
        ),
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
