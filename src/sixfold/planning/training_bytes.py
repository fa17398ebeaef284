"""Memory for weights, gradients and optimizer state, per parameter and sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import checks


@dataclass(frozen=True)
class TrainingState:
    """Bytes per parameter that the trainer holds.

    Attributes:
        weights: the copy that forward and backward passes read.
        master: a float32 copy that the optimizer updates. 0 if it updates `weights`.
        gradients: accumulated gradients.
        moments: both moments of Adam.
    """

    weights: float
    master: float
    gradients: float
    moments: float

    @property
    def total(self) -> float:
        """Bytes per parameter."""
        return self.weights + self.master + self.gradients + self.moments


STATES = {
    "bfloat16": TrainingState(weights=2, master=4, gradients=4, moments=8),
    "bfloat16-gradients": TrainingState(weights=2, master=4, gradients=2, moments=8),
    "float32": TrainingState(weights=4, master=0, gradients=4, moments=8),
    "bfloat16-moments": TrainingState(weights=4, master=0, gradients=4, moments=4),
}
"""Usual states: 18, 16, 16 and 12 bytes per parameter.

18 is Megatron-LM's default (docs/user-guide/features/dist_optimizer.md). The two states of 16 bytes
are bfloat16 gradients with a master copy, and float32 weights that need no master copy. 12 is the
latter with Adam's moments in bfloat16.
"""

INFERENCE_WIDTH = 2
"""Bytes per parameter of a model that is only read, in bfloat16."""


def training_bytes(parameters: float, state: TrainingState) -> float:
    """Bytes of weights, gradients and optimizer state, on all devices together.

    Args:
        parameters: number of trained parameters.
        state: bytes per parameter, such as `STATES["bfloat16"]`.

    Raises:
        UserError: if `parameters` is not above 0.
    """
    checks.positive(parameters=parameters)
    return parameters * state.total


def inference_bytes(parameters: float, width: float) -> float:
    """Bytes of the weights of a model that is only read: reference, reward model or engine.

    Args:
        parameters: number of parameters.
        width: bytes per parameter: 2 for bfloat16 (`INFERENCE_WIDTH`), 1 for FP8 and int8.

    Raises:
        UserError: if a number is not above 0.
    """
    checks.positive(parameters=parameters, width=width)
    return parameters * width


def sharded_bytes_per_parameter(state: TrainingState, *, stage: int, ranks: int) -> float:
    """Bytes per parameter on each of several data-parallel ranks.

    Args:
        state: bytes per parameter without sharding.
        stage: ZeRO stage. 0 shards nothing; 1 the master copy and the moments; 2 also the
            gradients; 3 also the weights, as FSDP does.
        ranks: number of data-parallel ranks.

    Returns:
        Bytes per parameter and rank, without buffers of gathered layers.

    Raises:
        UserError: if the stage is not 0 to 3, or `ranks` is not a whole number of at least 1.
    """
    checks.one_of("stage", str(stage), "0123")
    checks.whole(ranks=ranks)
    parts = [state.master + state.moments, state.gradients, state.weights]
    return sum(part / (ranks if i < stage else 1) for i, part in enumerate(parts))


def devices_needed(total: float, *, device_bytes: float, devices_per_node: int) -> int:
    """Smallest number of devices that hold an evenly sharded state, in whole nodes.

    Args:
        total: bytes to hold.
        device_bytes: memory of one device, in bytes.
        devices_per_node: devices of one node. 1 for no rounding to nodes.

    Raises:
        UserError: if a number is not above 0.
    """
    checks.positive(total=total, device_bytes=device_bytes)
    checks.whole(devices_per_node=devices_per_node)
    return devices_per_node * math.ceil(total / device_bytes / devices_per_node)
