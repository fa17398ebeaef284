"""Explain the tasks, the rewards and the held-out evaluation."""

from __future__ import annotations

from ...environment.registry import any_needs
from ...environment.solved import REWARD, reward_labels, solved_rule, spec_name
from ..plan import Plan
from ..reward_models import PRM, reward_model_name, reward_model_paths
from ..schema import CurriculumConfig, DataConfig, EnvironmentConfig, EvalConfig
from .fact import Fact, tokens_text


def task_facts(plan: Plan) -> list[Fact]:
    data = plan.recipe.data
    kept = held_out(data)
    limit, new = tokens_text(plan.max_prompt_tokens), plan.recipe.rollout.max_new_tokens
    why = (
        f"data.max_prompt_tokens = {data.max_prompt_tokens}"
        if data.max_prompt_tokens
        else f"the model's context minus rollout.max_new_tokens = {new}"
    )
    longer = "stops the run" if data.overlong == "error" else "is dropped and counted"
    rewards = plan.recipe.environment
    scale = rewards.weights or (1.0,) * len(rewards.rewards)
    agent = rewards.agent.command
    several = (
        Fact("episodes", f"played by the agent {agent}", "environment.agent.command")
        if agent
        else Fact("episodes", f"several turns, played by {rewards.episode}", "environment.episode")
    )
    return [
        Fact("tasks", f"{sources(data)}; held out: {kept}"),
        *_curriculum_facts(data.curriculum),
        Fact("prompts", f"at most {limit}; a longer one {longer}", why),
        *([several] if rewards.several_turns else []),
        Fact(
            "reward",
            (f"{_giver(rewards)}, or else " if rewards.several_turns else "")
            + " + ".join(f"{w:g} x {name}" for w, name in zip(scale, rewards.rewards, strict=True)),
        ),
        *_judge_facts(plan.recipe.environment, plan.recipe.eval.strict),
    ]


def _curriculum_facts(config: CurriculumConfig) -> list[Fact]:
    if not config.every:
        return []
    back = f"drawn again after {config.retest} steps" if config.retest else "never drawn again"
    return [
        Fact(
            "curriculum",
            f"sorted every {config.every} steps: pass rate >= {config.easy:g} leaves,"
            f" <= {config.hard:g} is held and {back}",
            "data.curriculum; pass rates are those of the run's own samples"
            + (f", at first those of {config.profile}" if config.profile else ""),
        )
    ]


def _judge_facts(environment: EnvironmentConfig, strict: str) -> list[Fact]:
    """Who judges, and the budget. Empty if no reward needs a judge."""
    judge = environment.judge
    if not any_needs("judge", (*environment.rewards, strict)):
        return []
    limits = [f"${judge.budget_usd:g}"] if judge.budget_usd else []
    limits += [f"{judge.budget_calls:,} requests"] if judge.budget_calls else []
    where = judge.url or "a child process"
    return [
        Fact(
            "judge",
            f"{judge.model} at {where}, at most {judge.concurrency} requests at a time; budget:"
            f" {' and '.join(limits) or 'none'}",
            "environment.judge",
        )
    ]


def _giver(rewards: EnvironmentConfig) -> str:
    return "the one that the agent gives" if rewards.agent.command else "the environment's own"


def sources(data: DataConfig) -> str:
    """Sources of the tasks, with the share of each in a step's prompts if there are several."""
    if not data.sources:
        return data.source + (f" at revision {data.revision}" if data.revision else "")
    total = sum(s.weight for s in data.sources)
    return ", ".join(
        f"{s.weight / total:.0%} {s.label}" + (f" at revision {s.revision}" if s.revision else "")
        for s in data.sources
    )


def held_out(data: DataConfig) -> str:
    if data.heldout_splits:
        return ", ".join(f"split '{split}'" for split in data.heldout_splits)
    return f"{data.heldout} tasks set aside" + (
        "" if data.sources else f" from split '{data.split}'"
    )


def reward_facts(plan: Plan) -> list[Fact]:
    row, longest = plan.algorithm, plan.recipe.rollout.max_new_tokens
    if not row.overlong_buffer:
        return []
    buffer = max(1, round(row.overlong_buffer * longest))
    whose = "of truncated completions" if row.overlong_truncated_only else "of every completion"
    text = (
        f"the reward {whose} falls beyond {longest - buffer} tokens, by"
        f" {row.overlong_penalty:g} at {longest} tokens"
    )
    return [
        Fact(
            "overlong",
            text,
            f"overlong_buffer = {row.overlong_buffer:g}: the last {buffer} of {longest} tokens",
        )
    ]


def eval_facts(plan: Plan, data: DataConfig) -> list[Fact]:
    """Facts about the held-out evaluation.

    Args:
        data: [data] with the held-out tasks.
    """
    settings = plan.recipe.eval
    if not plan.evaluations:
        return [Fact("evaluation", "none", "data.heldout = 0 and data.heldout_split is empty")]
    everything = (
        f"all of {held_out(data)}" if data.heldout_splits else f"{data.heldout} held-out tasks"
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
            "it samples from the policy's own weights"
            + (", with an exact KV cache" if plan.recipe.engine.kv_dtype == "int8" else ""),
        ),
        Fact(
            "solved",
            _solved(plan.recipe.environment, settings),
            "eval.metric and eval.solved_at; used for accuracy, pass@k and the pre-flight",
        ),
    ]


def _solved(environment: EnvironmentConfig, settings: EvalConfig) -> str:
    """Rule by which a completion counts as solved."""
    specs = environment.rewards
    models = [bool(reward_model_paths(spec)) for spec in specs]
    labels = reward_labels(
        [reward_model_name(s) if m else spec_name(s) for s, m in zip(specs, models, strict=True)],
        ["" if m else s for s, m in zip(specs, models, strict=True)],
    )
    return solved_rule(
        labels,
        environment.weights or [1.0] * len(specs),
        # An environment's own reward has no name, so the sum decides.
        settings.metric or (REWARD if environment.several_turns else ""),
        settings.solved_at,
        [label for label, spec in zip(labels, specs, strict=True) if spec.startswith(PRM)],
    ).text
