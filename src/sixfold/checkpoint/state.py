"""Progress of a run.

A checkpoint stores everything that does not follow from the recipe and the step: the components of
a registry (`checkpoint/registry.py`) and the inputs of the run (`run/inputs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..checkpointable import Checkpointable, WithoutTensors
from .checkpoint import Checkpoint
from .registry import Registry

PROGRESS = "progress"
"""Name of `RunState` in the registry."""


@dataclass
class RunState:
    """Progress of a run.

    Sampling noise and task order are not stored: they depend only on the seed and the step.

    Attributes:
        step: RL steps done.
        ema: moving average of the reward. None before the first step.
        tokens_total: sampled tokens.
        seconds: wall time of all processes of the run so far.
        warming_up: True while the SFT stage is unfinished.
        unlogged: metrics of the last step, if the run stopped before they were written. A resume
            completes and writes them.
        before: held-out evaluation before RL, with its samples. Empty before it is done.
        preflight: result of the pre-flight. Empty if it was switched off.
    """

    step: int = 0
    ema: float | None = None
    tokens_total: int = 0
    seconds: float = 0.0
    sft_steps: int = 0
    warming_up: bool = False
    unlogged: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    preflight: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RunState:
        return cls(**checkpoint.payload.components[PROGRESS])

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, state[each.name])


def with_progress(state: RunState, others: Registry) -> dict[str, Checkpointable]:
    """Registry of a run: its progress and the other components."""
    return {PROGRESS: WithoutTensors(state), **others}
