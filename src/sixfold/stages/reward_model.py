"""Kind `reward_model`: train a reward model on comparisons, from the policy's body."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import UserError
from ..reward_model.model import reward_model_of, scalar_root
from ..reward_model.objective import RewardObjective
from ..run.assemble import Assembly
from ..run.work import Work
from ..run.worked import stage_trainer_config
from .examples import Examples
from .kind import StageKind
from .objective import Objective
from .preference import comparison_examples
from .supervised import SupervisedWork


class RewardModelKind(StageKind):
    """Trains a reward model on comparisons."""

    def work(self) -> Work:
        own = self.recipe.reward_model
        return SupervisedWork(
            "reward model",
            self.method,
            stage_trainer_config(self.recipe.trainer, own),
            _comparisons,
            epochs=own.epochs,
            section="reward_model",
            make_objective=_objective,
            own_model=True,
        )


def _comparisons(assembly: Assembly) -> Examples:
    """The comparisons of the stage.

    Raises:
        UserError: if they do not fit the loss, or the model gets an adapter.
    """
    recipe = assembly.recipe
    if assembly.policy.lora:
        raise UserError(
            "a reward model has no adapter: all of its weights are trained. Set model.lora.rank = 0"
            " in this stage"
        )
    own = recipe.reward_model
    examples = comparison_examples(assembly, own.examples_per_step, spare=1)  # the closing token
    if own.loss == "bradley_terry" and examples.unpaired:
        raise UserError(
            "reward_model.loss = 'bradley_terry' compares completions, but the data has single"
            " completions with a label. Use loss = 'bce'"
        )
    if own.length_debias and not examples.heldout:
        raise UserError(
            "reward_model.length_debias is measured on held-out comparisons, and none are: set"
            " data.heldout, or length_debias = false"
        )
    return examples


def _objective(assembly: Assembly, examples: Examples, folder: Path) -> Objective:
    """The objective. From now on the reward model has the policy's place in the assembly."""
    recipe, policy = assembly.recipe, assembly.policy
    model = reward_model_of(policy, assembly.whole_policy.model, recipe.reward_model.head)
    root = scalar_root(model)
    if assembly.shards:
        assembly.shards.shard(root)
    assembly.policy = replace(policy, model=model)
    return RewardObjective(
        root,
        model,
        recipe.reward_model,
        recipe.trainer,
        replace(assembly.scoring, temperature=1.0),
        assembly.data_ranks,
        assembly.device,
        bool(examples.heldout),
    )
