"""Kind `reward_model`: train a reward model on comparisons, from the policy's body."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import UserError
from ..reward_model.model import adapted_reward_model, reward_model_of, scalar_root
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
        UserError: if they do not fit the loss.
    """
    recipe = assembly.recipe
    own = recipe.reward_model
    closing = 1  # token
    examples = comparison_examples(
        assembly, own.examples_per_step, closing, own.member, margins=own.margin
    )
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
    head, whole = recipe.reward_model.head, assembly.whole_policy.model
    adapted = adapted_reward_model(policy, head) if policy.lora else None
    saved = adapted.base if adapted else reward_model_of(policy, whole, head)
    language = whole.requires_grad_(False) if recipe.reward_model.lm_weight else None
    root = scalar_root(adapted.model if adapted else saved, language)
    if assembly.shards:
        assembly.shards.shard(root, saved.base_model.parameters() if adapted else ())
    assembly.policy = replace(policy, model=saved, lora=None, merges=adapted)
    return RewardObjective(
        root,
        saved,
        recipe.reward_model,
        recipe.trainer,
        replace(assembly.scoring, temperature=1.0),
        assembly.data_ranks,
        assembly.device,
        bool(examples.heldout),
    )
