"""`sixfold sft RECIPE`: the supervised warm-up of a recipe, and no RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cli.parsing import RECIPE_HELP, VerbParser, argument, option
from ..errors import UserError
from ..recipe.toml import load_staged
from . import train


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = argument(RECIPE_HELP)
    overwrite: bool = option(train.OVERWRITE_HELP, False)
    settings: tuple[str, ...] = ()


PARSER = VerbParser("sft", "Run only the supervised warm-up (SFT) of a recipe.", Options)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    staged = load_staged(given.recipe, given.settings)
    if staged.stages:
        names = [stage.name for stage in staged.stages if stage.kind == "sft"]
        if len(names) != 1:
            raise UserError(
                f"{given.recipe} has {len(names)} stages of kind sft ({', '.join(names)}): name one"
                f" with sixfold train {given.recipe} --only STAGE"
            )
        chosen = train.Options(
            recipe=given.recipe,
            overwrite=given.overwrite,
            only=names[0],
            settings=given.settings,
        )
        return train.start(staged, chosen)
    if staged.base.sft.steps == 0:
        raise UserError(
            f"sft.steps = 0 in {given.recipe}: there is no warm-up to run; set it, e.g."
            " --sft.steps 200"
        )
    chosen = train.Options(recipe=given.recipe, overwrite=given.overwrite, settings=given.settings)
    return train.start(staged, chosen, stop_after="sft")
