"""Show a Plan as text: one statement per line, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from ..dump import flat, toml_literal
from ..knobs import knobs
from ..plan import Plan
from ..schema import Recipe
from ..stages import Stage, StagedRecipe
from .algorithm import algorithm_facts, critic_facts
from .fact import Fact
from .memory import memory_lines
from .model import model_facts
from .placement import placement_facts
from .rollout import rollout_facts, sampling_facts
from .stages import whole_stage, with_artifacts
from .tasks import eval_facts, reward_facts, task_facts
from .trainer import disk_facts, end_facts, trainer_facts


def explain(
    plan: Plan,
    staged: StagedRecipe | None = None,
    stage: Stage | None = None,
    measured: Sequence[Fact] = (),
) -> str:
    """The whole plan as text, followed by the settings that differ from their defaults.

    Args:
        measured: what stored pass rates say, if the recipe names some.
    """
    stated = facts(plan)
    if staged and stage:
        rl = stage.kind == "rl"
        stated = with_artifacts(stated, stage, plan) if rl else whole_stage(staged, stage, plan)
    stated = [*stated, *measured]
    width = max(len(fact.topic) for fact in stated) + 2
    out = []
    for fact in stated:
        out.append(f"{fact.topic:<{width}}{fact.says}")
        if fact.why:
            out.append(f"{'':<{width}}  because {fact.why}")
    asked = asked_settings(plan.recipe)
    out += ["", f"requested ({len(asked)} of {len(knobs())} settings differ from their defaults)"]
    key_width = max((len(key) for key, _, _ in asked), default=0)
    out += [f"  {key:<{key_width}}  {value}  (default {default})" for key, value, default in asked]
    return "\n".join(out)


def asked_settings(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(key, value, default) in TOML syntax for every setting that differs from its default."""
    defaults = {**{key: knob.default for key, knob in knobs().items()}, **flat(Recipe())}
    changed = [(key, value) for key, value in flat(recipe).items() if value != defaults[key]]
    return [(key, _literal(value), _literal(defaults[key])) for key, value in changed]


def _literal(value: object) -> str:
    return "the algorithm's own" if value is None else toml_literal(value)


def facts(plan: Plan) -> list[Fact]:
    """All resolved numbers, in the order in which a run uses them."""
    return [
        *model_facts(plan),
        *task_facts(plan),
        *rollout_facts(plan),
        *placement_facts(plan),
        *algorithm_facts(plan),
        *critic_facts(plan),
        *sampling_facts(plan),
        *reward_facts(plan),
        *trainer_facts(plan),
        *eval_facts(plan, plan.recipe.data),
        *end_facts(plan),
        *disk_facts(plan),
        *(Fact("GPU memory", says, why) for says, why in memory_lines(plan)),
    ]
