"""Explain a step: how many samples, how the engine draws them, and how they are batched."""

from __future__ import annotations

from collections.abc import Sequence

from ...algorithm.method import Method
from ...environment.pass_rate import degenerate_probability, degenerate_share
from ...environment.preflight import expected_refill
from ..dump import toml_literal
from ..plan import Plan
from ..schema import EngineConfig, Preemption, RolloutConfig, Speculation
from .fact import UNKNOWN, Fact, bytes_text, tokens_text

_PREFIXES = {
    "radix": "prompts that share a beginning compute it once (radix tree)",
    "hash": "prompts that share a beginning compute its full blocks once (hashes of blocks)",
    "none": "prompts that share a beginning compute it separately",
}
_ADMISSION = {
    "none": "a sequence starts when its longest possible completion fits, so none is preempted",
    "recompute": (
        "a sequence starts when its prompt fits; if blocks run out, the newest sequence stops, is"
        " computed again later and continues with the same tokens"
    ),
    "swap": (
        "a sequence starts when its prompt fits; if blocks run out, the newest sequence is moved to"
        " host memory{room} and later continues with the same tokens"
    ),
}
_SOLVED = (0.1, 0.5, 0.9)
"""Pass rates for which the cost of dynamic sampling is shown."""


def rollout_facts(plan: Plan) -> list[Fact]:
    rollout, row = plan.recipe.rollout, plan.algorithm
    # A micro-batch never spans two minibatches, so each minibatch after the first may add one.
    most = plan.microbatches + row.minibatches - 1
    batches = "1 micro-batch" if most == 1 else f"{most} micro-batches"
    a_pass = " in each epoch" if row.epochs > 1 else ""
    return [
        Fact(
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples ="
            f" {plan.trajectories} trajectories, {_updates(row)}, at most {batches} of <="
            f" {plan.recipe.trainer.max_tokens_per_microbatch} tokens{a_pass}",
            _microbatch_reason(plan),
        ),
        *_branch_facts(plan.recipe.rollout),
        *_truncation_facts(plan),
        *(_engine_facts(plan) if rollout.backend.kind == "engine" else []),
    ]


def _branch_facts(rollout: RolloutConfig) -> list[Fact]:
    if rollout.branches == 1:
        return []
    trunks = (rollout.oversample or rollout.samples_per_prompt) // rollout.branches
    where = (
        f"after {rollout.branch_turn} replies"
        if rollout.branch_turn
        else "where the environment says"
    )
    return [
        Fact(
            "branches",
            f"{trunks} episodes per task, each of which goes on as {rollout.branches} samples"
            f" {where}",
            f"rollout.branches = {rollout.branches}, rollout.branch_turn = {rollout.branch_turn}",
        )
    ]


def _engine_facts(plan: Plan) -> list[Fact]:
    engine, samples = (
        plan.recipe.engine,
        plan.recipe.rollout.oversample or plan.recipe.rollout.samples_per_prompt,
    )
    bound = "" if engine.kv_tokens else "at most "  # the run uses the actual longest prompt
    room = (
        UNKNOWN
        if plan.kv_blocks is None
        else f"{bound}{plan.kv_tokens:,} tokens in {plan.kv_blocks:,} blocks of {engine.block_size}"
    )
    size = UNKNOWN if plan.kv_bytes is None else bytes_text(plan.kv_bytes)
    full_length = (
        f"engine.kv_tokens = 0: room for engine.max_running = {engine.max_running} sequences of"
        f" {tokens_text(plan.longest_tokens)}"
    )
    full_length += (
        "; on a GPU at most its free memory, minus what training needs and a tenth of the total"
    )
    shared = (
        f"a prompt is computed once for its {samples} samples"
        if samples > 1
        else "a prompt has one sample"
    )
    dtype = "" if engine.kv_dtype == "auto" else f", in {engine.kv_dtype}: log-probs change"
    return [
        Fact(
            "KV cache",
            f"{room}; {size}{dtype}",
            f"engine.kv_tokens = {engine.kv_tokens}" if engine.kv_tokens else full_length,
        ),
        Fact(
            "prefill",
            f"{shared}; {_PREFIXES[engine.prefix_cache]}; {_prefill_step(engine)}",
            f"engine.prefix_cache = {engine.prefix_cache}; engine.prefill_tokens_per_step ="
            f" {engine.prefill_tokens_per_step}; engine.chunked_prefill ="
            f" {toml_literal(engine.chunked_prefill)}",
        ),
        *_speculation_facts(engine.speculation),
        _admission_fact(engine.preemption),
    ]


def _prefill_step(engine: EngineConfig) -> str:
    tokens = engine.prefill_tokens_per_step
    if engine.chunked_prefill:
        return (
            f"an engine step computes at most {tokens} prompt tokens; a longer prompt is computed"
            " in chunks while other sequences decode"
        )
    return (
        f"an engine step computes at most {tokens} prompt tokens, or one longer prompt, while other"
        " sequences wait"
    )


def _speculation_facts(config: Speculation) -> list[Fact]:
    if config.kind == "none":
        return []
    if config.kind == "ngram":
        says = (
            f"up to {config.tokens} tokens are proposed from earlier text of the same sequence, and"
            " one forward pass checks them. Tokens and log-probs stay the same. It is faster if"
            " text repeats and few sequences run, and slower otherwise"
        )
    else:
        says = (
            f"{config.path} proposes up to {config.tokens} tokens, and one forward pass of the"
            " policy checks them. The distribution of completions stays the same. The draft model"
            " is not trained, so it may propose worse tokens as the policy changes"
        )
    return [Fact("speculation", says, f"engine.speculation.kind = {config.kind}")]


def _admission_fact(config: Preemption) -> Fact:
    room = ""
    if config.kind == "swap":
        room = f" ({config.host_tokens:,} tokens)" if config.host_tokens else ""
    says = _ADMISSION[config.kind].format(room=room)
    return Fact("admission", says, f"engine.preemption.kind = {config.kind}")


def _truncation_facts(plan: Plan) -> list[Fact]:
    rollout = plan.recipe.rollout
    top_k = f"the {rollout.top_k} most probable tokens" if rollout.top_k else ""
    top_p = (
        f"the smallest set with a probability of at least {rollout.top_p:g}"
        if rollout.top_p < 1
        else ""
    )
    min_p = (
        f"tokens at least {rollout.min_p:g} times as probable as the most probable one"
        if rollout.min_p
        else ""
    )
    rules = [rule for rule in (top_k, top_p, min_p) if rule]
    if not rules:
        return []
    bound = f"at most {4 * rollout.top_k} bytes" if rollout.top_k else "4 bytes per kept token"
    return [
        Fact(
            "sampling",
            f"from {', of these '.join(rules)}, renormalised; trainer and reference score each"
            f" token over the set that the sampler kept, which takes {bound} per sampled token",
            f"rollout.top_k = {rollout.top_k}, top_p = {rollout.top_p:g}, min_p ="
            f" {rollout.min_p:g}; evaluations sample from all tokens",
        )
    ]


def sampling_facts(plan: Plan) -> list[Fact]:
    rounds, samples, started = (
        plan.algorithm.dynamic_sampling,
        plan.recipe.rollout.samples_per_prompt,
        plan.recipe.rollout.oversample,
    )
    facts = []
    if started:
        facts.append(
            Fact(
                "oversample",
                f"{started} samples per task are started. A group is complete when {samples} have"
                " finished and their rewards differ. The others are aborted and do not enter the"
                " loss. Short completions finish first, so this favours them",
                f"rollout.oversample = {started}, samples_per_prompt = {samples}",
            )
        )
    if not rounds:
        return facts
    costs = [expected_refill(degenerate_probability(p, samples), rounds) for p in _SOLVED]
    more, left = (
        ", ".join(f"{cost[i]:.{digits}f}" for cost in costs) for i, digits in ((0, 2), (1, 3))
    )
    return [
        *facts,
        Fact(
            "refill",
            f"groups whose rewards are all equal are sampled again, in at most {rounds} rounds per"
            f" step. If tasks are solved with probability {', '.join(map(str, _SOLVED))}: {more}"
            f" more groups per group of the step, and a share of {left} stays without a gradient",
            f"dynamic_sampling = {rounds}; {samples} rewards of 0 or 1 are all equal with"
            f" probability p^{samples} + (1 - p)^{samples}",
        ),
    ]


def measured_facts(
    plan: Plan, rates: Sequence[float], completion_tokens: float, source: str
) -> list[Fact]:
    """What stored pass rates say about the groups of a step.

    Args:
        completion_tokens: mean tokens of its completions.
    """
    rollout, rounds = plan.recipe.rollout, plan.algorithm.dynamic_sampling
    samples, per_step = rollout.samples_per_prompt, rollout.prompts_per_step
    wasted = degenerate_share(rates, samples)
    idle = wasted * per_step * samples
    says = (
        f"{len(rates)} tasks, solved in {sum(rates) / len(rates):.0%} of the samples, with"
        f" {completion_tokens:,.0f} tokens per completion; a share of {wasted:.3f} of the groups"
        f" has equal rewards: {idle:,.0f} of {per_step * samples:,} samples of a step, or"
        f" {idle * completion_tokens:,.0f} tokens"
    )
    if rounds:
        more, left = expected_refill(wasted, rounds)
        says += (
            f"; dynamic sampling draws {more:.2f} more groups per group of the step, and a share of"
            f" {left:.3f} stays without a gradient"
        )
    why = f"{source}; the mean over tasks of p^{samples} + (1 - p)^{samples}, rewards of 0 or 1"
    return [Fact("measured tasks", says, why)]


def _updates(row: Method) -> str:
    if row.updates == 1:
        return "1 optimizer step"
    epochs = f"{row.epochs} epoch{'s' if row.epochs > 1 else ''}"
    minibatches = f"{row.minibatches} minibatch{'es' if row.minibatches > 1 else ''}"
    return f"{epochs} x {minibatches} = {row.updates} optimizer steps"


def _microbatch_reason(plan: Plan) -> str:
    if plan.longest_tokens is None:
        return "lengths are unknown until the model is loaded; a trajectory is never split"
    budget = plan.recipe.trainer.max_tokens_per_microbatch
    if plan.longest_tokens > budget:
        return (
            f"a trajectory is never split; one of more than {budget} tokens is alone in its"
            " micro-batch"
        )
    shared = (
        "a prompt counts once for its completions (trainer.share_prefix)"
        if plan.recipe.trainer.share_prefix
        else "the prompt counts for each completion"
    )
    return f"a trajectory has at most {plan.longest_tokens} tokens and is never split; {shared}"
