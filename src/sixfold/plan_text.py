"""A Plan in plain words: one statement a line, each with the reason it follows from."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.config import Recipe
from sixfold.plan import TRAINING_BYTES_PER_PARAMETER, Plan
from sixfold.recipe_io import flat, knobs, toml_literal

_UNKNOWN = "unknown until the model is loaded"

_PLACEMENTS = {
    "inline": "in the loop",
    "worker": "by a process of its own while answers are checked",
    "fused": "by the trainer before each micro-batch",
}


@dataclass(frozen=True)
class Fact:
    """One line of the plan. why: the settings or the rule that it follows from; empty where the statement is its own reason."""

    topic: str
    says: str
    why: str = ""


def explain(plan: Plan) -> str:
    """The whole plan as text, then the settings that differ from their defaults."""
    width = max(len(fact.topic) for fact in facts(plan)) + 2
    out = []
    for fact in facts(plan):
        out.append(f"{fact.topic:<{width}}{fact.says}")
        if fact.why:
            out.append(f"{'':<{width}}  because {fact.why}")
    asked = asked_settings(plan.recipe)
    out += ["", f"asked for ({len(asked)} of {len(knobs())} settings differ from their defaults)"]
    key_width = max((len(key) for key, _, _ in asked), default=0)
    out += [f"  {key:<{key_width}}  {value}  (default {default})" for key, value, default in asked]
    return "\n".join(out)


def asked_settings(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(key, value, default) of every setting that is not its default, as TOML writes them."""
    defaults = flat(Recipe())
    changed = [(key, value) for key, value in flat(recipe).items() if value != defaults[key]]
    return [(key, _literal(value), _literal(defaults[key])) for key, value in changed]


def _literal(value: object) -> str:
    return "the algorithm's own" if value is None else toml_literal(value)


def facts(plan: Plan) -> list[Fact]:
    """Every resolved number, in the order in which a run meets them."""
    return [
        *_model_facts(plan),
        *_task_facts(plan),
        *_rollout_facts(plan),
        *_algorithm_facts(plan),
        *_trainer_facts(plan),
        *_eval_facts(plan),
        *_end_facts(plan),
        *_disk_facts(plan),
    ]


def _model_facts(plan: Plan) -> list[Fact]:
    model, run = plan.model, plan.recipe.run
    if model.parameters is None:
        size, memory = _UNKNOWN, _UNKNOWN
    else:
        size, memory = _count(model.parameters), _bytes(TRAINING_BYTES_PER_PARAMETER * model.parameters)
    copies = "engine and trainer share one set of weights" if plan.recipe.sync.mode == "shared" else "the engine has its own copy of the weights"
    return [
        Fact(
            "model",
            f"{model.origin}; parameters: {size}",
            "" if plan.recipe.model.path else "model.path is empty; token embeddings are tied",
        ),
        Fact("context", f"{model.context or _UNKNOWN}" + (" tokens, prompt and completion together" if model.context else "")),
        Fact("memory", f"training state: {memory}", "float32 weights, gradient and two AdamW moments are 16 bytes a parameter"),
        Fact("weights", f"{copies}; forward passes in {run.precision} on device {run.device}", f"sync.mode = {plan.recipe.sync.mode}"),
    ]


def _task_facts(plan: Plan) -> list[Fact]:
    data = plan.recipe.data
    kept = f"split '{data.heldout_split}'" if data.heldout_split else f"{data.heldout} tasks set aside from split '{data.split}'"
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
        Fact("tasks", f"{data.source}; held out: {kept}"),
        Fact("prompts", f"at most {limit}; a longer one {longer}", why),
        Fact("reward", " + ".join(f"{w:g} x {name}" for w, name in zip(scale, rewards.rewards, strict=True))),
    ]


def _rollout_facts(plan: Plan) -> list[Fact]:
    rollout, engine = plan.recipe.rollout, plan.recipe.engine
    batches = "1 micro-batch" if plan.microbatches == 1 else f"{plan.microbatches} micro-batches"
    bound = "" if engine.kv_tokens else "at most "  # the run takes the longest prompt that there really is
    blocks = _UNKNOWN if plan.kv_blocks is None else f"{bound}{plan.kv_blocks:,} blocks of {engine.block_size} tokens"
    size = _UNKNOWN if plan.kv_bytes is None else _bytes(plan.kv_bytes)
    why = (
        f"engine.kv_tokens = {engine.kv_tokens}"
        if engine.kv_tokens
        else f"engine.kv_tokens = 0: room for engine.max_running = {engine.max_running} sequences of {_tokens(plan.longest_tokens)}"
    )
    return [
        Fact(
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = {plan.trajectories} trajectories, "
            f"1 optimizer step, at most {batches} of <= {plan.recipe.trainer.max_tokens_per_microbatch} tokens",
            _microbatch_reason(plan),
        ),
        Fact("KV cache", f"{blocks}; {size}, and up to as much again for what is being decoded", why),
    ]


def _microbatch_reason(plan: Plan) -> str:
    if plan.longest_tokens is None:
        return "no length is known before the model is loaded, and a trajectory is never split"
    budget = plan.recipe.trainer.max_tokens_per_microbatch
    if plan.longest_tokens > budget:
        return f"a trajectory is never split, and one of more than {budget} tokens gets a micro-batch of its own"
    shared = "a prompt counts once for its completions (trainer.share_prefix)" if plan.recipe.trainer.share_prefix else "each counts its prompt"
    return f"a trajectory has at most {plan.longest_tokens} tokens and is never split; {shared}"


def _algorithm_facts(plan: Plan) -> list[Fact]:
    row, recipe = plan.algorithm, plan.recipe
    clip = "no ratio, no clip" if row.clip_low is None else f"ratio clipped to [{1 - row.clip_low:g}, {1 + (row.clip_high or 0):g}]"
    whose = "algorithm.beta in the recipe" if recipe.algorithm.beta is not None else f"{row.name}'s default"
    facts = [Fact("algorithm", f"{row.name}: {clip}; token losses averaged by '{row.aggregation}' ({row.paper})")]
    if plan.keeps_reference:
        text = f"a frozen copy is kept, scored {_PLACEMENTS[recipe.reference.placement]}; KL {row.kl} in the {row.kl_in}, weight {row.beta:g}"
        if recipe.reference.reset_every:
            text += f"; copied anew every {recipe.reference.reset_every} steps"
        return [*facts, Fact("reference", text, f"beta = {row.beta:g} ({whose})")]
    idle = "; reference.reset_every has no effect" if recipe.reference.reset_every else ""
    return [*facts, Fact("reference", f"none is kept{idle}", f"beta = 0 ({whose}), so nothing is measured against it")]


def _trainer_facts(plan: Plan) -> list[Fact]:
    trainer, sft = plan.recipe.trainer, plan.recipe.sft
    rate = f"AdamW, learning rate {trainer.learning_rate:g} ({trainer.schedule}, {trainer.warmup_steps} warm-up steps)"
    tokens = f"tokens computed a step: {_UNKNOWN}" if plan.step_tokens is None else f"at most {plan.step_tokens:,} tokens computed a step"
    facts = [Fact("training", f"{rate}; {tokens}", "every prompt and completion at its longest" if plan.step_tokens else "")]
    if sft.steps:
        end = f", or once {sft.stop_at_accuracy:.0%} of a probe set is solved (looked at every {sft.probe_every})" if sft.stop_at_accuracy else ""
        facts.insert(0, Fact("warm-up", f"at most {sft.steps} SFT steps of {sft.examples_per_step} examples{end}"))
    return facts


def _eval_facts(plan: Plan) -> list[Fact]:
    settings, data = plan.recipe.eval, plan.recipe.data
    if not plan.evaluations:
        return [Fact("evaluation", "none", "data.heldout = 0 and data.heldout_split is empty")]
    everything = f"all of split '{data.heldout_split}'" if data.heldout_split else f"{data.heldout} held-out tasks"
    some = f" ({settings.tasks} of them in between)" if settings.tasks else ""
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    samples = f"{settings.samples} sample{'s' if settings.samples > 1 else ''}"
    when = f"before the first step, every {settings.every} steps and after the last" if settings.every else "before the first step and after the last"
    return [Fact("evaluation", f"{everything}{some} x {samples}, {how}; {plan.evaluations} times: {when}")]


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
    each = "size unknown until the model is loaded" if plan.checkpoint_bytes is None else f"about {_bytes(plan.checkpoint_bytes)} each"
    when = f"every {kept.every} steps and at the end" if kept.every else "at the end"
    rollouts = f"every trajectory of one step in {log.rollouts_every}" if log.rollouts_every > 1 else "every trajectory"
    also = f"; {rollouts}" if log.rollouts_every else "; no trajectories"
    return [
        Fact("on disk", f"{run.dir}/{run.name}: recipe.toml, metrics.jsonl, report.html{also}"),
        Fact("checkpoints", f"{when}, the newest {kept.keep} kept; {each}", "float32 weights and two AdamW moments are 12 bytes a parameter"),
    ]


def _tokens(count: int | None) -> str:
    return f"as many tokens as the context leaves ({_UNKNOWN})" if count is None else f"{count:,} tokens"


def _count(n: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if n >= size:
            return f"{n:,} ({n / size:.3g} {unit})"
    return f"{n:,}"


def _bytes(n: int) -> str:
    power = min(4, max(0, n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
