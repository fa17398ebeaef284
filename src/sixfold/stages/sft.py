"""Kind `sft`: imitate worked solutions or conversations."""

from __future__ import annotations

from ..data.conversations import load_conversations
from ..environment.episodes import library_of
from ..environment.registry import SOURCES
from ..recipe.schema import Recipe
from ..run.assemble import Assembly
from ..run.work import Work
from ..run.worked import sft_trainer_config
from .examples import Examples, TaskExamples
from .kind import StageKind
from .sft_examples import ConversationExamples
from .supervised import SupervisedWork


class SftKind(StageKind):
    """Imitates worked solutions or conversations."""

    def work(self, recipe: Recipe) -> Work:
        trainer = sft_trainer_config(recipe.trainer, recipe.sft)
        return SupervisedWork("SFT", trainer, _examples)

    def reads_tasks(self, recipe: Recipe) -> bool:
        """True if [data] holds tasks with worked solutions, and not conversations."""
        if recipe.sft.form != "auto":
            return recipe.sft.form == "tasks"
        generated = [name for name in recipe.data.names if name in SOURCES or library_of(name)]
        return bool(recipe.data.trace_field or generated)


def _examples(assembly: Assembly) -> Examples:
    recipe = assembly.recipe
    form = recipe.sft.form
    if form == "tasks" or SftKind().reads_tasks(recipe):
        return TaskExamples(assembly)
    renderer, policy, seed = assembly.renderer, assembly.policy, recipe.run.seed
    return ConversationExamples(
        load_conversations(recipe.data, seed=seed, form=form, chat=renderer.has_template),
        renderer,
        recipe.sft,
        context=policy.context,
        overlong=recipe.data.overlong,
        seed=seed,
    )
