"""Learners: algorithm, policy trainer, critic and reference, built, saved and restored together."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf

from transformers import PreTrainedModel

from ..algorithm.base import Algorithm
from ..algorithm.composed import Composed, make_algorithm
from ..algorithm.method import Method
from ..checkpointable import Checkpointable, WithoutTensors
from ..controller.collector import Collector
from ..controller.oversample import DynamicK
from ..controller.refill import Refill
from ..critic.actor_critic import ActorCritic
from ..critic.critic import Critic
from ..model.half_weights import store_in_bfloat16
from ..recipe.adapter_folder import is_adapter
from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.schema import Recipe
from ..reference.base import KeptReference, Reference
from ..reference.chain import Chain
from ..reference.frozen import FrozenReference, FusedReference, NoReference
from ..reference.reset import ResetPolicy
from ..reference.teacher import load_teacher
from ..reference.worker_reference import WorkerReference
from ..trainer.logprobs import PolicyRoot
from ..trainer.optimizer import reset_optimizer
from ..trainer.parity import TRAINING_LIMIT
from ..trainer.proximal import Proximal
from ..trainer.trainer import Trainer
from .assemble import World


@dataclass
class Learners:
    """Roles of the loop that have state.

    Attributes:
        algorithm: computes advantages and losses.
        policy: trainer of the policy.
        reference: frozen reference model, or a stand-in without one.
        critic: critic, or None.
        trainer: the policy's trainer, or one that trains critic and policy in turn.
        scorers: reference, critic and proximal forward pass.
        resets: decides when the policy is copied into the reference.
        has_teacher: True if the reference is a separate model.
        scoring: name of the scorers' time metric. "reference" if there is a reference, "scoring" if
            there is only a critic or a proximal forward pass, otherwise "".
    """

    algorithm: Algorithm
    policy: Trainer
    reference: KeptReference
    critic: Critic | None
    trainer: Trainer | ActorCritic
    scorers: Reference
    resets: ResetPolicy
    has_teacher: bool
    scoring: str = "reference"

    def reset_reference(self, step: int, heldout: float | None) -> str:
        """Copy the policy into the reference if it is time.

        On stagnation, the optimizer is reset too.

        Args:
            step: steps done.
            heldout: held-out accuracy of this step, or None.

        Returns:
            The reason for the reset, or "".
        """
        why = self.resets.look(step, heldout)
        if why and self.reference.tensors():
            self.reference.reset(self.policy.model)
            self.resets.version = self.policy.version
            if why == "stagnation":
                reset_optimizer(self.policy.optimizer)
            return why
        return ""

    @property
    def reference_version(self) -> int | None:
        """Version of the policy that the reference is a copy of. 0 for a teacher.

        None if there is no reference.
        """
        return self.resets.version if self.algorithm.needs_reference else None

    def components(self) -> dict[str, Checkpointable]:
        """Components with state, by name. The policy's weights are saved with the model."""
        found: dict[str, Checkpointable] = {
            "policy": self.policy,
            "resets": WithoutTensors(self.resets),
        }
        if isinstance(self.algorithm, Composed):
            found["algorithm"] = WithoutTensors(self.algorithm.steering)
        if self.critic:
            found["critic"] = self.critic
        # A teacher never changes and stays in its own folder.
        if self.algorithm.needs_reference and not self.has_teacher:
            found["reference"] = self.reference
        return found


def teacher_of(world: World, own: Algorithm | None = None) -> PreTrainedModel | None:
    """Load the model at reference.path, if it is set and the algorithm needs a reference.

    Raises:
        UserError: if it does not fit the policy.
    """
    path = world.recipe.reference.path
    named = own or make_algorithm(method_of(world.recipe, own), world.recipe.episode_tokens)
    return (
        load_teacher(path, world.policy, world.longest) if path and named.needs_reference else None
    )


def build_learners(
    world: World, own: Algorithm | None = None, teacher: PreTrainedModel | None = None
) -> Learners:
    """Build the algorithm and the models that it needs.

    Args:
        world: model, tasks and settings of the run.
        own: algorithm that replaces the recipe's. A `Composed` algorithm gets everything its method
            needs. Any other object gets a reference if it asks for one, but no critic; epochs and
            mini-batches then come from the recipe.
        teacher: reference model. None: load it if the recipe names one.

    Raises:
        UserError: if the teacher does not fit the policy.
    """
    recipe, config = world.recipe, world.recipe.trainer
    method = method_of(recipe, own)
    named = own if isinstance(own, Composed) else make_algorithm(method, recipe.episode_tokens)
    # A copy: the caller may train the same object again, with other rewards.
    named = replace(named, part_weights=named.part_weights or world.environment.part_weights)
    algorithm: Algorithm = named if own is None or isinstance(own, Composed) else own
    learns_values = method.needs_critic and algorithm is named
    updates = recipe.run.steps * method.updates
    warm_up = recipe.critic.warmup_steps * method.updates if learns_values else 0
    scoring = replace(world.scoring, entropy_gradient=method.entropy_in_loss)
    budget = config.max_tokens_per_microbatch, config.share_prefix
    reference = (
        _reference(world, teacher or teacher_of(world, own))
        if algorithm.needs_reference
        else NoReference()
    )
    # Log-probs of a quantised sampler differ from the policy's by design.
    limit = inf if recipe.quantised_sampling else TRAINING_LIMIT[recipe.run.precision]
    root = world.root()
    policy = Trainer(
        root,
        config,
        scoring,
        max(updates - warm_up, 0),
        epochs=method.epochs,
        frozen=reference.scorer,
        mismatch_limit=limit,
        seed=recipe.run.seed,
        ranks=world.data_ranks,
    )
    reference.check_apart(policy.optimizer)
    critic = (
        Critic(
            root,
            recipe.critic,
            config,
            world.scoring,
            updates,
            epochs=method.epochs,
            ranks=world.data_ranks,
            shards=world.shards,
            whole_policy=world.whole_policy.model,
            lora=world.policy.lora,
        )
        if learns_values
        else None
    )
    trainer = ActorCritic(policy, critic, named, recipe.critic.warmup_steps) if critic else policy
    proximal = (
        [Proximal(root, world.scoring, *budget, world.data_ranks)] if method.needs_proximal else []
    )
    scorers = Chain(reference, [*([critic] if critic else []), *proximal])
    resets = ResetPolicy(recipe.reference.reset_every, recipe.reference.reset_patience)
    role = "reference" if algorithm.needs_reference else "scoring" if critic or proximal else ""
    return Learners(
        algorithm,
        policy,
        reference,
        critic,
        trainer,
        scorers,
        resets,
        bool(recipe.reference.path),
        role,
    )


def method_of(recipe: Recipe, own: Algorithm | None) -> Method:
    """Method that the loop must support: the user's method if given, otherwise the recipe's."""
    return own.method if isinstance(own, Composed) else resolve_algorithm(recipe.algorithm)


def training_collector(world: World, own: Algorithm | None = None) -> Collector:
    """Collector of the groups that train.

    With `rollout.oversample`, more samples are started. With dynamic sampling, groups whose rewards
    are all equal are replaced. A method with a greedy baseline gets a greedy completion per group.
    """
    method, config = method_of(world.recipe, own), world.recipe.rollout
    rounds = method.dynamic_sampling
    return Collector(
        rollout=world.rollout(config.oversample),
        environment=world.environment,
        loop=world.loop,
        choose=(
            DynamicK(config.samples_per_prompt, config.oversample) if config.oversample else None
        ),
        refill=Refill(world.tasks.train, rounds, world.tasks.weights) if rounds else None,
        greedy=world.prober() if method.needs_greedy else None,
    )


def _reference(world: World, teacher: PreTrainedModel | None) -> KeptReference:
    """Frozen reference: the teacher, or the current policy. It is closed with the world."""
    config, own = world.recipe.trainer, world.recipe.reference
    model, base = teacher or world.whole_policy.model, None
    if world.policy.lora and not teacher:
        base = world.policy.plain
        model = base if _starts_at_base(world.recipe) else world.policy.lora.copied().model
    copy = not own.path
    if own.precision == "bfloat16":
        model, copy = store_in_bfloat16(deepcopy(model) if copy else model), False
    budget, shared = config.max_tokens_per_microbatch, config.share_prefix
    reference: KeptReference
    root = None
    if world.shards and base is None:
        model = deepcopy(model) if copy else model
        root, copy = world.shards.shard(PolicyRoot(model.requires_grad_(False))), False
    if own.placement == "worker":
        silence_s = world.recipe.run.silence_s
        reference = WorkerReference(model, world.scoring, budget, shared, own.threads, silence_s)
    elif own.placement == "fused":
        reference = FusedReference(model, world.scoring, copy=copy, base=base, root=root)
    else:
        reference = FrozenReference(
            model,
            world.scoring,
            budget,
            shared,
            copy=copy,
            base=base,
            offload=own.offload,
            root=root,
            ranks=world.data_ranks,
        )
    world.ending.callback(reference.close)
    return reference


def _starts_at_base(recipe: Recipe) -> bool:
    """True if the reference is the base of the adapter in the whole run.

    It is not if RL starts with a trained adapter, or if resets copy the policy's adapter. The
    reference then has its own adapter on the same base.
    """
    trained = recipe.model.path and (recipe.sft.steps or is_adapter(recipe.model.path))
    return not (trained or recipe.reference.reset_every or recipe.reference.reset_patience)
