"""`sixfold explain RECIPE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.model_source import with_model_folders
from ..cli.parsing import RECIPE_HELP, VerbParser, argument, option
from ..data.profile import measured
from ..errors import UserError
from ..recipe.explain import Fact, explain
from ..recipe.explain.rollout import measured_facts
from ..recipe.explain.stages import overview
from ..recipe.plan import Plan, make_plan
from ..recipe.read_stages import unread
from ..recipe.toml import load_staged, split_stage
from ..report.staged import stage_times
from ..report.untrusted import visible
from ..run.recipe_environment import check_names
from ..stages.plans import stage_plans


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = argument(RECIPE_HELP)
    render: bool = option(
        "also load the tokenizer and the tasks, and show the first prompt with its special tokens,"
        " and the tokens that end a completion",
        False,
    )
    settings: tuple[str, ...] = ()


def _measured(plan: Plan) -> list[Fact]:
    """What the stored pass rates say that the recipe names, if it names some."""
    path = plan.recipe.data.curriculum.profile
    if not path:
        return []
    found = measured(Path(path).expanduser())
    return measured_facts(plan, found.rates, found.completion_tokens, path)


PARSER = VerbParser(
    "explain",
    "Explain a recipe in words: resolved values, with the reason for each number.",
    Options,
)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    file, name = split_stage(given.recipe)
    staged = load_staged(file, given.settings)
    stage = staged.stages[staged.position(name, file)] if name else None
    if staged.stages and not stage:
        if given.render:
            raise UserError(f"--render: name a stage, {file}:{staged.stages[-1].name}")
        times = stage_times(Path(staged.base.run.dir) / staged.base.run.name)
        print(visible(overview(staged, stage_plans(staged, file), file, times)))
        for note in unread(staged):
            print(visible(note))
        return 0
    recipe = with_model_folders(staged.planned(name, file) if name else staged.base)
    plan = make_plan(recipe)
    check_names(recipe.environment, recipe.eval)
    print(visible(explain(plan, staged, stage, _measured(plan))))
    if given.render:
        from ..run.rendered_prompt import render_recipe

        print("", *map(visible, render_recipe(recipe)), sep="\n")
    return 0
