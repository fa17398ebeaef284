"""Sixfold from Python: the same run as `sixfold train`, with a reward function and tasks of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Recipe
from .errors import UserError
from .recipe_io import load_recipe, parse_recipe
from .types import Task

if TYPE_CHECKING:  # at run time it would bring torch in
    from .algorithm.base import Algorithm


def train(
    recipe: str | Recipe = "",
    *,
    reward: Callable[..., Any] | None = None,
    algorithm: Algorithm | None = None,
    tasks: Sequence[Task] | None = None,
    heldout: Sequence[Task] = (),
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """Train, and give back the run's folder.

    recipe: a TOML file, a shipped name, a Recipe, or empty for the defaults. reward: `f(completion, task) -> float`, or one written for TRL
    (`f(prompts, completions, **columns) -> list[float]`); it replaces the recipe's rewards and runs in this process.
    algorithm: an object with the two methods of `algorithm.base.Algorithm`; it replaces the recipe's. tasks, heldout: replace the
    recipe's dataset. settings: dotted overrides, e.g. {"trainer.learning_rate": 1e-6}. resume: go on with the run of that name.

    Raises UserError for bad input, KeyboardInterrupt when stopped by a signal (the run's last checkpoint stays).
    """
    from .plan import make_plan
    from .run import train_run

    flags = [part for key, value in (settings or {}).items() for part in (f"--{key}", _flag(value))]
    if isinstance(recipe, Recipe):
        if flags:
            raise UserError("settings go with a recipe file or name; with a Recipe object, give it the values")
        resolved = recipe
    else:
        resolved = load_recipe(recipe, flags) if recipe else parse_recipe('run.name = "run"', "sixfold.train", flags)
    if tasks is None and heldout:
        raise UserError("heldout is given without tasks: give both, or set data.heldout or data.heldout_split for the recipe's dataset")
    make_plan(resolved)
    folder = Path(resolved.run.dir) / resolved.run.name
    own = {"reward": reward, "algorithm": algorithm, "tasks": tasks, "heldout": heldout}
    code = train_run(resolved, resume=folder if resume else None, overwrite=overwrite, **own)  # type: ignore[arg-type]
    if code:
        raise KeyboardInterrupt(f"stopped by signal {code - 128}")
    return folder


def _flag(value: Any) -> str:
    from .recipe_io import toml_literal

    return value if isinstance(value, str) else toml_literal(value)
