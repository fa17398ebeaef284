"""Show a Plan as text: one statement per line, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from ..algorithm.lineage import cells
from ..algorithm.method import Method
from ..environment.preflight import degenerate_probability, expected_refill
from ..environment.solved import reward_labels, solved_rule, spec_name
from .backend import parse_backend
from .memory_text import memory_lines
from .plan import SFT_PROBE_EVERY, TRAINING_BYTES_PER_PARAMETER, Plan
from .schema import DataConfig, Recipe
from .toml import flat, knobs, toml_literal

_UNKNOWN = "unknown until the model is loaded"

_PLACEMENTS = {
    "inline": "in the loop",
    "worker": "by a process of its own while answers are checked",
    "fused": "by the trainer before each micro-batch",
}


_BODIES = {
    "own": "a copy of the policy's body under a value head",
    "policy": "a value head on the policy's hidden states",
}

_PREFIXES = {
    "radix": "what prompts begin with in common is computed once too, found in a radix tree",
    "hash": (
        "what prompts begin with in common is computed once too, by whole blocks, found by their"
        " hashes"
    ),
    "none": "what prompts begin with in common is computed for each",
}

_SPECULATION = (
    "the next tokens are guessed from the completion's own text and checked in one forward: the"
    " same tokens and log-probs, sooner where text repeats itself and few sequences run, later"
    " where it does not"
)
_ADMISSION = {
    "none": (
        "a completion starts once the longest that it may become fits beside those that run, so"
        " none has to stop"
    ),
    "recompute": (
        "a completion starts once its prompt fits; where blocks run out, the last in line stops and"
        " goes on later, to the same tokens"
    ),
    "swap": (
        "a completion starts once its prompt fits; where blocks run out, the last in line waits in"
        " host memory, then goes on to the same tokens"
    ),
}

_SOLVED = (0.1, 0.5, 0.9)
"""Pass rates for which the cost of dynamic sampling is shown."""


@dataclass(frozen=True)
class Fact:
    """One line of the plan.

    Attributes:
        topic: what the line is about.
        says: the statement.
        why: settings or rule behind it. Empty if the statement needs no reason.
    """

    topic: str
    says: str
    why: str = ""


def explain(plan: Plan) -> str:
    """The whole plan as text, followed by the settings that differ from their defaults."""
    stated = facts(plan)
    width = max(len(fact.topic) for fact in stated) + 2
    out = []
    for fact in stated:
        out.append(f"{fact.topic:<{width}}{fact.says}")
        if fact.why:
            out.append(f"{'':<{width}}  because {fact.why}")
    asked = asked_settings(plan.recipe)
    out += ["", f"asked for ({len(asked)} of {len(knobs())} settings differ from their defaults)"]
    key_width = max((len(key) for key, _, _ in asked), default=0)
    out += [f"  {key:<{key_width}}  {value}  (default {default})" for key, value, default in asked]
    return "\n".join(out)


def asked_settings(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(key, value, default) in TOML syntax for every setting that differs from its default."""
    defaults = flat(Recipe())
    changed = [(key, value) for key, value in flat(recipe).items() if value != defaults[key]]
    return [(key, _literal(value), _literal(defaults[key])) for key, value in changed]


def _literal(value: object) -> str:
    return "the algorithm's own" if value is None else toml_literal(value)


def facts(plan: Plan) -> list[Fact]:
    """All resolved numbers, in the order in which a run uses them."""
    return [
        *_model_facts(plan),
        *_task_facts(plan),
        *_rollout_facts(plan),
        *_algorithm_facts(plan),
        *_critic_facts(plan),
        *_sampling_facts(plan),
        *_reward_facts(plan),
        *_trainer_facts(plan),
        *_eval_facts(plan),
        *_end_facts(plan),
        *_disk_facts(plan),
        *(Fact("GPU memory", says, why) for says, why in memory_lines(plan)),
    ]


def _model_facts(plan: Plan) -> list[Fact]:
    model = plan.model
    if model.parameters is None:
        size, state = _UNKNOWN, _UNKNOWN
    else:
        size, state = (
            _count(model.parameters),
            _bytes(TRAINING_BYTES_PER_PARAMETER * model.parameters),
        )
    return [
        Fact(
            "model",
            f"{model.origin}; parameters: {size}",
            "" if plan.recipe.model.path else "model.path is empty; token embeddings are tied",
        ),
        Fact(
            "context",
            f"{model.context or _UNKNOWN}"
            + (" tokens, prompt and completion together" if model.context else ""),
        ),
        Fact(
            "memory",
            f"training state: {state}",
            "float32 weights, gradient and two AdamW moments are 16 bytes a parameter",
        ),
        *_sampler_facts(plan.recipe),
    ]


def _sampler_facts(recipe: Recipe) -> list[Fact]:
    """Which engine samples, and how it gets the weights."""
    backend, sync = parse_backend(recipe.rollout.backend), recipe.sync
    where = f"forward passes in {recipe.run.precision} on device {recipe.run.device}"
    if backend.kind == "engine":
        copies = (
            "engine and trainer share one set of weights"
            if sync.mode == "shared"
            else "the engine has its own copy of the weights"
        )
        copies += (
            f", rounded as if in {sync.mode} (simulated: nothing is saved)"
            if sync.quantised
            else ""
        )
        return [Fact("weights", f"{copies}; {where}", f"sync.mode = {sync.mode}")]
    vllm = f"vLLM in a process of its own, under {backend.python or 'this Python'}"
    who = vllm if backend.kind == "vllm" else f"SGLang at {backend.url}, which must be running"
    when = f"every {sync.every} steps" if sync.every > 1 else "after every step"
    return [
        Fact("sampler", who, f"rollout.backend = {recipe.rollout.backend}"),
        Fact(
            "weights",
            f"the sampler has its own copy, handed over {when}; trainer: {where}",
            "it shares no memory with the trainer",
        ),
    ]


def _task_facts(plan: Plan) -> list[Fact]:
    data = plan.recipe.data
    kept = _held_out(data)
    limit = _tokens(plan.max_prompt_tokens)
    why = (
        f"data.max_prompt_tokens = {data.max_prompt_tokens}"
        if data.max_prompt_tokens
        else f"context less rollout.max_new_tokens = {plan.recipe.rollout.max_new_tokens}"
    )
    longer = "stops the run" if data.overlong == "error" else "is dropped and counted"
    rewards = plan.recipe.environment
    scale = rewards.weights or (1.0,) * len(rewards.rewards)
    return [
        Fact("tasks", f"{_sources(data)}; held out: {kept}"),
        Fact("prompts", f"at most {limit}; a longer one {longer}", why),
        Fact(
            "reward",
            " + ".join(f"{w:g} x {name}" for w, name in zip(scale, rewards.rewards, strict=True)),
        ),
    ]


def _sources(data: DataConfig) -> str:
    """Sources of the tasks, with the share of each in a step's prompts if there are several."""
    if not data.sources:
        return data.source + (f" at revision {data.revision}" if data.revision else "")
    total = sum(s.weight for s in data.sources)
    return ", ".join(
        f"{s.weight / total:.0%} {s.label}" + (f" at revision {s.revision}" if s.revision else "")
        for s in data.sources
    )


def _held_out(data: DataConfig) -> str:
    if data.heldout_splits:
        return ", ".join(f"split '{split}'" for split in data.heldout_splits)
    return f"{data.heldout} tasks set aside" + (
        "" if data.sources else f" from split '{data.split}'"
    )


def _rollout_facts(plan: Plan) -> list[Fact]:
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
        *_truncation_facts(plan),
        *(_engine_facts(plan) if rollout.backend == "engine" else []),
    ]


def _engine_facts(plan: Plan) -> list[Fact]:
    engine, samples = (
        plan.recipe.engine,
        plan.recipe.rollout.oversample or plan.recipe.rollout.samples_per_prompt,
    )
    bound = "" if engine.kv_tokens else "at most "  # the run uses the actual longest prompt
    room = (
        _UNKNOWN
        if plan.kv_blocks is None
        else f"{bound}{plan.kv_tokens:,} tokens in {plan.kv_blocks:,} blocks of {engine.block_size}"
    )
    size = _UNKNOWN if plan.kv_bytes is None else _bytes(plan.kv_bytes)
    full_length = (
        f"engine.kv_tokens = 0: room for engine.max_running = {engine.max_running} sequences of"
        f" {_tokens(plan.longest_tokens)}"
    )
    full_length += (
        "; on a GPU no more than is free there, less what training needs and a tenth of its memory"
    )
    shared = (
        f"a prompt is computed once for its {samples} samples"
        if samples > 1
        else "a prompt has one sample"
    )
    return [
        Fact(
            "KV cache",
            f"{room}; {size}",
            f"engine.kv_tokens = {engine.kv_tokens}" if engine.kv_tokens else full_length,
        ),
        Fact(
            "prefill",
            f"{shared}; {_PREFIXES[engine.prefix_cache]}; at most {engine.prefill_tokens_per_step}"
            " prompt tokens in an engine step, or one longer prompt, while what runs waits",
            f"engine.prefix_cache = {engine.prefix_cache}; engine.prefill_tokens_per_step ="
            f" {engine.prefill_tokens_per_step}",
        ),
        *(
            [Fact("speculation", _SPECULATION, f"engine.speculation = {engine.speculation}")]
            if engine.speculation != "none"
            else []
        ),
        Fact(
            "admission", _ADMISSION[engine.preemption], f"engine.preemption = {engine.preemption}"
        ),
    ]


def _truncation_facts(plan: Plan) -> list[Fact]:
    rollout = plan.recipe.rollout
    top_k = f"the {rollout.top_k} most probable tokens" if rollout.top_k else ""
    top_p = f"the fewest that reach a probability of {rollout.top_p:g}" if rollout.top_p < 1 else ""
    min_p = (
        f"those at least {rollout.min_p:g} times as probable as the best" if rollout.min_p else ""
    )
    rules = [rule for rule in (top_k, top_p, min_p) if rule]
    if not rules:
        return []
    bound = f"at most {4 * rollout.top_k} bytes" if rollout.top_k else "4 bytes for each kept token"
    return [
        Fact(
            "sampling",
            f"from {', of these '.join(rules)}, renormalised; trainer and reference score each"
            f" token over the set that the sampler kept, which costs {bound} a sampled token",
            f"rollout.top_k = {rollout.top_k}, top_p = {rollout.top_p:g}, min_p ="
            f" {rollout.min_p:g}; evaluation draws from all tokens",
        )
    ]


def _updates(row: Method) -> str:
    if row.updates == 1:
        return "1 optimizer step"
    epochs = f"{row.epochs} epoch{'s' if row.epochs > 1 else ''}"
    minibatches = f"{row.minibatches} minibatch{'es' if row.minibatches > 1 else ''}"
    return f"{epochs} x {minibatches} = {row.updates} optimizer steps"


def _microbatch_reason(plan: Plan) -> str:
    if plan.longest_tokens is None:
        return "no length is known before the model is loaded, and a trajectory is never split"
    budget = plan.recipe.trainer.max_tokens_per_microbatch
    if plan.longest_tokens > budget:
        return (
            f"a trajectory is never split, and one of more than {budget} tokens gets a micro-batch"
            " of its own"
        )
    shared = (
        "a prompt counts once for its completions (trainer.share_prefix)"
        if plan.recipe.trainer.share_prefix
        else "each counts its prompt"
    )
    return f"a trajectory has at most {plan.longest_tokens} tokens and is never split; {shared}"


def _algorithm_facts(plan: Plan) -> list[Fact]:
    row, recipe = plan.algorithm, plan.recipe
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
    return [Fact("algorithm", text), _reference_fact(plan), *_correction_facts(row, recipe)]


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
            f"none is kept{idle}",
            f"beta = 0 ({whose}), so nothing is measured against it",
        )
    kept = f"{config.path} is kept" if config.path else "a frozen copy is kept"
    scored = f"{kept}, scored {_PLACEMENTS[config.placement]}"
    if row.needs_teacher:
        return Fact(
            "teacher",
            f"{scored}; its log-probs less the policy's are the advantage of each token",
            f"advantage = '{row.advantage}'",
        )
    weight = f"weight {row.beta:g}" + (
        f", adapted until the KL is {row.kl_target:g}" if row.kl_target else ""
    )
    reset = f"; copied anew every {config.reset_every} steps" if config.reset_every else ""
    return Fact(
        "reference",
        f"{scored}; KL {row.kl} in the {row.kl_in}, {weight}{reset}",
        f"beta = {row.beta:g} ({whose})",
    )


def _correction_facts(row: Method, recipe: Recipe) -> list[Fact]:
    if row.correction == "none":
        return []
    low, high = row.band
    if row.correction == "negative-sequence":
        says = (
            "completions with A < 0 are dropped once their mean log-ratio to the sampler has"
            f" fallen by {high:g}"
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
            f"algorithm.correction; sync.mode = {recipe.sync.mode}, every = {recipe.sync.every}",
        )
    ]


def _critic_facts(plan: Plan) -> list[Fact]:
    row, config = plan.algorithm, plan.recipe.critic
    if not row.needs_critic:
        return []
    state = "next to nothing"
    if config.body == "own":
        size = plan.model.parameters
        state = (
            _UNKNOWN
            if size is None
            else f"about {_bytes(TRAINING_BYTES_PER_PARAMETER * size)} more"
        )
    alone = (
        f"; trained alone in the first {config.warmup_steps} steps" if config.warmup_steps else ""
    )
    text = (
        f"{_BODIES[config.body]}; training state: {state}; learning rate"
        f" {config.learning_rate:g}{alone}"
    )
    return [
        Fact(
            "critic",
            text,
            f"advantage = '{row.advantage}' needs the value of every state; critic.body ="
            f" {config.body}",
        )
    ]


def _sampling_facts(plan: Plan) -> list[Fact]:
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
                f"{started} samples of a task are started; its group is whole once {samples} have"
                " ended and their rewards differ, the others are aborted and reach no loss. Short"
                " answers end first: this favours them",
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
            f"groups whose rewards are all equal are sampled anew, in {rounds} rounds a step at"
            f" most; where tasks are solved with probability {', '.join(map(str, _SOLVED))}: {more}"
            f" groups more for each of the step, and a share of {left} stays as it is",
            f"dynamic_sampling = {rounds}; {samples} rewards of 0 or 1 are all equal with"
            f" probability p^{samples} + (1 - p)^{samples}",
        ),
    ]


def _reward_facts(plan: Plan) -> list[Fact]:
    row, longest = plan.algorithm, plan.recipe.rollout.max_new_tokens
    if not row.overlong_buffer:
        return []
    buffer = max(1, round(row.overlong_buffer * longest))
    whose = "of answers cut off" if row.overlong_truncated_only else "of every answer"
    text = (
        f"the reward {whose} falls past {longest - buffer} tokens, by {row.overlong_penalty:g} at"
        f" {longest}"
    )
    return [
        Fact(
            "overlong",
            text,
            f"overlong_buffer = {row.overlong_buffer:g}: the last {buffer} of {longest} tokens",
        )
    ]


def _trainer_facts(plan: Plan) -> list[Fact]:
    trainer, sft = plan.recipe.trainer, plan.recipe.sft
    rate = (
        f"AdamW, learning rate {trainer.learning_rate:g} ({trainer.schedule},"
        f" {trainer.warmup_steps} warm-up steps)"
    )
    tokens = (
        f"tokens computed a step: {_UNKNOWN}"
        if plan.step_tokens is None
        else f"at most {plan.step_tokens:,} tokens computed a {_pass(plan)}"
    )
    facts = [
        Fact(
            "training",
            f"{rate}; {tokens}",
            "every prompt and completion at its longest" if plan.step_tokens else "",
        )
    ]
    if sft.steps:
        pace = f"looked at every {SFT_PROBE_EVERY} steps"
        end = (
            f", or once {sft.stop_at_accuracy:.0%} of a probe set is solved ({pace})"
            if sft.stop_at_accuracy
            else ""
        )
        facts.insert(
            0,
            Fact(
                "warm-up", f"at most {sft.steps} SFT steps of {sft.examples_per_step} examples{end}"
            ),
        )
    return facts


def _pass(plan: Plan) -> str:
    return "step" if plan.algorithm.epochs == 1 else "pass over the samples"


def _eval_facts(plan: Plan) -> list[Fact]:
    settings, data = plan.recipe.eval, plan.recipe.data
    if not plan.evaluations:
        return [Fact("evaluation", "none", "data.heldout = 0 and data.heldout_split is empty")]
    everything = (
        f"all of {_held_out(data)}" if data.heldout_splits else f"{data.heldout} held-out tasks"
    )
    some = f" ({settings.tasks} of them in between)" if settings.tasks else ""
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    samples = f"{settings.samples} sample{'s' if settings.samples > 1 else ''}"
    when = (
        f"before the first step, every {settings.every} steps and after the last"
        if settings.every
        else "before the first step and after the last"
    )
    return [
        Fact(
            "evaluation",
            f"{everything}{some} x {samples}, {how}; {plan.evaluations} times: {when}",
            "of the policy's own weights",
        ),
        Fact(
            "solved",
            _solved(plan.recipe),
            "by eval.metric and eval.solved_at; counted in accuracy, pass@k and pre-flight",
        ),
    ]


def _solved(recipe: Recipe) -> str:
    """Rule by which a completion counts as solved."""
    specs = recipe.environment.rewards
    labels = reward_labels([spec_name(spec) for spec in specs], specs)
    return solved_rule(
        labels,
        recipe.environment.weights or [1.0] * len(specs),
        recipe.eval.metric,
        recipe.eval.solved_at,
    ).text


def _end_facts(plan: Plan) -> list[Fact]:
    run = plan.recipe.run
    ends = [f"after {run.steps} RL steps"]
    if run.max_minutes:
        ends.append(f"after {run.max_minutes:g} minutes")
    if run.target_reward:
        ends.append(f"once the moving average of the reward reaches {run.target_reward:g}")
    return [Fact("ends", " or ".join(ends) + (", whichever is first" if len(ends) > 1 else ""))]


def _disk_facts(plan: Plan) -> list[Fact]:
    run, kept, log = plan.recipe.run, plan.recipe.checkpoint, plan.recipe.log
    each = (
        "size unknown until the model is loaded"
        if plan.checkpoint_bytes is None
        else f"about {_bytes(plan.checkpoint_bytes)} each"
    )
    when = f"every {kept.every} steps and at the end" if kept.every else "at the end"
    rollouts = (
        f"every trajectory of one step in {log.rollouts_every}"
        if log.rollouts_every > 1
        else "every trajectory"
    )
    also = f"; {rollouts}" if log.rollouts_every else "; no trajectories"
    return [
        Fact("on disk", f"{run.dir}/{run.name}: recipe.toml, metrics.jsonl, report.html{also}"),
        Fact(
            "checkpoints",
            f"{when}, the newest {kept.keep} kept; {each}",
            "float32 weights and two AdamW moments are 12 bytes a parameter",
        ),
    ]


def _tokens(count: int | None) -> str:
    return (
        f"as many tokens as the context leaves ({_UNKNOWN})"
        if count is None
        else f"{count:,} tokens"
    )


def _count(n: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if n >= size:
            return f"{n:,} ({n / size:.3g} {unit})"
    return f"{n:,}"


def _bytes(n: int) -> str:
    power = min(4, max(0, n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
