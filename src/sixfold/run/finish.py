"""Output of a finished run: final evaluation, summary.json, samples.json and the report."""

from __future__ import annotations

import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.listing import list_checkpoints
from ..evaluation.record import (
    compare,
    difference_entry,
    final_rows,
    record,
    samples,
    summary_entries,
)
from ..files.durable import write_json_atomic
from ..report.html import write_report
from ..report.numbers import clock
from ..report.samples import write_samples
from .ending import Ending
from .policy_evaluation import evaluate_policy
from .recipe_judge import judge_summary

if TYPE_CHECKING:
    from .start import Run


def finish(work: Run, ending: Ending | None, version: int) -> None:
    """Run the final evaluation and write summary.json, samples.json and report.html.

    Also prints the comparison of before and after.

    Args:
        work: the run, with its last checkpoint saved.
        ending: why RL ended. None if there was no RL.
        version: version of the last saved weights, which the final evaluation measures.
    """
    work.progress.phase("evaluation")
    before = work.state.before
    rows: list[tuple[str, str, str]] = []
    summary: dict[str, object] = {
        "name": work.recipe.run.name,
        "seed": work.recipe.run.seed,
        "steps": work.state.step,
        "sft_steps": work.state.sft_steps,
        **({"ended": ending.record()} if ending else {}),
        **({"preflight": work.state.preflight} if work.state.preflight else {}),
    }
    after: dict[str, Any] = {}
    if before:
        summary |= summary_entries("heldout_after_sft", before)
        summary |= {
            "heldout_tasks": len(work.world.tasks.heldout),
            "heldout_metric": work.world.environment.solved_rule.text,
        }
    if before and ending:
        after = record(evaluate_policy(work.world, work.world.tasks.heldout, version))
        summary |= summary_entries("heldout_after", after) | {
            "heldout_after_checkpoint": f"checkpoints/step-{work.state.step:06d}"
        }
        test = compare(before, after)
        summary |= {"heldout_difference": difference_entry(test)} if test else {}
        rows = final_rows(before, after, test)
        low, high = after["interval"]
        for alarm in work.learning.look(
            {"heldout/accuracy": after["accuracy"], "heldout/low": low, "heldout/high": high}
        ):
            work.notes.add(work.state.step, alarm, warning=True)
    for alarm in work.alarms.look_at_end():
        work.notes.add(work.state.step, alarm, warning=True)
    summary |= judge_summary(work.world.judge, work.world.ranks)
    summary |= work.best.record(list_checkpoints(work.run.checkpoints))
    seconds = time.perf_counter() - work.started
    summary |= {
        "tokens_sampled": work.state.tokens_total,
        "seconds": round(seconds, 1),
        **peak_memory(work.world.device),
        "versions": _versions(),
    }
    write_samples(work.run.samples, samples(before), samples(after))
    write_json_atomic(work.run.summary, summary)
    report = write_report(work.run.path)
    if rows:
        work.progress.before_after([*rows, ("time", "", clock(seconds))])
        work.progress.samples(samples(before), samples(after))
    if ending:
        work.progress.note(f"finished: {ending.text}")
    work.progress.note(f"report: {report}")


def _versions() -> dict[str, str]:
    return {
        name: metadata.version(name)
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
