"""Keep the state at the end of the last step, so that it can be saved if the next step fails.

Weights and optimizer moments are not copied. They change only in an update, and the trainers count
the updates they try. While those counts are unchanged, the tensors in memory are those of the last
step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..batch import Metrics
from ..checkpoint.listing import list_checkpoints
from ..checkpoint.registry import States, states_of
from ..checkpoint.state import PROGRESS, RunState
from ..errors import BudgetSpent, NoAnswer, RunFailed, UserError
from ..files.folder import RunFolder
from ..recipe.schema import Recipe
from ..reference.worker_reference import ReferenceEnded
from ..report.progress import Progress
from ..sync.sync import WeightsNotFinite
from ..trainer.trainer import EngineDisagrees, TrainingDiverged
from .interrupts import Interrupted
from .learners import Learners
from .out_of_memory import free_memory_of, is_out_of_memory, remedies, work_size
from .several_ranks import alike

if TYPE_CHECKING:
    from .start import Run

TRAINED = ("policy", "critic")
"""Components that count their updates."""


class LastStep:
    """State at the end of each step, saved if the next step fails.

    Args:
        work: the run.
        learners: roles of the loop that have state.
    """

    def __init__(self, work: Run, learners: Learners) -> None:
        self._work = work
        self._learners = learners
        self._states: States | None = None
        self._good: States | None = None

    def mark(self, state: RunState) -> None:
        """Remember the state at the end of a step."""
        self._states = states_of(self._work.registry(self._learners, state))
        if self._learners.policy.skipped_in_a_row == 0:
            self._good = self._states

    def save_after(self, error: BaseException) -> Path | None:
        """Publish the newest state that is safe after a step has failed.

        Returns:
            None if no state is newer than the checkpoints on disk, if the other ranks have not
            stopped at the same point, because all ranks must save together, or if the disk refuses
            the checkpoint too.

        Raises:
            UserError: if the run was interrupted and the disk refuses the checkpoint.
        """
        if not alike(error, self._work.world.ranks):
            return None
        self._work.saver.settle()
        self._work.world.ranks.barrier("the last save")  # after it, all see the same checkpoints
        if is_out_of_memory(error):
            free_memory_of(error)
            self._learners.policy.optimizer.zero_grad(set_to_none=True)
        with suppress(TrainingDiverged):  # the tensors in memory are not finite
            try:
                return self.save_good() if isinstance(error, TrainingDiverged) else self.save()
            except UserError as refused:
                if isinstance(error, Interrupted):
                    raise
                self._work.progress.note(f"WARNING: the last step was not saved: {refused}")
        return None

    def save(self) -> Path | None:
        """Publish the last step, if no update was tried since its end.

        Returns:
            None otherwise: an update may be incomplete.
        """
        states, now = self._states, states_of(self._learners.components())
        tried = states is None or any(states[name] != now[name] for name in TRAINED if name in now)
        if (agreed := self._agreed(None if tried else states)) is None:
            return None
        return self._publish(agreed)

    def save_good(self) -> Path | None:
        """Publish the last step whose update was applied, if no update was applied since.

        Updates that were tried and skipped change no weights.
        """
        good, now = self._good, states_of(self._learners.components())
        applied = good is None or any(
            good[name]["version"] != now[name]["version"] for name in TRAINED if name in now
        )
        if (agreed := self._agreed(None if applied else good)) is None:
            return None
        newest = list_checkpoints(self._work.run.checkpoints)[-1:]
        if newest and newest[0].name > f"step-{agreed[PROGRESS]['step']:06d}":
            return newest[0]  # its step was skipped, so its weights are the same
        return self._publish(agreed)

    def _agreed(self, states: States | None) -> States | None:
        """Return the states if all ranks want to save the same step, otherwise None."""
        steps = self._work.world.ranks.gather(states[PROGRESS]["step"] if states else None)
        return states if len({*steps}) == 1 else None

    def _publish(self, states: States) -> Path:
        """Publish states of an earlier moment with the current tensors, which belong to it."""
        work = self._work
        registry = work.registry(self._learners, work.state)
        return work.saver.save("step", work.world.policy, registry, states)


def unfinished(metrics: Metrics) -> dict[str, Any]:
    """Metrics as JSON for `RunState.unlogged`.

    Non-finite values become None, as in the metrics file.
    """

    def number(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        key: (
            number(value)
            if isinstance(value, float | int) or value is None
            else [*map(number, value)]
        )
        for key, value in metrics.items()
    }


def last_ending(run: RunFolder) -> int | None:
    """Step at which an earlier process ended the run, according to summary.json."""
    if not run.summary.is_file():
        return None
    ended = json.loads(run.summary.read_text(encoding="utf-8")).get("ended")
    return int(ended["step"]) if ended else None


def where_it_stopped(run: RunFolder) -> str:
    """State how far a stopped run has come, and the command that resumes it."""
    newest = list_checkpoints(run.checkpoints)[-1:]
    if newest:
        stage, _, step = newest[0].name.partition("-")
        return (
            f"stopped after {'SFT ' * (stage == 'sft')}step {int(step)}; go on with: sixfold train"
            f" --resume {run.path}"
        )
    if run.recipe.is_file() and not run.earlier:
        return (
            "stopped before the first checkpoint; start again with: sixfold train"
            f" --resume {run.path}"
        )
    return "stopped before anything was trained"


@contextmanager
def failures_in_words(recipe: Recipe, run: RunFolder, progress: Progress) -> Iterator[None]:
    """Turn fatal training errors into a RunFailed.

    The message states the reason, what helps, and which checkpoint is left.

    Args:
        recipe: recipe whose settings the message names.
        run: folder of the run.
        progress: knows the phase in which the run failed.

    Raises:
        RunFailed: if engine and trainer disagree, training has diverged, memory or a budget is used
            up, or a part of the run gives no answer or has ended.
    """
    try:
        yield
    except EngineDisagrees as error:
        raise RunFailed(f"{error}. {what_is_left(run)}") from error
    except (BudgetSpent, NoAnswer, ReferenceEnded) as error:
        raise type(error)(f"{error}. {what_is_left(run)}") from error
    except (TrainingDiverged, WeightsNotFinite) as error:
        raise RunFailed(f"training has diverged: {error}. {what_is_left(run)}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        phase = progress.phase_name or "loading"
        raise RunFailed(
            f"out of memory in {phase}{work_size(error)}: {remedies(recipe, phase)}."
            f" {what_is_left(run)}"
        ) from error


def what_is_left(run: RunFolder) -> str:
    """Sentence about the newest checkpoint, the number of lost steps, and how to resume."""
    newest = list_checkpoints(run.checkpoints)[-1:]
    if not newest:
        return "There is no checkpoint yet"
    stage, _, step = newest[0].name.partition("-")
    lost = (run.last_step() or 0) - int(step) if stage == "step" else 0
    steps = f" ({lost} later step{'s are' if lost > 1 else ' is'} lost)" if lost > 0 else ""
    return (
        f"The last good state is {newest[0].name}{steps}; go on with: sixfold train --resume"
        f" {run.path}"
    )
