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
from .learners import Learners
from .run_folder import RunFolder
from .trainer.checkpoint import Checkpoint, prune, save_checkpoint


@dataclass
class RunState:
    """Counters of a run, as JSON in its checkpoints. Sampling noise and task order need no state: they are functions of seed and step.

    step: RL steps done. ema: of the reward, None before the first. seconds: wall time of the process(es) so far. before: the held-out
    evaluation before RL and its samples. preflight: what was found before that; empty where it was switched off. counters, steered: of the learners.
    """

    step: int = 0
    ema: float | None = None
    tokens_total: int = 0
    seconds: float = 0.0
    sft_steps: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    preflight: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    steered: dict[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    vocabulary_hash: str = ""


def data_fingerprint(world: World) -> str:
    """Hash of every training task in order: the same one means that a step number means the same tasks."""
    digest = hashlib.sha256()
    for task in world.tasks.train:
        digest.update(json.dumps([task.id, task.prompt, task.answer], default=str).encode())
    return digest.hexdigest()[:16]


def save(run: RunFolder, world: World, learners: Learners, state: RunState) -> Path:
    """Publish a checkpoint of this moment and delete the oldest ones."""
    tensors: dict[str, Tensor] = {**learners.tensors(), **world.sync.tensors()}
    state.counters = {**learners.counters(), "engine_version": world.engine.version, "sync_waited": world.sync.waited}
    state.steered = learners.steered()
    model_bytes = sum(p.nbytes for p in world.policy.model.parameters())
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


def restore(tensors: Mapping[str, Tensor], state: RunState, world: World, learners: Learners) -> None:
    """Put the learners and the engine back. The model's weights are already the checkpoint's: it was loaded from there."""
    learners.load(tensors, state.counters, state.steered)
    world.sync.load(tensors, state.counters["engine_version"], state.counters["sync_waited"])
