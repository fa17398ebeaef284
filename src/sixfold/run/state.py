"""Progress of a run, and the checkpoints of its two stages.

A checkpoint stores everything that does not follow from the recipe and the step: the components of
a registry (`run/registry.py`) and the inputs of the run (`run/inputs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..checkpointable import Checkpointable, WithoutTensors
from ..engine.weights import first_not_finite
from ..trainer.trainer import TrainingDiverged
from .assemble import World
from .best import BestSteps
from .checkpoint import Checkpoint, save_checkpoint
from .folder import RunFolder
from .inputs import Inputs
from .listing import list_checkpoints
from .payload import Payload
from .publication import prune
from .registry import Registry, tensors_of

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
        sft_steps: SFT steps done.
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
        """Progress stored in a checkpoint."""
        return cls(**checkpoint.payload.components[PROGRESS])

    def state(self) -> dict[str, Any]:
        """The whole progress as JSON."""
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for each in fields(self):
            setattr(self, each.name, state[each.name])


def with_progress(state: RunState, others: Registry) -> dict[str, Checkpointable]:
    """Registry of a run: its progress and the other components.

    Args:
        state: progress of the run.
        others: components of the stage.
    """
    return {PROGRESS: WithoutTensors(state), **others}


def publish(
    run: RunFolder,
    world: World,
    stage: Literal["sft", "step"],
    registry: Registry,
    states: Mapping[str, Mapping[str, Any]],
    inputs: Inputs,
    best: BestSteps | None = None,
) -> Path:
    """Publish a checkpoint with the current tensors.

    The oldest checkpoints beyond `checkpoint.keep` are deleted.

    Args:
        run: folder of the run, locked.
        world: model and settings.
        stage: stage that the checkpoint belongs to.
        registry: components whose tensors are saved.
        states: state of these components when their tensors last changed.
        inputs: inputs of the run.
        best: steps whose checkpoints are kept too.

    Returns:
        The path of the checkpoint.

    Raises:
        TrainingDiverged: if a weight or another tensor is not finite. Nothing is written then.
        UserError: if the disk refuses the checkpoint.
    """
    tensors = tensors_of(registry)
    _check_finite(world, tensors)
    path = save_checkpoint(
        run.checkpoints,
        states[PROGRESS]["step" if stage == "step" else "sft_steps"],
        write_model=world.policy.save,
        model_bytes=world.policy.saved_bytes,
        payload=Payload(tensors, states, asdict(inputs)),
        stage=stage,
    )
    spared = best.among(list_checkpoints(run.checkpoints)) if best else ()
    prune(run.checkpoints, world.recipe.checkpoint.keep, spared)
    return path


def _check_finite(world: World, tensors: Mapping[str, Tensor]) -> None:
    weights = {f"model/{name}": p for name, p in world.policy.model.named_parameters()}
    if wrong := first_not_finite({**weights, **tensors}):
        raise TrainingDiverged(
            f"'{wrong}' is not finite, so no checkpoint was saved. Lower trainer.learning_rate"
        )
