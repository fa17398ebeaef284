"""The roles with state: algorithm, policy trainer, critic and reference. Saved together."""

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
from ..controller.curriculum import Curriculum
from ..controller.dead_letters import DeadLetters
from ..controller.dynamic_sampling import Refill
from ..controller.oversample import DynamicK
from ..critic.actor_critic import ActorCritic
from ..critic.critic import Critic
from ..model.half_weights import store_in_bfloat16
from ..recipe.adapter_folder import is_adapter
from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.schema import AlgorithmConfig, ModelConfig, ReferenceConfig, SftConfig
from ..reference.base import KeptReference, Reference, Scorers
from ..reference.frozen import FrozenReference, FusedReference, NoReference
from ..reference.reset import ResetPolicy
from ..reference.teacher import load_teacher
from ..reference.worker_reference import WorkerReference
from ..trainer.logprobs import PolicyRoot, Proximal, Scoring
from ..trainer.optimizer import reset_optimizer
from ..trainer.parity import TRAINING_LIMIT
from ..trainer.trainer import Trainer
from .assemble import Assembly


@dataclass
class TrainableRoles:
    """Roles of the loop that have state.

    Attributes:
        method: method that the loop supports.
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
        given: True if the algorithm is the caller's. Its metrics need no row in the schema.
    """

    method: Method
    algorithm: Algorithm
    policy: Trainer
    reference: KeptReference
    critic: Critic | None
    trainer: Trainer | ActorCritic
    scorers: Reference
    resets: ResetPolicy
    has_teacher: bool
    scoring: str
    given: bool

    def reset_reference(self, step: int, heldout: float | None) -> str:
        """Copy the policy into the reference if it is time.

        On stagnation, the optimizer is reset too.

        Args:
            step: steps done.
            heldout: held-out accuracy of this step, or None.

        Returns:
            The reason for the reset, or "".
        """
        why = self.resets.observe(step, heldout)
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


def teacher_of(assembly: Assembly, own: Algorithm | None = None) -> PreTrainedModel | None:
    """Load the model at reference.path, if it is set and the algorithm needs a reference.

    Raises:
        UserError: if it does not fit the policy.
    """
    path = assembly.recipe.reference.path
    named = own or make_algorithm(
        method_of(assembly.recipe.algorithm, own), assembly.recipe.episode_tokens
    )
    return (
        load_teacher(path, assembly.policy, assembly.longest)
        if path and named.needs_reference
        else None
    )


def build_roles(
    assembly: Assembly, own: Algorithm | None = None, teacher: PreTrainedModel | None = None
) -> TrainableRoles:
    """Build the algorithm and the models that it needs.

    Args:
        assembly: model, tasks and settings of the run.
        own: algorithm that replaces the recipe's. A `Composed` algorithm gets everything its method
            needs. Any other object gets a reference if it asks for one, but no critic; epochs and
            mini-batches then come from the recipe.
        teacher: reference model. None: load it if the recipe names one.

    Raises:
        UserError: if the teacher does not fit the policy.
    """
    recipe, config = assembly.recipe, assembly.recipe.trainer
    method = method_of(recipe.algorithm, own)
    named = own if isinstance(own, Composed) else make_algorithm(method, recipe.episode_tokens)
    # A copy: the caller may train the same object again, with other rewards.
    named = replace(named, part_weights=named.part_weights or assembly.environment.part_weights)
    algorithm: Algorithm = named if own is None or isinstance(own, Composed) else own
    learns_values = method.needs_critic and algorithm is named
    updates = recipe.run.steps * method.updates
    warm_up = recipe.critic.warmup_steps * method.updates if learns_values else 0
    scoring = replace(assembly.scoring, entropy_gradient=method.entropy_in_loss)
    budget = config.max_tokens_per_microbatch, config.share_prefix
    reference = (
        make_reference(assembly, teacher or teacher_of(assembly, own), assembly.scoring)
        if algorithm.needs_reference
        else NoReference()
    )
    # Log-probs of a quantised sampler differ from the policy's by design.
    limit = inf if recipe.quantised_sampling else TRAINING_LIMIT[recipe.run.precision]
    root = assembly.root()
    policy = Trainer(
        root,
        config,
        scoring,
        max(updates - warm_up, 0),
        epochs=method.epochs,
        frozen=reference.scorer,
        mismatch_limit=limit,
        seed=recipe.run.seed,
        ranks=assembly.data_ranks,
    )
    reference.check_apart(policy.optimizer)
    critic = (
        Critic(
            root,
            recipe.critic,
            config,
            assembly.scoring,
            updates,
            epochs=method.epochs,
            ranks=assembly.data_ranks,
            shards=assembly.shards,
            whole_policy=assembly.whole_policy.model,
            lora=assembly.policy.lora,
        )
        if learns_values
        else None
    )
    trainer = ActorCritic(policy, critic, named, recipe.critic.warmup_steps) if critic else policy
    proximal = (
        [Proximal(root, assembly.scoring, *budget, assembly.data_ranks)]
        if method.needs_proximal
        else []
    )
    scorers = Scorers(reference, [*([critic] if critic else []), *proximal])
    resets = ResetPolicy(recipe.reference.reset_every, recipe.reference.reset_patience)
    role = "reference" if algorithm.needs_reference else "scoring" if critic or proximal else ""
    return TrainableRoles(
        method,
        algorithm,
        policy,
        reference,
        critic,
        trainer,
        scorers,
        resets,
        bool(recipe.reference.path),
        role,
        own is not None,
    )


def method_of(config: AlgorithmConfig, own: Algorithm | None) -> Method:
    """Method that the loop must support: the user's method if given, otherwise the recipe's."""
    return own.method if isinstance(own, Composed) else resolve_algorithm(config)


def training_collector(
    assembly: Assembly,
    method: Method,
    dead: DeadLetters | None = None,
    curriculum: Curriculum | None = None,
) -> Collector:
    """Collector of the groups that train.

    With `rollout.oversample`, more samples are started. With dynamic sampling, groups whose rewards
    are all equal are replaced, by tasks that a curriculum draws, if there is one. A method with a
    greedy baseline gets a greedy completion per group.
    """
    config, rounds = assembly.recipe.rollout, method.dynamic_sampling
    return Collector(
        rollout=assembly.rollout(config.oversample),
        environment=assembly.environment,
        loop=assembly.loop,
        choose=(
            DynamicK(config.samples_per_prompt, config.oversample) if config.oversample else None
        ),
        refill=(
            Refill(
                curriculum.pool if curriculum else assembly.tasks.train,
                rounds,
                assembly.tasks.weights,
                assembly.recipe.data.whole_steps,
            )
            if rounds
            else None
        ),
        greedy=assembly.prober() if method.needs_greedy else None,
        dead=dead or DeadLetters(),
        observe=curriculum.observe if curriculum else lambda groups: None,
    )


def make_reference(
    assembly: Assembly, teacher: PreTrainedModel | None, scoring: Scoring
) -> KeptReference:
    """Frozen reference: the teacher, or the current policy. It is closed with the assembly."""
    config, own = assembly.recipe.trainer, assembly.recipe.reference
    model, base = teacher or assembly.whole_policy.model, None
    if assembly.policy.lora and not teacher:
        base = assembly.policy.plain
        model = (
            base
            if starts_at_base(assembly.recipe.model, assembly.recipe.sft, own)
            else assembly.policy.lora.copied().model
        )
    copy = not own.path
    if own.precision == "bfloat16":
        model, copy = store_in_bfloat16(deepcopy(model) if copy else model), False
    budget, shared = config.max_tokens_per_microbatch, config.share_prefix
    reference: KeptReference
    root = None
    if assembly.shards and base is None:
        model = deepcopy(model) if copy else model
        root, copy = assembly.shards.shard(PolicyRoot(model.requires_grad_(False))), False
    if own.placement == "worker":
        silence_s = assembly.recipe.run.silence_s
        reference = WorkerReference(model, scoring, budget, shared, own.threads, silence_s)
    elif own.placement == "fused":
        reference = FusedReference(model, scoring, copy=copy, base=base, root=root)
    else:
        reference = FrozenReference(
            model,
            scoring,
            budget,
            shared,
            copy=copy,
            base=base,
            offload=own.offload,
            root=root,
            ranks=assembly.data_ranks,
        )
    assembly.ending.callback(reference.close)
    return reference


def starts_at_base(model: ModelConfig, sft: SftConfig, reference: ReferenceConfig) -> bool:
    """True if the reference is the base of the adapter in the whole run.

    It is not if RL starts with a trained adapter, or if resets copy the policy's adapter. The
    reference then has its own adapter on the same base.
    """
    trained = model.path and (sft.steps or is_adapter(model.path))
    return not (trained or reference.reset_every or reference.reset_patience)
