"""Explain the algorithm, its reference model and its critic."""

from __future__ import annotations

from ...algorithm.lineage import cells
from ...algorithm.method import Method
from ...sizing.held import adapter_parameters
from ..plan import TRAINING_BYTES_PER_PARAMETER, Plan
from ..schema import CriticConfig, SyncConfig
from .fact import UNKNOWN, Fact, bytes_text

_PLACEMENTS = {
    "inline": "in the loop",
    "worker": "by another process while answers are checked",
    "fused": "by the trainer before each micro-batch",
}
_BODIES = {
    "own": "a copy of the policy's body with a value head",
    "policy": "a value head on the policy's hidden states",
}


def algorithm_facts(plan: Plan) -> list[Fact]:
    row = plan.algorithm
    cell = cells(row)
    ratio = (
        "no ratio, no clip"
        if cell["ratio and clip"] == "none"
        else f"ratio and clip: {cell['ratio and clip']}"
    )
    text = (
        f"{row.name}: baseline: {cell['baseline']}; {ratio}; token losses averaged by"
        f" '{row.aggregation}' ({row.paper})"
    )
    return [
        Fact("algorithm", text),
        *_baseline_facts(row, len(plan.recipe.environment.rewards)),
        _reference_fact(plan),
        *_correction_facts(row, plan.recipe.sync),
    ]


def _baseline_facts(row: Method, rewards: int) -> list[Fact]:
    """Facts about advantages that read named rewards or a greedy completion."""
    reason = f"advantage = '{row.advantage}'"
    if row.needs_greedy:
        text = (
            "one more completion per prompt at temperature 0: scored, subtracted from the rewards"
            " of its prompt's samples, and not trained on. If its check fails, the advantages of"
            " the prompt are 0 in this step"
        )
        return [Fact("greedy", text, reason)]
    if row.advantage != "normalise_then_sum":
        return []
    text = (
        f"{rewards} rewards, each normalised within its group, then added with their weights, then"
        " normalised over the batch"
        if rewards > 1
        else "1 reward, so there is nothing to separate: the z-scores of the groups are normalised"
        " once more over the batch. Name several in environment.rewards, or use grpo"
    )
    return [Fact("parts", text, reason)]


def _reference_fact(plan: Plan) -> Fact:
    row, config = plan.algorithm, plan.recipe.reference
    whose = (
        "algorithm.beta in the recipe"
        if plan.recipe.algorithm.beta is not None
        else f"{row.name}'s default"
    )
    if not plan.keeps_reference:
        idle = "; reference.reset_every has no effect" if config.reset_every else ""
        return Fact(
            "reference",
            f"none is loaded{idle}",
            f"beta = 0 ({whose}), so there is no KL",
        )
    model = config.path or "a frozen copy of the policy"
    scored = f"{model}, scored {_PLACEMENTS[config.placement]}"
    if row.needs_teacher:
        return Fact(
            "teacher",
            f"{scored}; the advantage of a token is its log-prob minus that of the policy",
            f"advantage = '{row.advantage}'",
        )
    weight = f"weight {row.beta:g}" + (
        f", adapted until the KL is {row.kl_target:g}" if row.kl_target else ""
    )
    reset = (
        f"; replaced by a copy of the policy every {config.reset_every} steps"
        if config.reset_every
        else ""
    )
    return Fact(
        "reference",
        f"{scored}; KL {row.kl} in the {row.kl_in}, {weight}{reset}",
        f"beta = {row.beta:g} ({whose})",
    )


def _correction_facts(row: Method, sync: SyncConfig) -> list[Fact]:
    if row.correction == "none":
        return []
    low, high = row.band
    if row.correction == "negative-sequence":
        says = (
            "completions with A < 0 are dropped if their mean log-ratio to the sampler is below"
            f" -{high:g}"
        )
    else:
        bounds = f"{low:g} to {high:g}" if low is not None else f"up to {high:g}"
        says = (
            f"'{row.correction}': the policy loss is multiplied by pi(start of the step) /"
            f" pi(sampler), {bounds}"
        )
    return [
        Fact(
            "correction",
            says,
            f"algorithm.correction; sync.kind = {sync.kind}, every = {sync.every}",
        )
    ]


def critic_facts(plan: Plan) -> list[Fact]:
    row, config = plan.algorithm, plan.recipe.critic
    if not row.needs_critic:
        none = Fact("critic", "none; [critic] has no effect", f"{row.name} needs no values")
        return [none] if config != CriticConfig() else []
    lora, body, state = plan.recipe.model.lora, _BODIES[config.body], "very small"
    if config.body == "own":
        trained = plan.model.parameters
        if lora.rank:
            body = (
                f"an adapter of its own, of rank {lora.rank} as the policy's, and a value head, on"
                " the policy's frozen base"
            )
            trained = adapter_parameters(lora, plan.model.size) if plan.model.size else None
        state = (
            UNKNOWN
            if trained is None
            else f"about {bytes_text(TRAINING_BYTES_PER_PARAMETER * trained)} more"
        )
    alone = (
        f"; only the critic is trained in the first {config.warmup_steps} steps"
        if config.warmup_steps
        else ""
    )
    text = f"{body}; training state: {state}; learning rate {config.learning_rate:g}{alone}"
    return [
        Fact(
            "critic",
            text,
            f"advantage = '{row.advantage}' needs the value of every state; critic.body ="
            f" {config.body}",
        )
    ]
