"""`report.html`: one file that shows a run, without scripts, network access or external assets.

The page is `templates/report.html`. Text from a model, a dataset, a recipe or an exception is
escaped by the templates (`page.py`). If an escape is missing, the page's content security policy
still blocks scripts and network access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files.durable import write_text_atomic
from .charts import (
    busy_figures,
    curriculum_figures,
    judge_figures,
    learning_figures,
    numerics_figures,
    preference_figures,
    reward_model_figures,
    rollout_figures,
    time_view,
)
from .curriculum_view import data_view
from .headline import header, heldout, other_notes, tiles, warnings
from .marks import Dot, dot
from .numbers import number
from .page import render_page
from .prediction_view import prediction_view
from .run_record import RunRecord, flatten, read_run
from .samples import Sample, pair
from .schema import METRICS, find
from .staged import is_staged, render_staged
from .token_view import StepView, trajectories
from .verdicts import verdict_view

_NONE = "—"


@dataclass(frozen=True)
class Completion:
    """A held-out completion with its mark."""

    dot: Dot
    text: str


@dataclass(frozen=True)
class SampleRow:
    """Completions of one held-out prompt before and after training. None: there is none."""

    prompt: str
    answer: str
    before: Completion | None
    after: Completion | None


@dataclass(frozen=True)
class MetricRow:
    """A logged metric: its values as text, and what the schema says about it."""

    key: str
    last: str
    least: str
    most: str
    unit: str
    meaning: str
    formula: str


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html from the files in the folder, and return its path.

    A run with stages gets the page of all stages. Each stage has its own page in its folder.

    Raises:
        UserError: if `run_dir` is not a run.
    """
    path = run_dir / "report.html"
    page = render_staged(run_dir) if is_staged(run_dir) else render(read_run(run_dir))
    write_text_atomic(path, page)
    return path


def render(run: RunRecord) -> str:
    return render_page(
        "report.html",
        header=header(run),
        heldout=heldout(run),
        tiles=tiles(run),
        warnings=warnings(run),
        notes=other_notes(run),
        problems=run.problems,
        curves=[*learning_figures(run), *preference_figures(run), *reward_model_figures(run)],
        verdicts=verdict_view(run),
        data=data_view(run),
        buckets=curriculum_figures(run),
        samples=_samples(run.before, run.after),
        time=time_view(run),
        predicted=prediction_view(run),
        busy=busy_figures(run),
        rollouts=[*rollout_figures(run), *judge_figures(run)],
        steps=_steps(run),
        numerics=numerics_figures(run),
        metrics=_metrics(run),
        recipe=run.recipe_text,
        facts=flatten({**run.environment, "summary": run.summary}).items(),
    )


def _samples(before: Sequence[Sample], after: Sequence[Sample]) -> list[SampleRow]:
    return [
        SampleRow(known.prompt, known.answer, _completion(old), _completion(new))
        for old, new in pair(before, after)
        if (known := new or old)
    ]


def _completion(sample: Sample | None) -> Completion | None:
    if sample is None:
        return None
    return Completion(dot(sample.reward, sample.solved, sample.verdict), sample.completion)


def _steps(run: RunRecord) -> list[StepView]:
    last = len(run.dumps) - 1
    return [
        trajectories(step, records, first_open=index == last)
        for index, (step, records) in enumerate(run.dumps)
    ]


def _metrics(run: RunRecord) -> list[MetricRow]:
    """Every logged key in the order of the schema: last, minimum and maximum value, and meaning."""
    order = {metric.key: index for index, metric in enumerate(METRICS)}
    logged = {key for record in run.metrics for key in record} - {"step"}
    known = {key: find(key) for key in logged}

    def place(key: str) -> tuple[int, str]:
        metric = known[key]
        return (order[metric.key] if metric else len(order), key)

    rows = []
    for key in sorted(logged, key=place):
        metric = known[key]
        values = [value for _, value in run.series(key) if value is not None]
        ends = [values[-1], min(values), max(values)] if values else []
        last, least, most = [number(value) for value in ends] or [_NONE] * 3
        about = (
            (metric.unit, metric.meaning, metric.formula)
            if metric
            else ("", "not in the schema", "")
        )
        rows.append(MetricRow(key, last, least, most, *about))
    return rows
