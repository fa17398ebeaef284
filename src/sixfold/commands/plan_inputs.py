"""What `sixfold plan` is asked about: a recipe, or a model with default settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.model_source import with_model_folders
from ..errors import UserError, nearest
from ..planning.architectures import Architecture, dense_of_size, find, public_names
from ..recipe.dump import toml_literal
from ..recipe.find import shipped_recipes
from ..recipe.schema import Recipe
from ..recipe.toml import load_recipe, parse_recipe
from ..run.planned_work import Inputs, planned_inputs

MODEL_RECIPE = """\
[run]
name = "plan"
device = "cuda"
precision = "bfloat16"
[data]
max_prompt_tokens = 512
[rollout]
prompts_per_step = 128
samples_per_prompt = 8
max_new_tokens = 2048
[trainer]
max_tokens_per_microbatch = 8192
activation_checkpointing = "full"
logprob_chunk = 1024
"""
"""Settings for a model without a recipe. Flags change them."""


LEAST_SIZE = 0.1
"""Smallest model that a number of parameters describes, in 1e9 parameters. Below, the assumed
vocabulary would hold all of them."""


def read_inputs(target: str, settings: Sequence[str], *, mean_tokens: float | None) -> Inputs:
    """Resolve a recipe or a model.

    Args:
        target: recipe (file or shipped name), model folder, its config.json, name of a public
            model, or a number of parameters such as 70B.
        settings: flags that change the recipe.
        mean_tokens: mean length of completions. None: half of the bound.

    Raises:
        UserError: if nothing of that name exists, or the model's sizes are not known.
    """
    recipe, arch = _recipe(target, settings)
    if not recipe.run.steps:
        raise UserError("run.steps = 0: a plan needs at least one step, such as --run.steps 100")
    return planned_inputs(target, recipe, arch, mean_tokens=mean_tokens)


def _recipe(target: str, settings: Sequence[str]) -> tuple[Recipe, Architecture | None]:
    """The recipe, and the architecture if the target is the name or size of a public model."""
    path = Path(target).expanduser()
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return parse_recipe(_with_model(str(path.resolve())), target, settings), None
    if target in shipped_recipes() or path.suffix == ".toml" or path.exists():
        return with_model_folders(load_recipe(target, settings)), None
    size = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)[bB]", target)
    if size and float(size[1]) < LEAST_SIZE:
        raise UserError(
            f"'{target}': a number of parameters must be at least {LEAST_SIZE:g}B: in smaller"
            " models the vocabulary decides. Give the model's folder"
        )
    if size:
        arch: Architecture | None = dense_of_size(float(size[1]))
    else:
        arch = find(target)
    if arch is None:
        if path.name != target:
            return load_recipe(target, settings), None  # raises: no such file
        names = [*shipped_recipes(), *public_names()]
        raise UserError(
            f"'{target}' is no recipe, model folder, public model or number of parameters such as"
            f" 7B.{nearest(target, names)} Recipes: {', '.join(sorted(shipped_recipes()))}"
        )
    return parse_recipe(_with_model(arch.name.replace(" ", "-")), target, settings), arch


def _with_model(path: str) -> str:
    return f"{MODEL_RECIPE}[model]\npath = {toml_literal(path)}\n"
