"""What a run must remember to go on exactly: everything that is not a function of (recipe, step)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..chat.turn_end import TurnEnd
from ..errors import UserError
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
    """What a run remembers, as JSON in its checkpoints. Sampling noise and task order need none: they are functions of seed and step.

    Attributes:
        step: RL steps done.
        ema: moving average of the reward; None before the first step.
        tokens_total: tokens sampled.
        seconds: wall time of the processes so far.
        sft_steps: SFT steps done.
        warming_up: whether SFT goes on after this; False once it is over.
        unlogged: metrics of the last step, where the run ended before they were written; a resume completes and writes them.
        before: held-out evaluation before RL, with its samples; empty before it is made.
        preflight: what the pre-flight found; empty where it was switched off.
        counters: step counts of the learners and the sync.
        steered: what the algorithm has adapted to.
        alarms: what the alarms remember, so that a resumed run raises the same ones.
        divergence: what the alarm for reward hacking remembers.
        settings: the recipe, by dotted key.
        tasks: fingerprint of each split.
        rewards: name of each reward, and hash of its code.
        solved: what `before` counts as solved, such as "math >= 1"; empty in a checkpoint of an earlier release.
        vocabulary_hash: of the tokenizer.
        own_ends: tokens and strings that end a completion by the model alone, without the recipe's.
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
        """The state in a checkpoint. What format 1 did not have is empty, and what it had besides is left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in checkpoint.state.items() if key in known})


def signature(world: World, rewards: Sequence[str | Callable[..., Any]]) -> dict[str, Any]:
    """The fields of `RunState` that say what a run is made with: settings, tasks, rewards, tokenizer, the model's own ends.

    Equal fingerprints of the tasks mean that a step number means the same tasks, and an accuracy the same test.
    """
    splits = {"training": world.tasks.train, "held-out": world.tasks.heldout}
    return {
        "settings": settings_of(world.recipe),
        "tasks": {name: tasks_fingerprint(tasks, world.codec.encode) for name, tasks in splits.items()},
        "rewards": rewards_fingerprint(rewards),
        "solved": world.environment.solved_rule.text,
        "vocabulary_hash": world.policy.vocabulary_hash,
        "own_ends": asdict(world.policy.own_ends) if world.policy.own_ends else {},
    }


def own_ends(checkpoint: Checkpoint | None) -> TurnEnd | None:
    """What ended a completion of the run's model before its recipe added to it; None where no checkpoint says so."""
    said = RunState.of(checkpoint).own_ends if checkpoint else {}
    return TurnEnd(tuple(said["tokens"]), tuple(said["strings"])) if said else None


def completed(state: RunState, world: World, learners: Learners) -> RunState:
    """A copy of the state with the counts of learners and sync as they are now."""
    counters = {**learners.counters(), "engine_version": world.engine.version, "sync_waited": world.sync.waited}
    return replace(state, counters=counters, steered=learners.steered())


def publish(run: RunFolder, world: World, learners: Learners, state: RunState) -> Path:
    """Publish a checkpoint of a completed state, with the tensors of this moment, and delete the oldest ones."""
    tensors: dict[str, Tensor] = {**learners.tensors(), **world.sync.tensors()}
    return _publish(run, world, tensors, state, "step", state.step)


def publish_sft(run: RunFolder, world: World, trainer: Trainer | None, state: RunState) -> Path:
    """Publish a checkpoint of the SFT stage: in the middle of it with its trainer's optimizer, at its end with None."""
    tensors = optimizer_tensors(trainer.optimizer, trainer.model) if trainer else {}
    return _publish(run, world, tensors, state, "sft", state.sft_steps)


def _publish(run: RunFolder, world: World, tensors: Mapping[str, Tensor], state: RunState, stage: Literal["sft", "step"], step: int) -> Path:
    model_bytes = sum(p.nbytes for p in world.policy.model.parameters())
    content = {"write_model": world.policy.save, "model_bytes": model_bytes, "tensors": tensors, "state": asdict(state)}
    path = save_checkpoint(run.checkpoints, step, stage=stage, **content)  # type: ignore[arg-type]
    prune(run.checkpoints, world.recipe.checkpoint.keep)
    return path


def check_same(checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
    """Compare what a checkpoint was made with to the `signature` of now. Gives a note for each difference that a run can go on with.

    Raises:
        UserError: the tasks, the tokens of their prompts, the tokenizer or the measure of held-out tasks are other ones.
    """
    state = RunState.of(checkpoint)
    for split, tasks in now["tasks"].items() if state.tasks else ():
        if difference := tasks_difference(state.tasks[split], tasks):
            if TOKENS_ALONE in difference:
                raise UserError(f"{checkpoint.path}: of the {split} tasks {difference}")
            raise UserError(f"{checkpoint.path}: trained on other tasks: of the {split} tasks {difference}: restore the dataset or start a new run")
    if state.vocabulary_hash != now["vocabulary_hash"]:
        raise UserError(f"{checkpoint.path}: its tokenizer is not the one it was trained with (vocabulary hash differs)")
    if state.before and state.solved not in ("", now["solved"]):
        raise UserError(
            f"{checkpoint.path}: its first evaluation measured {state.solved}, and this one would measure {now['solved']} (eval.metric, "
            "eval.solved_at, environment): leave the measure as it was, and measure checkpoints another way with sixfold eval"
        )
    changed = rewards_difference(state.rewards, now["rewards"])
    notes = [
        f"WARNING: the code of reward '{name}' has changed since {checkpoint.path.name}: rewards before and after cannot be compared"
        for name in changed
    ]
    if not state.tasks:
        notes.append(f"{checkpoint.path.name} is of an earlier release: whether tasks and rewards are the same cannot be told")
    return notes


def restore(tensors: Mapping[str, Tensor], state: RunState, world: World, learners: Learners) -> None:
    """Put the learners and the engine back. The model's weights are already the checkpoint's: it was loaded from there."""
    learners.load(tensors, state.counters, state.steered)
    world.sync.load(tensors, state.counters["engine_version"], state.counters["sync_waited"])
