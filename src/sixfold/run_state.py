"""What a run must remember to go on exactly: everything that is not a function of (recipe, step)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .assembly import World
from .errors import UserError
from .reference.frozen import FrozenReference, NoReference
from .run_folder import RunFolder
from .trainer.checkpoint import Checkpoint, load_optimizer_tensors, optimizer_tensors, prune, save_checkpoint
from .trainer.trainer import Trainer


@dataclass
class RunState:
    """Counters of a run, as JSON in its checkpoints. Sampling noise and task order need no state: they are functions of seed and step.

    step: RL steps done. ema: of the reward, None before the first. seconds: wall time of the process(es) so far. before: the held-out
    evaluation before RL and its samples.
    """

    step: int = 0
    ema: float | None = None
    tokens_total: int = 0
    seconds: float = 0.0
    sft_steps: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    data_fingerprint: str = ""
    vocabulary_hash: str = ""


def data_fingerprint(world: World) -> str:
    """Hash of every training task in order: the same one means that a step number means the same tasks."""
    digest = hashlib.sha256()
    for task in world.tasks.train:
        digest.update(json.dumps([task.id, task.prompt, task.answer], default=str).encode())
    return digest.hexdigest()[:16]


def save(run: RunFolder, world: World, trainer: Trainer, reference: FrozenReference | NoReference, state: RunState) -> Path:
    """Publish a checkpoint of this moment and delete the oldest ones."""
    tensors: dict[str, Tensor] = {**optimizer_tensors(trainer.optimizer, trainer.model), **world.sync.tensors()}
    if isinstance(reference, FrozenReference):
        tensors |= reference.tensors()
    state.counters = {
        "version": trainer.version,
        "engine_version": world.engine.version,
        "steps": trainer.steps,
        "skipped_total": trainer.skipped_total,
        "skipped_in_a_row": trainer.skipped_in_a_row,
    }
    model_bytes = sum(p.nbytes for p in trainer.model.parameters())
    path = save_checkpoint(run.checkpoints, state.step, write_model=world.policy.save, model_bytes=model_bytes, tensors=tensors, state=asdict(state))
    prune(run.checkpoints, world.recipe.checkpoint.keep)
    return path


def read_state(checkpoint: Checkpoint, world: World) -> RunState:
    """The state in a checkpoint. Raises UserError when tasks or tokenizer are not the ones it was trained on."""
    state = RunState(**checkpoint.state)
    now = data_fingerprint(world)
    if state.data_fingerprint != now:
        raise UserError(
            f"{checkpoint.path}: trained on other tasks (fingerprint {state.data_fingerprint}, now {now}): restore the dataset or start a new run"
        )
    if state.vocabulary_hash != world.policy.vocabulary_hash:
        raise UserError(f"{checkpoint.path}: its tokenizer is not the one it was trained with (vocabulary hash differs)")
    return state


def restore(tensors: Mapping[str, Tensor], state: RunState, world: World, trainer: Trainer, reference: FrozenReference | NoReference) -> None:
    """Put optimizer, reference, engine and counters back. The model's weights are already the checkpoint's: it was loaded from there."""
    load_optimizer_tensors(trainer.optimizer, trainer.model, tensors)
    if isinstance(reference, FrozenReference):
        if not any(name.startswith("reference/") for name in tensors):
            raise UserError("the checkpoint holds no reference weights: it was made with algorithm.beta = 0")
        reference.load(tensors)
    world.sync.load(tensors, state.counters["engine_version"])
    trainer.version, trainer.steps = state.counters["version"], state.counters["steps"]
    trainer.skipped_total, trainer.skipped_in_a_row = state.counters["skipped_total"], state.counters["skipped_in_a_row"]
