"""Turn the failures of a run into messages that say what helps and which checkpoint is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..checkpoint.listing import list_checkpoints
from ..errors import BudgetSpent, NoAnswer, RunFailed
from ..files.folder import RunFolder
from ..reference.worker_reference import ReferenceEnded
from ..report.progress import Progress
from ..sync.sync import SyncError, WeightsNotFinite
from ..trainer.trainer import EngineDisagrees, TrainingDiverged
from .out_of_memory import is_out_of_memory, remedies, work_size


def where_it_stopped(run: RunFolder) -> str:
    """State how far a stopped run has come, and the command that resumes it."""
    newest = list_checkpoints(run.checkpoints)[-1:]
    if newest:
        stage, _, step = newest[0].name.partition("-")
        return (
            f"stopped after {'SFT ' * (stage == 'sft')}step {int(step)}; go on with: sixfold train"
            f" --resume {run.whole}"
        )
    if run.recipe.is_file() and not run.earlier:
        return (
            "stopped before the first checkpoint; start again with: sixfold train"
            f" --resume {run.whole}"
        )
    return "stopped before anything was trained"


@contextmanager
def failures_in_words(
    settings: Mapping[str, Any], run: RunFolder, progress: Progress
) -> Iterator[None]:
    """Turn fatal training errors into a RunFailed.

    The message states the reason, what helps, and which checkpoint is left.

    Args:
        settings: the recipe's settings, by dotted key. The message names some.
        run: folder of the run.
        progress: knows the phase in which the run failed.

    Raises:
        RunFailed: if engine and trainer disagree, training has diverged, a weight sync has failed,
            memory or a budget is used up, or a part of the run gives no answer or has ended.
    """
    try:
        yield
    except EngineDisagrees as error:
        raise RunFailed(f"{error}. {what_is_left(run)}") from error
    except (BudgetSpent, NoAnswer, ReferenceEnded) as error:
        raise type(error)(f"{error}. {what_is_left(run)}") from error
    except (TrainingDiverged, WeightsNotFinite) as error:
        raise RunFailed(f"training has diverged: {error}. {what_is_left(run)}") from error
    except SyncError as error:
        raise RunFailed(f"the weight sync failed: {error}. {what_is_left(run)}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        phase = progress.phase_name or "loading"
        raise RunFailed(
            f"out of memory in {phase}{work_size(error)}: {remedies(settings, phase)}."
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
        f" {run.whole}"
    )
