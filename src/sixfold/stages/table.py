"""The stage table: one row per finished stage, in `stages.json` and for the screen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..files.durable import write_json_atomic
from ..files.folder import RunFolder
from ..recipe.stages import STAGES, StagedRecipe
from ..report.loggers import read_metrics
from ..report.staged import TABLE
from .artifact import read_artifact
from .drift import read_drift


@dataclass(frozen=True)
class Row:
    """Figures of one finished stage. None: not measured.

    Attributes:
        stage: name of the stage.
        kind: its kind.
        start: stage whose model it started from. "": none.
        made: what it made.
        steps: steps done.
        seconds: wall time.
        tokens: tokens trained on.
        sampled: tokens sampled.
        heldout: share of the held-out tasks solved at the end.
        low: lower end of its 95% interval.
        high: upper end of its 95% interval.
        sources: share solved of each source of tasks.
        verdicts: share of the held-out completions with each verdict.
        loss: loss on held-out examples at the last evaluation, in nats per token.
        kl: KL divergence to the model that it started from, in nats per token.
        reward: moving average of the reward at the end.
        on_policy: share of the trained comparisons that the policy sampled with which it began.
        sha256: hash of the artifact.
    """

    stage: str
    kind: str
    start: str
    made: str
    steps: int | None
    seconds: float | None
    tokens: float | None
    sampled: float | None
    heldout: float | None
    low: float | None
    high: float | None
    sources: Mapping[str, float]
    verdicts: Mapping[str, float]
    loss: float | None
    kl: float | None
    reward: float | None
    on_policy: float | None
    sha256: str


def read_rows(folder: Path, staged: StagedRecipe) -> list[Row]:
    """Rows of the finished stages of a run, in their order."""
    rows = []
    for stage in staged.stages:
        path = folder / STAGES / stage.name
        if artifact := read_artifact(path):
            summary = _json(RunFolder(path).summary)
            metrics: list[dict[str, Any]] = read_metrics(RunFolder(path).metrics)
            low, high = summary.get("heldout_after_interval") or (None, None)
            rows.append(
                Row(
                    stage.name,
                    stage.kind,
                    dict(stage.inputs).get("model.path", ""),
                    artifact.made,
                    summary.get("steps"),
                    summary.get("seconds"),
                    _total(metrics, "train/tokens"),
                    summary.get("tokens_sampled"),
                    summary.get("heldout_after"),
                    low,
                    high,
                    summary.get("heldout_after_sources") or {},
                    _shares(summary.get("heldout_after_verdicts") or {}),
                    _last(metrics, "heldout/loss"),
                    read_drift(path),
                    _last(metrics, "reward/ema"),
                    _mean(metrics, "preference/on_policy_frac"),
                    artifact.sha256,
                )
            )
    return rows


def write_table(folder: Path, staged: StagedRecipe) -> Path:
    """Write the rows of the finished stages, and return the path of the file."""
    path = folder / TABLE
    write_json_atomic(path, [asdict(row) for row in read_rows(folder, staged)])
    return path


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    return {name: count / sum(counts.values()) for name, count in counts.items()}


def _total(metrics: list[dict[str, Any]], key: str) -> float:
    return float(sum(line.get(key) or 0.0 for line in metrics))


def _mean(metrics: list[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in metrics if line.get(key) is not None]
    return fmean(values) if values else None


def _last(metrics: list[dict[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)


def _json(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
