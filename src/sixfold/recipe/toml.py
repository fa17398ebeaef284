"""Read recipes from TOML and `--dotted.flags`. No torch.

Every mistake is a UserError of one line. It says what is wrong, where (file and line, or flag), and
how to fix it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import UserError
from .checks import check_reward_models
from .find import find_recipe, read_recipe_file
from .flags import parse_flags
from .keys import drop_removed
from .read_stages import read_stages
from .schema import Recipe
from .settled import settled
from .stages import StagedRecipe
from .toml_lines import TomlText, syntax_error

RECORDED = "recipe.toml"
"""Name of the file in which a run records its recipe: `files.folder`."""


def load_recipe(path_or_name: str | PathLike[str], flags: Sequence[str] = ()) -> Recipe:
    """Read a recipe without stages, or one stage of a recipe with stages, and check everything.

    Args:
        path_or_name: path of a TOML file, or name of a shipped recipe. With stages, the name of one
            follows: `pipeline:sft`.
        flags: command-line flags, which take precedence over the file.

    Raises:
        UserError: for any mistake, also if a recipe has stages and none is named.
    """
    return _without_stages(load_named(path_or_name, flags), os.fspath(path_or_name))


def load_named(path_or_name: str | PathLike[str], flags: Sequence[str] = ()) -> StagedRecipe:
    """Like `load_recipe`, but a recipe with stages of which none is named is read with all."""
    file, stage = split_stage(os.fspath(path_or_name))
    staged = load_staged(file, flags)
    return StagedRecipe(staged.planned(stage, file)) if stage else staged


def split_stage(given: str) -> tuple[str, str]:
    """File or name of a recipe, and the stage that follows it, or ""."""
    file, _, stage = given.rpartition(":")
    return (given, "") if not file or Path(given).expanduser().exists() else (file, stage)


def load_staged(path_or_name: str, flags: Sequence[str] = ()) -> StagedRecipe:
    """Like `load_recipe`, for all stages. A recipe without stages has an empty list."""
    path = find_recipe(path_or_name)
    recorded = path.name == RECORDED
    return parse_staged(read_recipe_file(path), str(path), flags, recorded=recorded)


def parse_recipe(text: str, where: str, flags: Sequence[str] = ()) -> Recipe:
    """Like `load_recipe`, for TOML text in memory.

    Args:
        where: name of the text in error messages.
        flags: command-line flags, which take precedence over the text.

    Raises:
        UserError: for any mistake.
    """
    return _without_stages(parse_staged(text, where, flags), where)


def parse_staged(
    text: str, where: str, flags: Sequence[str] = (), *, recorded: bool = False
) -> StagedRecipe:
    """Like `load_staged`, for TOML text in memory.

    Args:
        text: as for `parse_recipe`, as are `where` and `flags`.
        recorded: a run recorded the text, maybe by an earlier version.
    """
    try:
        asked: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError: also raised for an integer with too many digits.
        raise UserError(syntax_error(text, where, error)) from error
    if not asked:
        raise UserError(f'{where} is empty; the smallest recipe is one line: run.name = "my-run"')
    if recorded:
        drop_removed(asked)
    tables = asked.pop("stages", None)
    file, given = TomlText(text, where), parse_flags(flags)
    if tables is None:
        staged = StagedRecipe(settled(asked, given, where, file.place))
    else:
        staged = read_stages(asked, tables, given, file)
    if not recorded:  # a run records every section
        _check_sections(staged, where)
    return staged


def _check_sections(staged: StagedRecipe, where: str) -> None:
    """Refuse settings that no stage reads."""
    recipes = [stage.recipe for stage in staged.stages] or [staged.base]
    check_reward_models([recipe.environment for recipe in recipes])
    for section in ("preference", "reward_model", "prm"):
        given = getattr(staged.base, section)
        if section == "prm":  # `sixfold eval` reads the separator without a stage
            given = given.model_copy(update={"separator": type(given)().separator})
        if given != type(given)() and all(section not in one.row.sections for one in staged.stages):
            raise UserError(
                f"{where}: [{section}] has no effect without a stage that reads it. Add [[stages]]"
                f" with kind = '{section}'"
            )


def _without_stages(staged: StagedRecipe, where: str) -> Recipe:
    if staged.stages:
        names = [stage.name for stage in staged.stages]
        raise UserError(
            f"{where} has the stages {', '.join(names)}: name one of them, e.g."
            f" {where}:{names[-1]}. All of them run with: sixfold train {where}"
        )
    return staged.base
