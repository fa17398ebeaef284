"""The stored form of an evaluation.

It gives figures for summary.json, samples for the report, and a line for the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..report.numbers import percent, percent_range
from ..report.samples import Sample
from ..types import Reward
from .evaluate import Evaluation

SHOWN_SAMPLES = 8


def record(evaluation: Evaluation) -> dict[str, Any]:
    """JSON form of an evaluation.

    It holds accuracy with its interval and by source, score, version, failed checks, and the first
    samples.
    """
    mean, *ends = evaluation.interval
    score = evaluation.score
    return {
        "accuracy": mean,
        "interval": ends,
        "sources": evaluation.by_source,
        "score": score.mean if score else None,
        "version": evaluation.version,
        "tasks": len(evaluation.groups),
        "errors": evaluation.errors,
        "samples": [asdict(sample) for sample in _samples(evaluation)],
    }


def upgraded(found: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the form of `record`, from one in a checkpoint of an earlier release.

    The earlier form holds [mean, low, high] and samples.
    """
    if not found or "accuracy" in found:
        return dict(found)
    mean, *ends = found["interval"]
    ends = [0.0 if ends[0] is None else ends[0], 1.0 if ends[1] is None else ends[1]]
    return {
        "accuracy": mean,
        "interval": ends,
        "score": None,
        "version": 0,
        "tasks": 0,
        "errors": 0,
        "samples": found["samples"],
    }


def summary_entries(name: str, found: Mapping[str, Any]) -> dict[str, object]:
    """Keys of summary.json for one evaluation.

    They are NAME, NAME_interval, NAME_sources, NAME_score and NAME_version.
    """
    return {
        name: found["accuracy"],
        f"{name}_interval": found["interval"],
        **({f"{name}_sources": found["sources"]} if found.get("sources") else {}),
        **({f"{name}_score": found["score"]} if found["score"] is not None else {}),
        f"{name}_version": found["version"],
    }


def shown(found: Mapping[str, Any]) -> str:
    """One line: share solved with its interval and by source, and the mean score if it differs."""
    low, high = found["interval"]
    text = f"{percent(found['accuracy'])} solved ({percent_range(low, high)})"
    if found.get("sources"):
        text += ": " + ", ".join(
            f"{name} {percent(share)}" for name, share in found["sources"].items()
        )
    if found["score"] is not None and abs(found["score"] - found["accuracy"]) >= 5e-4:
        text += f", mean score {found['score']:.3g}"
    return text + (f", {found['errors']} checks failed" if found["errors"] else "")


def samples(found: Mapping[str, Any]) -> list[Sample]:
    """The samples of a record."""
    return [Sample(**sample) for sample in found.get("samples", [])]


def _samples(evaluation: Evaluation) -> list[Sample]:
    found = []
    for group in evaluation.groups[:SHOWN_SAMPLES]:
        first = group.trajectories[0]
        reward = first.reward or Reward(None)
        found.append(
            Sample(
                group.task.prompt_text,
                str(group.task.answer),
                first.text,
                reward.value,
                reward.solved,
            )
        )
    return found
