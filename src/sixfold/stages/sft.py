"""Kind `sft`: imitate worked solutions or conversations."""

from __future__ import annotations

from dataclasses import replace

from ..data.conversations import load_conversations
from ..data.task_set import apart_from_heldout
from ..errors import UserError
from ..recipe.stages import reads_tasks
from ..run.assemble import Assembly
from ..run.work import Work
from ..run.worked import stage_trainer_config
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
            stage_trainer_config(self.recipe.trainer, sft),
            TaskExamples if worked else _conversations,
            epochs=sft.epochs,
            neftune_alpha=sft.neftune_alpha,
        )


def _conversations(assembly: Assembly) -> Examples:
    recipe, renderer = assembly.recipe, assembly.renderer
    data, sft, seed = recipe.data, recipe.sft, recipe.run.seed
    form = "auto" if sft.form == "tasks" else sft.form
    found = load_conversations(data, seed=seed, form=form, chat=renderer.has_template)
    kept = apart_from_heldout(found.train, assembly.tasks.heldout)
    if left := len(found.train) - len(kept):
        if not kept:
            raise UserError(
                "data: the prompt of every conversation is held out for evaluation, so none is"
                " left to train on"
            )
        found.notes.append(f"{left} conversations left out: their prompts are held out")
    return ConversationExamples(
        replace(found, train=kept),
        renderer,
        sft,
        context=assembly.policy.context,
        overlong=data.overlong,
        seed=seed,
    )
