"""What learns while RL runs, and what it is measured against: algorithm, policy trainer, critic, reference; built, saved and restored together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..algorithm.base import Algorithm
from ..algorithm.composed import Composed, make_algorithm
from ..algorithm.method import Method
from ..controller.oversample import Oversample
from ..controller.refill import Refill
from ..critic.actor_critic import ActorCritic
from ..critic.critic import Critic
from ..errors import UserError
from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.schema import Recipe
from ..reference.base import KeptReference, Reference
from ..reference.chain import Chain
from ..reference.frozen import FrozenReference, FusedReference, NoReference
from ..reference.reset import ResetPolicy
from ..reference.teacher import load_teacher
from ..reference.worker_reference import WorkerReference
from ..rollout.base import Rollout
from ..trainer.optimizer import reset_optimizer
from ..trainer.optimizer_state import load_optimizer_tensors, optimizer_tensors
from ..trainer.parity import TRAINING_LIMIT
from ..trainer.proximal import Proximal
from ..trainer.trainer import Trainer
from .assemble import World


@dataclass
class Learners:
    """The roles of the loop that have a state. trainer: the policy's own, or critic and policy in turn. scorers: reference, critic, proximal pass.

    scoring: what their time is: "reference" if there is one, "scoring" if it is only the critic and the proximal pass, else empty.
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
        """Copy the policy into the reference if it is time; on stagnation the optimizer starts afresh too. Says which, or nothing."""
        why = self.resets.look(step, heldout)
        if why and self.reference.tensors():
            self.reference.reset(self.policy.model)
            if why == "stagnation":
                reset_optimizer(self.policy.optimizer)
            return why
        return ""

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the policy's weights, for a checkpoint."""
        tensors = optimizer_tensors(self.policy.optimizer, self.policy.model)
        tensors |= {} if self.has_teacher else self.reference.tensors()  # a teacher never changes: its folder has it
        return tensors | (self.critic.tensors() if self.critic else {})

    def counters(self) -> dict[str, int]:
        """Step counts and the like, as JSON."""
        return self.policy.counters() | (self.critic.counters if self.critic else {})

    def steered(self) -> dict[str, Any]:
        """What the algorithm and the reset rule have adapted to, as JSON."""
        algorithm = self.algorithm.steering.state() if isinstance(self.algorithm, Composed) else {}
        return {"algorithm": algorithm, "resets": self.resets.state()}

    def load(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int], steered: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds. Raises UserError where it was made by another algorithm's parts."""
        p = self.policy
        load_optimizer_tensors(p.optimizer, p.model, tensors)
        if self.reference.tensors() and not self.has_teacher:
            if not any(name.startswith("reference/") for name in tensors):
                raise UserError("the checkpoint holds no reference weights: it was made with algorithm.beta = 0")
            self.reference.load(tensors)
        if self.critic:
            self.critic.load(tensors, counters)
        p.load_counters(counters)
        if isinstance(self.algorithm, Composed):
            self.algorithm.steering.load(steered["algorithm"])
        self.resets.load(steered["resets"])


def teacher_of(world: World, own: Algorithm | None = None) -> PreTrainedModel | None:
    """The model at reference.path, if the algorithm needs a reference and the recipe names one. Raises UserError if it does not fit."""
    path = world.recipe.reference.path
    named = own or make_algorithm(method_of(world.recipe, own), world.recipe.rollout.max_new_tokens)
    return load_teacher(path, world.policy, world.longest) if path and named.needs_reference else None


def build_learners(world: World, own: Algorithm | None = None, teacher: PreTrainedModel | None = None) -> Learners:
    """The recipe's algorithm and the models it needs beside the policy.

    own: an algorithm in place of the recipe's. A row made by `replace` gets all that it needs; another object is asked whether it needs a
    reference, and gets no critic; passes and mini-batches are the recipe's.

    Raises UserError for a teacher that does not fit.
    """
    recipe, config = world.recipe, world.recipe.trainer
    method = method_of(recipe, own)
    named = own if isinstance(own, Composed) else make_algorithm(method, recipe.rollout.max_new_tokens)
    algorithm, learns_values = own or named, method.needs_critic and own in (None, named)
    updates = recipe.run.steps * method.updates
    warm_up = recipe.critic.warmup_steps * method.updates if learns_values else 0
    scoring = replace(world.scoring, entropy_gradient=method.entropy_in_loss)
    budget = config.max_tokens_per_microbatch, config.share_prefix
    reference = _reference(world, teacher or teacher_of(world, own)) if algorithm.needs_reference else NoReference()
    # Quantised weights are meant to sample other log-probs than the policy's.
    limit = inf if recipe.sync.quantised else TRAINING_LIMIT[recipe.run.precision]
    policy = Trainer(
        world.policy.model,
        config,
        scoring,
        max(updates - warm_up, 0),
        epochs=method.epochs,
        frozen=reference.scorer,
        mismatch_limit=limit,
    )
    reference.check_apart(policy.optimizer)
    critic = Critic(world.policy.model, recipe.critic, config, world.scoring, updates, epochs=method.epochs) if learns_values else None
    trainer = ActorCritic(policy, critic, named, recipe.critic.warmup_steps) if critic else policy
    proximal = [Proximal(world.policy.model, world.scoring, *budget)] if method.needs_proximal else []
    scorers = Chain(reference, [*([critic] if critic else []), *proximal])
    resets = ResetPolicy(recipe.reference.reset_every, recipe.reference.reset_patience)
    role = "reference" if algorithm.needs_reference else "scoring" if critic or proximal else ""
    return Learners(algorithm, policy, reference, critic, trainer, scorers, resets, bool(recipe.reference.path), role)


def method_of(recipe: Recipe, own: Algorithm | None) -> Method:
    """What the loop must provide for: the row of an algorithm of one's own if it has one, else the recipe's."""
    return own.method if isinstance(own, Composed) else resolve_algorithm(recipe.algorithm)


def training_rollout(world: World, own: Algorithm | None = None) -> Rollout:
    """K samples of each task, out of more where the recipe starts more; groups whose rewards are all equal replaced where the algorithm samples
    dynamically."""
    rounds = method_of(world.recipe, own).dynamic_sampling
    config = world.recipe.rollout
    rollout = Oversample(world.oversampler(), world.environment, config.samples_per_prompt) if config.oversample else world.rollout()
    return Refill(rollout, world.environment, world.tasks.train, rounds, world.tasks.weights) if rounds else rollout


def _reference(world: World, teacher: PreTrainedModel | None) -> KeptReference:
    """The teacher, or the policy as it is now, scored where the recipe says. It ends with the world."""
    config, own = world.recipe.trainer, world.recipe.reference
    model = teacher or world.policy.model
    budget, shared = config.max_tokens_per_microbatch, config.share_prefix
    reference: KeptReference
    if own.placement == "worker":
        reference = WorkerReference(model, world.scoring, budget, shared, own.threads)
    elif own.placement == "fused":
        reference = FusedReference(model, world.scoring, copy=not own.path)
    else:
        reference = FrozenReference(model, world.scoring, budget, shared, copy=not own.path)
    world.ending.callback(reference.close)
    return reference
