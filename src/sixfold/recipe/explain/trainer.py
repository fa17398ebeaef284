"""Explain the training steps, the end of the run, and what is on disk."""

from __future__ import annotations

from ..plan import SFT_PROBE_EVERY, Plan
from .fact import UNKNOWN, Fact, bytes_text


def trainer_facts(plan: Plan) -> list[Fact]:
    trainer, sft = plan.recipe.trainer, plan.recipe.sft
    rate = (
        f"AdamW, learning rate {trainer.learning_rate:g} ({trainer.schedule},"
        f" {trainer.warmup_steps} warm-up steps)"
    )
    tokens = (
        f"tokens computed per step: {UNKNOWN}"
        if plan.step_tokens is None
        else f"at most {plan.step_tokens:,} tokens computed per {_pass(plan)}"
    )
    facts = [
        Fact(
            "training",
            f"{rate}; {tokens}",
            "if every prompt and completion has its maximum length" if plan.step_tokens else "",
        )
    ]
    if sft.steps:
        pace = f"measured every {SFT_PROBE_EVERY} steps"
        end = (
            f", or until {sft.stop_at_accuracy:.0%} of a probe set is solved ({pace})"
            if sft.stop_at_accuracy
            else ""
        )
        drawn = f" from {sft.tasks} tasks" if sft.tasks else ""
        facts.insert(
            0,
            Fact(
                "warm-up",
                f"at most {sft.steps} SFT steps of {sft.examples_per_step} examples{drawn}{end}",
            ),
        )
    return facts


def _pass(plan: Plan) -> str:
    return "step" if plan.algorithm.epochs == 1 else "pass over the samples"


def end_facts(plan: Plan) -> list[Fact]:
    run, epochs = plan.recipe.run, plan.recipe.sft.epochs
    ends = [f"after {epochs} passes over the examples" if epochs else f"after {run.steps} RL steps"]
    if run.max_minutes:
        ends.append(f"after {run.max_minutes:g} minutes")
    if run.target_reward:
        ends.append(f"when the moving average of the reward reaches {run.target_reward:g}")
    if run.target_accuracy:
        ends.append(f"when the held-out accuracy reaches {run.target_accuracy:g}")
    if run.patience:
        ends.append(f"when {run.patience} held-out evaluations have given no new best")
    return [Fact("ends", " or ".join(ends) + (", whichever comes first" if len(ends) > 1 else ""))]


def disk_facts(plan: Plan) -> list[Fact]:
    run, kept, log = plan.recipe.run, plan.recipe.checkpoint, plan.recipe.log
    each = (
        "size unknown until the model is loaded"
        if plan.checkpoint_bytes is None
        else f"about {bytes_text(plan.checkpoint_bytes)} each"
    )
    when = f"every {kept.every} steps and at the end" if kept.every else "at the end"
    best = f" and the best {kept.keep_best}" if kept.keep_best else ""
    rollouts = (
        f"all trajectories, every {log.rollouts_every} steps"
        if log.rollouts_every > 1
        else "all trajectories"
    )
    also = f"; {rollouts}" if log.rollouts_every else "; no trajectories"
    return [
        Fact("on disk", f"{run.dir}/{run.name}: recipe.toml, metrics.jsonl, report.html{also}"),
        Fact(
            "checkpoints",
            f"{when}, the newest {kept.keep}{best} kept; {each}",
            "float32 weights and two AdamW moments are 12 bytes per parameter",
        ),
    ]
