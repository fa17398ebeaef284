"""Kind `preference`: prefer better completions to worse ones, by a loss of `preference.zoo`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch
from ..data.comparisons import load_comparisons
from ..data.task_set import apart_from_heldout
from ..errors import UserError
from ..model.weights_hash import weights_hash
from ..preference.mixture import Mixture, Term
from ..recipe.preference_plan import resolve_losses
from ..reference.base import KeptReference
from ..reference.cached import FILE, CachedReference
from ..reference.frozen import NoReference
from ..reference.teacher import load_teacher
from ..run.assemble import Assembly
from ..run.trainable_roles import make_reference, starts_at_base
from ..run.work import Work
from ..run.worked import stage_trainer_config
from ..seeds import STEP_BYTES, seed_number
from ..trainer.logprobs import PolicyRoot, Root, score_tables
from ..trainer.whole_weights import WholeWeights
from .examples import Examples
from .kind import StageKind
from .objective import Objective
from .preference_examples import PreferenceExamples
from .preference_objective import PreferenceObjective
from .supervised import SupervisedWork


class PreferenceKind(StageKind):
    """Prefers better completions to worse ones."""

    def work(self) -> Work:
        own = self.recipe.preference
        trainer = stage_trainer_config(self.recipe.trainer, own)
        return SupervisedWork(
            "preference training",
            self.method,
            trainer,
            _examples,
            epochs=own.epochs,
            section="preference",
            make_objective=_objective,
        )


def comparison_examples(
    assembly: Assembly,
    examples_per_step: int,
    spare: int = 0,
    member: int = 0,
    *,
    margins: bool = False,
) -> PreferenceExamples:
    """The comparisons of a stage, in the tokens of its policy.

    Args:
        assembly: model, tasks and settings.
        examples_per_step: comparisons per step.
        spare: tokens of the context that no comparison may use.
        member: every number gives another order.
        margins: as for `load_comparisons`.

    Raises:
        UserError: if none is left.
    """
    recipe, renderer = assembly.recipe, assembly.renderer
    data, own, seed = recipe.data, recipe.comparisons, recipe.run.seed
    found = load_comparisons(data, own, seed=seed, chat=renderer.has_template, margins=margins)
    kept = apart_from_heldout(found.train, assembly.tasks.heldout)
    if left := len(found.train) - len(kept):
        if not kept:
            raise UserError(
                "data: the prompt of every comparison is held out for evaluation, so none is left"
                " to train on"
            )
        found.notes.append(f"{left} comparisons left out: their prompts are held out")
    return PreferenceExamples(
        replace(found, train=kept),
        renderer,
        own,
        examples_per_step=examples_per_step,
        context=assembly.policy.context - spare,
        overlong=data.overlong,
        seed=seed_number(f"{seed}\x00{member}", STEP_BYTES) if member else seed,
    )


def _examples(assembly: Assembly) -> Examples:
    """The comparisons of the stage.

    Raises:
        UserError: if they do not fit the losses.
    """
    own = assembly.recipe.preference
    examples = comparison_examples(assembly, own.examples_per_step)
    if examples.unpaired and not any(row.unpaired for row, _, _ in resolve_losses(own)):
        raise UserError(
            f"preference.losses: {', '.join(own.losses)} takes pairs, but the data has single"
            " completions with a label. Use kto, bco, apo_zero_unpaired or outcome"
        )
    if examples.ranked and any(row.unpaired for row, _, _ in resolve_losses(own)):
        examples.notes.append(
            f"{own.losses[0]} reads single completions: one counts as liked if its grade is above"
            " the mean of its comparison"
        )
    return examples


def _objective(assembly: Assembly, examples: Examples, folder: Path) -> Objective:
    assert isinstance(examples, PreferenceExamples)
    own, path = assembly.recipe.preference, assembly.recipe.reference.path
    mixture = Mixture([Term(*term) for term in resolve_losses(own)])
    scoring = replace(assembly.scoring, temperature=1.0)

    def score(root: Root, batch: Batch) -> Tensor:
        config = assembly.recipe.trainer
        budget = config.max_tokens_per_microbatch, config.share_prefix
        rows = batch.to(assembly.device)
        return score_tables(root, rows, scoring, *budget, assembly.data_ranks)[0]

    def teacher() -> PreTrainedModel | None:
        return load_teacher(path, assembly.policy, assembly.policy.context) if path else None

    def fill(cached: CachedReference) -> None:
        """Compute the reference's log-probs with the policy itself, which is still untrained."""
        groups = [*examples.everything(), *examples.heldout]
        separate, lora = teacher(), assembly.policy.lora
        root = PolicyRoot(separate) if separate else assembly.root()
        recipe, model = assembly.recipe, separate or root.model
        if lora and not separate and starts_at_base(recipe.model, recipe.sft, recipe.reference):
            model = lora.base  # an adapter that starts adds nothing, whatever its seed
        key = weights_hash(WholeWeights(model))[:32]
        key += f"-{scoring.autocast or 'float32'}".replace("torch.", "")
        cached.fill(key, groups, partial(score, root))

    reference: KeptReference = NoReference()
    prepare = None
    if mixture.needs_reference and own.reference == "cached":
        shared = Path(own.cache) if own.cache else None
        reference = cached = CachedReference(folder / FILE, shared, assembly.ranks)
        prepare = partial(fill, cached)
    elif mixture.needs_reference:
        reference = make_reference(assembly, teacher(), scoring)
    return PreferenceObjective(
        mixture,
        reference,
        partial(score, assembly.root()),
        device=assembly.device,
        limit=assembly.policy.context,
        teacher=bool(path) and prepare is None,
        cut_frac=examples.cut_frac,
        prepare=prepare,
        policy_hash=assembly.policy_hash if examples.sampled else None,
    )
