"""Kind `prm`: train a process reward model on solutions with labelled steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..data.step_labels import load_step_labels
from ..data.task_set import apart_from_heldout
from ..errors import UserError
from ..reward_model.step_model import step_model_of, step_root
from ..reward_model.step_objective import StepObjective
from ..run.assemble import Assembly
from ..run.work import Work
from ..run.worked import stage_trainer_config
from ..steps import absolute_name
from .examples import Examples
from .kind import StageKind
from .objective import Objective
from .step_examples import StepExamples
from .supervised import SupervisedWork


class PrmKind(StageKind):
    """Trains a process reward model on solutions with labelled steps."""

    def work(self) -> Work:
        own = self.recipe.prm
        return SupervisedWork(
            "process reward model",
            self.method,
            stage_trainer_config(self.recipe.trainer, own),
            _solutions,
            epochs=own.epochs,
            section="prm",
            make_objective=_objective,
            own_model=True,
        )


def _solutions(assembly: Assembly) -> Examples:
    """The labelled solutions of the stage.

    Raises:
        UserError: if none is left.
    """
    recipe = assembly.recipe
    found = load_step_labels(recipe.data, seed=recipe.run.seed)
    kept = apart_from_heldout(found.train, assembly.tasks.heldout)
    if left := len(found.train) - len(kept):
        if not kept:
            raise UserError(
                "data: the prompt of every solution is held out for evaluation, so none is left to"
                " train on"
            )
        found.notes.append(f"{left} solutions left out: their prompts are held out")
    return StepExamples(
        replace(found, train=kept),
        assembly.renderer,
        recipe.prm,
        context=assembly.policy.context - 1,  # the closing token
        overlong=recipe.data.overlong,
        seed=recipe.run.seed,
    )


def _objective(assembly: Assembly, examples: Examples, folder: Path) -> Objective:
    """The objective. From now on the model has the policy's place in the assembly."""
    recipe, policy = assembly.recipe, assembly.policy
    ends = absolute_name(recipe.prm.ends)
    whole = assembly.whole_policy.model
    model = step_model_of(policy, whole, ends)
    root = step_root(model, whole.requires_grad_(False) if recipe.prm.lm_weight else None)
    if assembly.shards:
        assembly.shards.shard(root)
    assembly.policy = replace(policy, model=model)
    return StepObjective(
        root,
        model,
        recipe.prm.lm_weight,
        recipe.trainer,
        replace(assembly.scoring, temperature=1.0),
        assembly.data_ranks,
        assembly.device,
    )
