"""`sixfold train RECIPE` and `sixfold train --resume RUN`."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..checkpoint.model_source import with_model_folders
from ..errors import UserError
from ..recipe.plan import make_plan
from ..recipe.resume_policy import NAMES
from ..recipe.schema import Recipe
from ..recipe.toml import load_recipe
from .parsing import RECIPE_HELP, VerbParser, run_folder


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "train", "Train a model by reinforcement learning, or resume a run.", takes_recipe=True
    )
    arguments.add_argument("recipe", metavar="RECIPE", nargs="?", help=RECIPE_HELP)
    arguments.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a run from its newest checkpoint, with its recipe; settings may be added",
    )
    arguments.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier run of the same name, which is deleted when the new run ends",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments, check what can be checked without torch, and train."""
    given, settings = parser().parse(argv)
    if (given.recipe is None) == (given.resume is None):
        raise UserError(
            "sixfold train: give a recipe (sixfold train demo) or --resume RUN, one of the two"
        )
    if given.resume is None:
        return start(
            load_recipe(given.recipe, settings),
            resume=None,
            overwrite=given.overwrite,
            stop_after=None,
        )
    if given.overwrite:
        raise UserError(
            "sixfold train: --resume keeps the run and --overwrite deletes it; give one of them"
        )
    for name in NAMES:
        if any(word.partition("=")[0] == f"--{name}" for word in settings):
            raise UserError(
                f"{name} cannot change on resume: the run stays in its folder; leave out --{name}"
            )
    from ..files.folder import recover

    recover(Path(given.resume).expanduser())
    folder = run_folder(given.resume)
    recipe = load_recipe(str(folder / "recipe.toml"), settings)
    return start(recipe, resume=folder, overwrite=False, stop_after=None)


def start(
    recipe: Recipe, *, resume: Path | None, overwrite: bool, stop_after: Literal["sft"] | None
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
