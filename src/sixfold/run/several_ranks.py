"""A run on several ranks: what it refuses, and what ranks above 0 do differently."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ..algorithm.method import Method
from ..errors import UserError
from ..files.folder import RunFolder
from ..ranks import Ranks
from ..recipe.schema import LogConfig, Recipe
from ..report.progress import Progress
from ..sync.sync import WeightsNotFinite
from ..trainer.trainer import TrainingDiverged
from .interrupts import Interrupted

_FOLLOWER = ".rank-"
"""Start of the name of a follower's folder."""


def check_supported(recipe: Recipe, method: Method, ranks: Ranks) -> None:
    """Check that the ranks support a recipe.

    Args:
        recipe: the whole run.
        method: method of the run.
        ranks: the ranks of the run.

    Raises:
        UserError: if they do not.
    """
    for setting in ("replicas", "tensor", "experts", "context"):
        if ranks.size == 1 and (value := getattr(recipe.parallel, setting)) > 1:
            raise UserError(
                f"parallel.{setting} = {value}, but the run has one process. Start it by torchrun"
                f" with at least {value} processes, or set parallel.{setting} = 1"
            )
    if ranks.size == 1:
        return
    for setting, (wrong, remedy, why) in _refused(recipe).items():
        if wrong:
            shown = repr(remedy) if isinstance(remedy, str) else str(remedy).lower()
            raise UserError(
                f"{setting} must be {shown} with several ranks ({ranks.size} were started): {why}."
                " Set it, or train in one process without torchrun"
            )
    for name, refused in _refused_by_groups(recipe, method).items():
        value = getattr(recipe.parallel, name)
        for setting, wrong in refused.items():
            if value > 1 and wrong:
                raise UserError(
                    f"parallel.{name} = {value} does not support {setting}. Set parallel.{name} ="
                    " 1, or change the other setting"
                )


def _refused_by_groups(recipe: Recipe, method: Method) -> dict[str, dict[str, bool]]:
    """Settings that groups of ranks do not support, and whether this recipe has them.

    Args:
        recipe: the whole run.
        method: method of the run.

    Returns:
        One table for each setting of `parallel` that makes groups.
    """
    always = {
        f"model.lora.rank = {recipe.model.lora.rank}": recipe.model.lora.rank > 0,
        "trainer.optimizer = 'adamw8bit'": recipe.trainer.optimizer == "adamw8bit",
    }
    tensor = {
        f"algorithm.name = '{method.name}', which needs a critic": method.needs_critic,
        "reference.precision = 'bfloat16'": recipe.reference.precision == "bfloat16",
    }
    both = f"parallel.tensor = {recipe.parallel.tensor}"
    return {"tensor": always | tensor, "experts": always | {both: recipe.parallel.tensor > 1}}


def _refused(recipe: Recipe) -> dict[str, tuple[bool, str | bool, str]]:
    """Settings that several ranks do not support: (wrong in this recipe, remedy, reason)."""
    trainer, reference = recipe.trainer, recipe.reference
    beside = "each rank samples with an engine of its own, beside its part of the weights"
    on_host = "state in host memory cannot be gathered for a checkpoint"
    return {
        "model.lora.dora": (
            recipe.model.lora.dora,
            False,
            "engines then share the adapter's base, and DoRA needs merged weights",
        ),
        "rollout.backend.kind": (recipe.rollout.backend.kind != "engine", "engine", beside),
        "sync.kind": (recipe.sync.kind != "shared", "shared", beside),
        "reference.placement": (
            reference.placement == "worker",
            "inline",
            "the reference is sharded too",
        ),
        "trainer.weights": (
            trainer.weights != "float32",
            "float32",
            "FSDP2 cannot shard layers whose matrices and vectors differ in precision",
        ),
        "trainer.offload": (trainer.offload != "none", "none", on_host),
        "reference.offload": (reference.offload, False, "each rank holds only its part of it"),
    }


def alike(error: BaseException, ranks: Ranks) -> bool:
    """True if this error ends all ranks at the same point. They can then save a checkpoint.

    Some errors follow from numbers that all ranks have. For others, see `Ranks.agree`.
    """
    same = isinstance(error, TrainingDiverged | WeightsNotFinite | Interrupted)
    return same or ranks.agreed_on(error)


def quiet(recipe: Recipe) -> Recipe:
    """The recipe of a rank above 0, which logs nothing."""
    return recipe.model_copy(update={"log": LogConfig(to=(), rollouts_every=0)})


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
