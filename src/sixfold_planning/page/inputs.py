"""What `sixfold plan` is asked about: a recipe, or a model with default settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sixfold.checkpoint.model_source import with_model_folders
from sixfold.errors import UserError, nearest
from sixfold.recipe.dump import toml_literal
from sixfold.recipe.find import shipped_recipes
from sixfold.recipe.schema import Recipe
from sixfold.recipe.stages import StagedRecipe
from sixfold.recipe.toml import load_recipe, load_staged, parse_recipe, split_stage

from ..architectures import (
    Architecture,
    find,
    nearest_public,
    public_names,
    size_in_name,
    with_sizes,
)
from ..planned_work import Inputs, planned_inputs

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
"""Smallest model that a number of parameters describes, in 1e9 parameters. Below, a vocabulary of
usual size would hold all of them."""

PASS_RATE = 0.5
"""Share of correct samples if nothing says it."""

SAME_SIZE = 0.1
"""Relative difference up to which a number means a public model of another size in its name."""


def read_inputs(target: str, settings: Sequence[str], *, mean_tokens: float | None) -> Inputs:
    """Resolve a recipe or a model.

    Args:
        target: recipe (file or shipped name), model folder, its config.json, name of a public
            model, or a number of parameters such as 70B.
        settings: flags that change the recipe.
        mean_tokens: mean length of completions. None: as for `planned_inputs`.

    Raises:
        UserError: if nothing of that name exists, or the model's sizes are not known.
    """
    recipe, arch = _recipe(target, settings)
    if not recipe.run.steps:
        raise UserError("run.steps = 0: a plan needs at least one step, such as --run.steps 100")
    found = planned_inputs(target, recipe, arch, mean_tokens=mean_tokens)
    size = _number(target)
    if size is None or arch is None:
        return found
    public = nearest_public(size)
    means = f"{target} has the shape of {public.name}, the nearest public model"
    if arch is public:
        means = f"{target} is {public.name}, the nearest public model"
    return replace(found, assumed=(means, *found.assumed))


def rates_of(inputs: Inputs, pass_rate: float | None) -> tuple[float, ...]:
    """Pass rates of tasks: the given one, else those that the recipe's profile has, else 0.5."""
    if pass_rate is not None:
        return (pass_rate,)
    return inputs.rates or (PASS_RATE,)


def _recipe(target: str, settings: Sequence[str]) -> tuple[Recipe, Architecture | None]:
    """The recipe, and the architecture if the target is the name or size of a public model."""
    path = Path(target).expanduser()
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return parse_recipe(_with_model(str(path.resolve())), target, settings), None
    file, stage = split_stage(target)
    if file in shipped_recipes() or Path(file).suffix == ".toml" or path.exists():
        if stage:
            _check_kind(load_staged(file, settings), file, stage)
        return with_model_folders(load_recipe(target, settings)), None
    size = _number(target)
    if size is not None and size < LEAST_SIZE:
        raise UserError(
            f"'{target}': a number of parameters must be at least {LEAST_SIZE:g}B: in smaller"
            " models the vocabulary decides. Give the model's folder"
        )
    arch = find(target) if size is None else _of_size(size)
    if arch is None:
        if path.name != target:
            return load_recipe(target, settings), None  # raises: no such file
        names = [*shipped_recipes(), *public_names()]
        raise UserError(
            f"'{target}' is no recipe, model folder, public model or number of parameters such as"
            f" 7B.{nearest(target, names)} Recipes: {', '.join(sorted(shipped_recipes()))}"
        )
    return parse_recipe(_with_model(arch.name.replace(" ", "-")), target, settings), arch


def _check_kind(staged: StagedRecipe, file: str, stage: str) -> None:
    kind = staged.stages[staged.position(stage, file)].kind
    if kind != "rl":
        raise UserError(
            f"{file}:{stage} is of kind {kind}, and sixfold plan estimates stages of kind rl. Its"
            f" settings: sixfold explain {file}:{stage}"
        )


def _number(target: str) -> float | None:
    """The number of a target such as 7B, in 1e9 parameters. None: it is no number."""
    size = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)[bB]", target)
    return float(size[1]) if size else None


def _of_size(size: float) -> Architecture:
    """The nearest public model, or one of its shape if it has another size."""
    public = nearest_public(size)
    named = size_in_name(public.name)
    if named == (size, size) or abs(public.params_b / size - 1) <= SAME_SIZE:
        return public
    return replace(with_sizes(public, size, None), name=f"{size:g}B")


def _with_model(path: str) -> str:
    return f"{MODEL_RECIPE}[model]\npath = {toml_literal(path)}\n"
