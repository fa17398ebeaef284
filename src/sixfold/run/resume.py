"""Resume a run: choose the checkpoint, check the settings, and delete output after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, load_newest
from ..checkpoint.publication import clean, set_aside_after
from ..checkpoint.state import RunState
from ..errors import UserError
from ..files.folder import RunFolder
from ..recipe.resume_policy import allowed_changes
from ..recipe.schema import Recipe
from ..report.loggers import truncate_after
from ..trainer.optimizer import learning_rate
from ..trainer.trainer import Trainer
from .inputs import Inputs


def find_checkpoint(
    run: RunFolder, recipe: Recipe, say: Callable[[str], None]
) -> Checkpoint | None:
    """Newest intact checkpoint, or None if the run has none yet. Changes nothing on disk.

    Args:
        run: run to resume, locked.
        recipe: requested settings.
        say: receives messages for the user.

    Raises:
        UserError: if no checkpoint is usable although steps were done, if a setting differs that
            cannot change, or if the run has done more steps than requested.
    """
    if run.replay_of.is_file():
        raise UserError(
            f"{run.path} is a replay of {run.replay_of.read_text().strip()}: it is made again with"
            " --replay-schedule and --overwrite, not resumed"
        )
    checkpoint, warnings = load_newest(run.checkpoints)
    for warning in warnings:
        say(warning)
    if checkpoint is None:
        if (step := run.last_step()) is not None:
            raise UserError(
                f"{run.path} has finished {step} steps, but {run.checkpoints} holds no checkpoint."
                " Nothing was changed: restore a checkpoint, or start over with --overwrite"
            )
        say(f"resuming {run.path} from the start: it has no checkpoint yet")
        return None
    say(f"resuming {run.path} from {checkpoint.path.name}")
    saved, state = Inputs.of(checkpoint).settings, RunState.of(checkpoint)
    if (
        recipe.sft.epochs or recipe.preference.epochs
    ):  # the steps follow from the examples, which are loaded later
        recipe = recipe.with_settings({"run.steps": saved["run.steps"]})
    if recipe.run.steps < state.step:
        raise UserError(
            f"run.steps = {recipe.run.steps}, but {run.path} has done {state.step} steps already."
            f" run.steps counts from the start of the run: set it to {state.step} to end the run"
            f" there, or to {state.step + recipe.run.steps} for {recipe.run.steps} more steps"
        )
    if changes := allowed_changes(saved, recipe, warming_up=state.warming_up):
        say(f"resuming with changed settings: {', '.join(changes)}")
    return checkpoint


def rate_change(
    saved: Mapping[str, Any], steps: int, trainer: Trainer, updates: int, setting: str
) -> str:
    """Warning that changed settings make the learning rate jump, with both rates, or "".

    Args:
        saved: settings of the run that made the checkpoint, by dotted key.
        steps: `run.steps` of the resumed run.
        trainer: trainer of the resumed run, with the progress of the checkpoint.
        updates: updates per step.
        setting: setting that holds its learning rate.
    """
    done, now = trainer.steps, trainer.config
    before = now.model_copy(
        update={
            "learning_rate": saved.get(setting, now.learning_rate),
            "schedule": saved.get("trainer.schedule", now.schedule),
            "warmup_steps": saved.get("trainer.warmup_steps", now.warmup_steps),
        }
    )
    total = trainer.total_steps + (saved.get("run.steps", steps) - steps) * updates
    planned = learning_rate(before, done, total)
    following = learning_rate(now, done, trainer.total_steps)
    if not done or math.isclose(planned, following):
        return ""
    return (
        f"the changed settings move the learning rate ({setting}): the last update had"
        f" {learning_rate(before, done - 1, total):.3g}, the next one has {following:.3g}. With the"
        f" earlier settings it would have had {planned:.3g}; a decaying schedule reaches 0 at"
        " run.steps"
    )


def cut_after(
    run: RunFolder, checkpoint: Checkpoint | None, state: RunState, say: Callable[[str], None]
) -> None:
    """Delete metrics and rollouts of later steps, and leftovers of interrupted writes.

    The resumed run writes those metrics and rollouts again. Checkpoints newer than `checkpoint` are
    damaged; they are renamed, not deleted.

    Args:
        run: run to resume, locked.
        checkpoint: checkpoint to resume from, or None.
        state: state in that checkpoint.
        say: receives messages for the user.
    """
    for path in set_aside_after(run.checkpoints, checkpoint.path if checkpoint else None):
        say(f"kept the damaged checkpoint as {path}; delete it when you no longer need it")
    clean(run.checkpoints)
    run.prepare_resume(state.step)
    written = state.step - bool(state.unlogged) if not state.warming_up else 0
    last = run.last_step() or 0
    if last < written:
        say(
            f"WARNING: {run.metrics} ends at step {last}, but the checkpoint is of step"
            f" {state.step}: the metrics of the steps between are lost"
        )
    truncate_after(run.metrics, written)
    for file in (run.schedule, run.dead_letters, run.curriculum):
        truncate_after(file, 0 if state.warming_up else state.step)
    truncate_after(
        run.path / "sft.jsonl", state.sft_steps - bool(state.unlogged and state.warming_up)
    )
