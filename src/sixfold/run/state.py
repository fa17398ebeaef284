"""State that a run must save to resume exactly.

It is everything that does not follow from the recipe and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..errors import UserError
from ..model.turn_end import TurnEnd
from ..recipe.resume_policy import settings_of
from ..trainer.optimizer_state import optimizer_tensors
from ..trainer.trainer import Trainer
from .assemble import World
from .checkpoint import Checkpoint, prune, save_checkpoint
from .fingerprint import (
    TOKENS_ALONE,
    rewards_difference,
    rewards_fingerprint,
    tasks_difference,
    tasks_fingerprint,
)
from .folder import RunFolder
from .learners import Learners


@dataclass
class RunState:
    """State of a run, stored as JSON in its checkpoints.

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
        counters: step counts of the learners and the weight sync.
        steered: adapted values of the algorithm and of the reference resets.
        alarms: state of the alarms, so that a resumed run raises the same ones.
        divergence: state of the alarm for reward hacking.
        settings: the recipe, by dotted key.
        tasks: fingerprint of each split.
        rewards: name of each reward and hash of its code.
        solved: rule by which `before` counts a completion as solved, such as "math >= 1". Empty in
            checkpoints of earlier releases.
        vocabulary_hash: hash of the tokenizer's vocabulary.
        own_ends: tokens and strings that end a completion for the model itself, without those of
            the recipe.
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
    counters: dict[str, int] = field(default_factory=dict)
    steered: dict[str, Any] = field(default_factory=dict)
    alarms: dict[str, Any] = field(default_factory=dict)
    divergence: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: list[list[str]] = field(default_factory=list)
    solved: str = ""
    vocabulary_hash: str = ""
    own_ends: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RunState:
        """State stored in a checkpoint.

        Fields that format 1 lacked keep their defaults. Fields that no longer exist are ignored.
        """
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in checkpoint.state.items() if key in known})


def signature(world: World, rewards: Sequence[str | Callable[..., Any]]) -> dict[str, Any]:
    """Fields of `RunState` that identify the inputs of a run.

    They are settings, tasks, rewards, the rule for solved, the tokenizer, and the model's own end
    tokens and strings. If the task fingerprints are equal, a step number refers to the same tasks
    and an accuracy to the same test.
    """
    splits = {"training": world.tasks.train, "held-out": world.tasks.heldout}
    return {
        "settings": settings_of(world.recipe),
        "tasks": {
            name: tasks_fingerprint(tasks, world.renderer.encode) for name, tasks in splits.items()
        },
        "rewards": rewards_fingerprint(rewards),
        "solved": world.environment.solved_rule.text,
        "vocabulary_hash": world.policy.vocabulary_hash,
        "own_ends": asdict(world.policy.own_ends) if world.policy.own_ends else {},
    }


def own_ends(checkpoint: Checkpoint | None) -> TurnEnd | None:
    """Tokens and strings that ended a completion before the recipe added its own.

    Returns:
        None if there is no checkpoint, or if it does not record them.
    """
    said = RunState.of(checkpoint).own_ends if checkpoint else {}
    return TurnEnd(tuple(said["tokens"]), tuple(said["strings"])) if said else None


def completed(state: RunState, world: World, learners: Learners) -> RunState:
    """Copy of the state with the current counts of learners and weight sync.

    Args:
        state: state of the run.
        world: its engine and weight sync are read.
        learners: their counters and adapted values are read.
    """
    counters = {
        **learners.counters(),
        "engine_version": world.engine.version,
        "sync_waited": world.sync.waited,
    }
    return replace(state, counters=counters, steered=learners.steered())


def publish(run: RunFolder, world: World, learners: Learners, state: RunState) -> Path:
    """Publish a checkpoint of a completed state with the current tensors.

    The oldest checkpoints beyond `checkpoint.keep` are deleted.

    Args:
        run: folder of the run, locked.
        world: model and weight sync.
        learners: their tensors are saved.
        state: result of `completed`.

    Returns:
        The path of the checkpoint.
    """
    tensors: dict[str, Tensor] = {**learners.tensors(), **world.sync.tensors()}
    return _publish(run, world, tensors, state, "step", state.step)


def publish_sft(run: RunFolder, world: World, trainer: Trainer | None, state: RunState) -> Path:
    """Publish a checkpoint of the SFT stage.

    Args:
        run: folder of the run.
        world: model and settings.
        trainer: trainer whose optimizer state is saved, or None at the end of the stage.
        state: state of the run.
    """
    tensors = optimizer_tensors(trainer.optimizer, trainer.model) if trainer else {}
    return _publish(run, world, tensors, state, "sft", state.sft_steps)


def _publish(
    run: RunFolder,
    world: World,
    tensors: Mapping[str, Tensor],
    state: RunState,
    stage: Literal["sft", "step"],
    step: int,
) -> Path:
    model_bytes = sum(p.nbytes for p in world.policy.model.parameters())
    content = {
        "write_model": world.policy.save,
        "model_bytes": model_bytes,
        "tensors": tensors,
        "state": asdict(state),
    }
    path = save_checkpoint(run.checkpoints, step, stage=stage, **content)  # type: ignore[arg-type]
    prune(run.checkpoints, world.recipe.checkpoint.keep)
    return path


def check_same(checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
    """Compare a checkpoint with the current `signature`.

    Returns:
        One note per difference that does not prevent a resume.

    Raises:
        UserError: if the tasks, their prompt tokens, the tokenizer or the rule for solved differ.
    """
    state = RunState.of(checkpoint)
    for split, tasks in now["tasks"].items() if state.tasks else ():
        if difference := tasks_difference(state.tasks[split], tasks):
            if TOKENS_ALONE in difference:
                raise UserError(f"{checkpoint.path}: the {split} tasks differ: {difference}")
            raise UserError(
                f"{checkpoint.path} was trained on other {split} tasks: {difference}. Restore the"
                " dataset, or start a new run"
            )
    if state.vocabulary_hash != now["vocabulary_hash"]:
        raise UserError(
            f"{checkpoint.path}: the tokenizer is not the one that the run was trained with (its"
            " vocabulary differs). Restore the checkpoint's tokenizer files, or start a new run"
        )
    if state.before and state.solved not in ("", now["solved"]):
        raise UserError(
            f"{checkpoint.path}: the rule for solved has changed from {state.solved} to"
            f" {now['solved']}. Restore eval.metric, eval.solved_at and [environment], and use"
            " sixfold eval to measure checkpoints by another rule"
        )
    changed = rewards_difference(state.rewards, now["rewards"])
    notes = [
        f"WARNING: the code of reward '{name}' has changed since {checkpoint.path.name}: rewards"
        " before and after cannot be compared"
        for name in changed
    ]
    if not state.tasks:
        notes.append(
            f"{checkpoint.path.name} was saved by an earlier release: it does not show whether"
            " tasks and rewards are the same"
        )
    return notes


def restore(
    tensors: Mapping[str, Tensor], state: RunState, world: World, learners: Learners
) -> None:
    """Restore learners and engine from a checkpoint, from which the model was already loaded.

    Args:
        tensors: tensors of the checkpoint, by name.
        state: state in the checkpoint.
        world: its weight sync is restored.
        learners: restored in place.
    """
    learners.load(tensors, state.counters, state.steered)
    world.sync.load(tensors, state.counters["engine_version"], state.counters["sync_waited"])
