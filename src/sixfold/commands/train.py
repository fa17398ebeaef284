"""`sixfold train RECIPE` and `sixfold train --resume RUN`."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checkpoint.model_source import with_model_folders
from ..cli.parsing import RECIPE_HELP, VerbParser, argument, option, run_folder
from ..errors import UserError
from ..recipe.plan import make_plan
from ..recipe.resume_policy import NAMES
from ..recipe.schema import Recipe
from ..recipe.toml import load_recipe
from ..run.recipe_environment import check_names

OVERWRITE_HELP = "replace an earlier run of the same name, which is deleted when the new run ends"


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str | None = argument(RECIPE_HELP, None)
    resume: str | None = option(
        "continue a run from its newest checkpoint, with its recipe; settings may be added",
        metavar="RUN",
    )
    overwrite: bool = option(OVERWRITE_HELP, False)
    settings: tuple[str, ...] = ()


PARSER = VerbParser("train", "Train a model by reinforcement learning, or resume a run.", Options)


def run(arguments: Sequence[str]) -> int:
    """Check what can be checked without torch, and train."""
    given = PARSER.parse(arguments)
    if given.resume is None and given.recipe is not None:
        return start(load_recipe(given.recipe, given.settings), overwrite=given.overwrite)
    if given.resume is None or given.recipe is not None:
        raise UserError(
            "sixfold train: give a recipe (sixfold train demo) or --resume RUN, one of the two"
        )
    if given.overwrite:
        raise UserError(
            "sixfold train: --resume keeps the run and --overwrite deletes it; give one of them"
        )
    for name in NAMES:
        if any(word.partition("=")[0] == f"--{name}" for word in given.settings):
            raise UserError(
                f"{name} cannot change on resume: the run stays in its folder; leave out --{name}"
            )
    from ..files.folder import recover

    recover(Path(given.resume).expanduser())
    folder = run_folder(given.resume)
    return start(load_recipe(str(folder / "recipe.toml"), given.settings), resume=folder)


def start(
    recipe: Recipe,
    *,
    resume: Path | None = None,
    overwrite: bool = False,
    stop_after: Literal["sft"] | None = None,
) -> int:
    """Check the plan, then import torch and run.

    Args:
        recipe: the recipe.
        resume: folder of the run to resume, or None.
        overwrite: replace an earlier run of the same name.
        stop_after: last stage of the run, or None for all.

    Raises:
        UserError: if the plan refuses the recipe, or the disk is full.
    """
    recipe = with_model_folders(recipe)
    make_plan(recipe)
    check_names(recipe.environment, recipe.eval)
    folder = resume or Path(recipe.run.dir) / recipe.run.name
    from ..run.start import train_run

    try:
        return train_run(recipe, resume=resume, overwrite=overwrite, stop_after=stop_after)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"no space left on {error.filename or folder}: free some and `sixfold train --resume"
            f" {folder}`"
        ) from error
