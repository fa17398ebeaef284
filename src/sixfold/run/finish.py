"""Output of a finished run: final evaluation, summary.json, samples.json and the report."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..checkpoint.listing import list_checkpoints
from ..evaluation.record import (
    compare,
    difference_entry,
    final_rows,
    record,
    samples,
    summary_entries,
    task_values,
)
from ..files.durable import write_json_atomic
from ..files.folder import installed_version
from ..report.html import write_report
from ..report.numbers import clock
from ..report.samples import write_samples
from .assemble import Assembly
from .context import RunContext
from .ending import Ending
from .monitors import Monitors
from .policy_evaluation import evaluate_policy


def finish(
    context: RunContext,
    assembly: Assembly,
    monitors: Monitors,
    ending: Ending | None,
    version: int,
    stage: str,
) -> None:
    """Run the final evaluation and write summary.json, samples.json and report.html.

    Also prints the comparison of before and after.

    Args:
        context: the run, with its last checkpoint saved.
        assembly: model, tasks and settings.
        monitors: have watched the metrics.
        ending: why RL ended. None if there was no RL.
        version: version of the last saved weights, which the final evaluation measures.
        stage: name of the stage that trained.
    """
    context.progress.phase("evaluation")
    state, before = context.state, context.state.before
    rows: list[tuple[str, str, str]] = []
    summary: dict[str, object] = {
        "name": assembly.recipe.run.name,
        "seed": assembly.recipe.run.seed,
        "steps": state.step,
        "sft_steps": state.sft_steps,
        **({"ended": ending.record()} if ending else {}),
        **({"preflight": state.preflight} if state.preflight else {}),
    }
    after: dict[str, Any] = {}
    if before:
        summary |= summary_entries("heldout_after_sft", before)
        summary |= {
            "heldout_tasks": len(assembly.tasks.heldout),
            "heldout_metric": assembly.environment.solved_rule.text,
        }
    if before and ending:
        after = record(evaluate_policy(assembly, assembly.tasks.heldout, version))
        write_json_atomic(context.folder.heldout, task_values(assembly.tasks.heldout, after))
        summary |= summary_entries("heldout_after", after) | {
            "heldout_after_checkpoint": f"checkpoints/step-{state.step:06d}"
        }
        test = compare(before, after)
        summary |= {"heldout_difference": difference_entry(test)} if test else {}
        rows = final_rows(before, after, test)
        low, high = after["interval"]
        for alarm in monitors.learning.observe(
            {"heldout/accuracy": after["accuracy"], "heldout/low": low, "heldout/high": high}
        ):
            context.warn(alarm)
    for alarm in monitors.alarms.observe_end():
        context.warn(alarm)
    if judge := assembly.judge:
        summary |= judge.summary(context.ranks)
    summary |= monitors.best.record(list_checkpoints(context.folder.checkpoints))
    seconds = context.seconds
    summary |= {
        "tokens_sampled": state.tokens_total,
        "seconds": round(seconds, 1),
        **peak_memory(assembly.device),
        "versions": _versions(),
    }
    context.check_folder()
    write_samples(context.folder.samples, samples(before), samples(after))
    write_json_atomic(context.folder.summary, summary)
    report = write_report(context.folder.path)
    if rows:
        context.progress.before_after(stage, [*rows, ("time", "", clock(seconds))])
        context.progress.samples(samples(before), samples(after))
    if ending:
        context.progress.note(f"finished: {ending.text}")
    context.progress.note(f"report: {report}")


def _versions() -> dict[str, str | None]:
    return {
        name: installed_version(name)
        for name in ("sixfold", "torch", "transformers", "tokenizers", "numpy")
    } | {
        "python": sys.version.split()[0],
        "torch_build": torch.__version__,
    }


def peak_memory(device: str) -> dict[str, int]:
    """Most bytes that this process has allocated on its GPU. Nothing for the CPU."""
    if device == "cpu":
        return {}
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
