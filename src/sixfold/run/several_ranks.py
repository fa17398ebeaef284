"""A run on several ranks: what it refuses, and what ranks above 0 do differently."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ..files.folder import RunFolder
from ..ranks import Ranks
from ..recipe.schema import LogConfig
from ..report.progress import Progress
from ..sync.sync import WeightsNotFinite
from ..trainer.trainer import TrainingDiverged
from .interrupts import Interrupted

QUIET = LogConfig(to=(), rollouts_every=0)
"""Section [log] of a rank above 0."""
_FOLLOWER = ".rank-"
"""Start of the name of a follower's folder."""


def alike(error: BaseException, ranks: Ranks) -> bool:
    """True if this error ends all ranks at the same point. They can then save a checkpoint.

    Some errors follow from numbers that all ranks have. For others, see `Ranks.agree`.
    """
    same = isinstance(error, TrainingDiverged | WeightsNotFinite | Interrupted)
    return same or ranks.agreed_on(error)


@contextmanager
def follower_folder(real: Path, rank: int) -> Iterator[RunFolder]:
    """Temporary run folder of a rank above 0. It links to the run's checkpoints and base.

    Every rank runs the same program. Metrics and notes of this rank go into the temporary folder,
    which is deleted at the end. It is inside the run's folder, so that the next start finds and
    deletes it if the rank was killed.

    Args:
        real: folder of the run, which rank 0 has prepared.
        rank: number of the rank.
    """
    folder = RunFolder(real / f"{_FOLLOWER}{rank}")
    try:
        folder.rollouts.mkdir(parents=True)
        folder.checkpoints.symlink_to(RunFolder(real).checkpoints.resolve())
        folder.base.symlink_to(RunFolder(real).base.resolve())
        copy_records(folder)
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def remove_followers(real: Path) -> None:
    """Delete the temporary folders that killed ranks have left in the run's folder."""
    for path in real.glob(f"{_FOLLOWER}*"):
        shutil.rmtree(path, ignore_errors=True)


def copy_records(follower: RunFolder) -> None:
    """Copy the records of earlier steps from the run's folder into a temporary run folder."""
    real = follower.checkpoints.resolve().parent
    for file in (follower.metrics, follower.summary):
        if (real / file.name).is_file():
            shutil.copyfile(real / file.name, file)


def quiet_progress() -> Progress:
    """Progress display of a rank above 0, which shows nothing."""
    return Progress(Console(file=io.StringIO()))
