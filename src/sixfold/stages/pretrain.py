"""Kind `pretrain`: predict each token of texts from those before it."""

from __future__ import annotations

from ..data.texts import load_texts
from ..rollout.worked_episode import worked_episodes
from ..run.assemble import Assembly
from ..run.work import Work
from ..run.worked import stage_trainer_config
from ..types import Task, Trajectory
from .examples import Examples
from .kind import StageKind
from .pretrain_examples import PretrainExamples
from .supervised import SupervisedWork


class PretrainKind(StageKind):
    """Predicts each token of texts from those before it."""

    def work(self) -> Work:
        recipe, own = self.recipe, self.recipe.pretrain
        trainer = stage_trainer_config(recipe.trainer, own)
        texts = None
        if not recipe.model.path and recipe.model.scratch.tokenizer == "trained":
            found = load_texts(recipe.data, own.text_field, seed=recipe.run.seed)
            texts = [document.text for document in found.train]
        return SupervisedWork("pretraining", self.method, trainer, _examples, texts)


def _examples(assembly: Assembly) -> Examples:
    recipe, player = assembly.recipe, assembly.player

    def play(task: Task) -> Trajectory:
        return assembly.loop.run(worked_episodes(player, [task]))[0]

    return PretrainExamples(
        load_texts(recipe.data, recipe.pretrain.text_field, seed=recipe.run.seed),
        recipe.pretrain,
        assembly.renderer,
        context=assembly.policy.context,
        seed=recipe.run.seed,
        play=play if player.environment else None,
    )
