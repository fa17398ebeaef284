"""Kind `sft`: imitate worked solutions or conversations."""

from __future__ import annotations

from ..data.conversations import load_conversations
from ..recipe.stages import reads_tasks
from ..run.assemble import Assembly
from ..run.work import Work
from ..run.worked import sft_trainer_config
from .examples import Examples, TaskExamples
from .kind import StageKind
from .sft_examples import ConversationExamples
from .supervised import SupervisedWork


class SftKind(StageKind):
    """Imitates worked solutions or conversations."""

    def work(self) -> Work:
        sft = self.recipe.sft
        worked = reads_tasks("solutions", self.recipe.data, sft.form)
        return SupervisedWork(
            "SFT",
            self.method,
            sft_trainer_config(self.recipe.trainer, sft),
            TaskExamples if worked else _conversations,
            epochs=sft.epochs,
            neftune_alpha=sft.neftune_alpha,
        )


def _conversations(assembly: Assembly) -> Examples:
    recipe, renderer = assembly.recipe, assembly.renderer
    data, sft, seed = recipe.data, recipe.sft, recipe.run.seed
    form = "auto" if sft.form == "tasks" else sft.form
    return ConversationExamples(
        load_conversations(data, seed=seed, form=form, chat=renderer.has_template),
        renderer,
        sft,
        context=assembly.policy.context,
        overlong=data.overlong,
        seed=seed,
    )
