"""What a run keeps of an evaluation: figures for summary.json, samples for the report, a line for the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..report.samples import Sample
from .evaluate import Evaluation

SHOWN_SAMPLES = 8


def record(evaluation: Evaluation) -> dict[str, Any]:
    """JSON form of an evaluation: accuracy with its interval, score, version, failed checks, first samples."""
    mean, *ends = evaluation.interval
    score = evaluation.score
    return {
        "accuracy": mean,
        "interval": ends,
        "score": score.mean if score else None,
        "version": evaluation.version,
        "tasks": len(evaluation.groups),
        "errors": evaluation.errors,
        "samples": [asdict(sample) for sample in _samples(evaluation)],
    }


def summary_entries(name: str, found: Mapping[str, Any]) -> dict[str, object]:
    """Keys of summary.json for one evaluation: NAME, NAME_interval, NAME_score and NAME_version."""
    return {
        name: found["accuracy"],
        f"{name}_interval": found["interval"],
        **({f"{name}_score": found["score"]} if found["score"] is not None else {}),
        f"{name}_version": found["version"],
    }


def shown(found: Mapping[str, Any]) -> str:
    """One line: share solved with its interval, and the mean score where it says something else."""
    low, high = found["interval"]
    text = f"{found['accuracy']:.1%} solved ({low:.1%} to {high:.1%})"
    if found["score"] is not None and abs(found["score"] - found["accuracy"]) >= 5e-4:
        text += f", mean score {found['score']:.3g}"
    return text + (f", {found['errors']} checks failed" if found["errors"] else "")


def samples(found: Mapping[str, Any]) -> list[Sample]:
    """The samples of a record."""
    return [Sample(**sample) for sample in found.get("samples", [])]


def _samples(evaluation: Evaluation) -> list[Sample]:
    first = [(g.task, g.trajectories[0]) for g in evaluation.groups[:SHOWN_SAMPLES]]
    return [Sample(task.prompt_text, str(task.answer), t.text, *((t.reward.value, t.reward.solved) if t.reward else (None, None))) for task, t in first]
