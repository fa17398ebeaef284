"""Read a run's folder for the report. A missing or broken file is listed as a problem, not
raised.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..files.folder import RunFolder
from .loggers import read_metrics
from .notes import FILE as NOTES
from .notes import Note, read_notes
from .prediction import FILE as PREDICTION
from .prediction import Prediction, read_prediction
from .rollouts import dumped_steps, read_rollouts
from .samples import Sample, read_samples

T = TypeVar("T")

_SOURCE = "heldout/source/"


@dataclass(frozen=True)
class Interval:
    """A held-out accuracy with its 95 % interval, and the version of the weights measured.

    The accuracy and the ends are from 0 to 1. The ends and the version are None if they were not
    recorded.
    """

    value: float
    low: float | None
    high: float | None
    version: int | None = None


@dataclass
class RunRecord:
    """Contents of a run's folder.

    Attributes:
        recipe_text: the recipe as written.
        warm_up: records of the SFT steps.
        before: held-out samples before training.
        after: held-out samples after training.
        dumps: (step, records) of some dumped steps.
        curriculum: decisions of the curriculum. Empty for a run without one.
        prediction: predicted durations. The reason as text if nothing was predicted. None without
            prediction.json.
        problems: one line for each file that is missing or cannot be read.
    """

    path: Path
    recipe_text: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    warm_up: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    before: list[Sample] = field(default_factory=list)
    after: list[Sample] = field(default_factory=list)
    dumps: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    curriculum: list[dict[str, Any]] = field(default_factory=list)
    prediction: Prediction | str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def steps_planned(self) -> int | None:
        """run.steps of the recipe. None if it is not an integer."""
        run = self.recipe.get("run")
        steps = run.get("steps") if isinstance(run, Mapping) else None
        return steps if isinstance(steps, int) else None

    @property
    def steps(self) -> list[int]:
        return [int(record["step"]) for record in self.metrics]

    def series(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) of every record with `key`; None if the value was not finite."""
        return series(self.metrics, key)

    def heldout(self, which: int, summary_key: str) -> Interval | None:
        """One evaluation.

        Args:
            which: index among the evaluations in the metrics (0 first, -1 last), used if the
                summary lacks the key.
            summary_key: KEY in summary.json; its interval is KEY_interval.
        """
        found = _finite_or_none(self.summary.get(summary_key))
        if found is not None:
            ends = self.summary.get(f"{summary_key}_interval")
            low, high = ends if isinstance(ends, list) and len(ends) == 2 else (None, None)
            return _interval(found, low, high, self.summary.get(f"{summary_key}_version"))
        records = [record for record in self.metrics if "heldout/accuracy" in record]
        if not records:
            return None
        return _interval(
            *(
                records[which].get(f"heldout/{end}")
                for end in ("accuracy", "low", "high", "version")
            )
        )

    def evaluations(self) -> list[tuple[int, Interval]]:
        """All evaluations by step: before RL (step 0), those in the metrics, and the last one."""
        found: dict[int, Interval] = {}
        steps = [record for record in self.metrics if "heldout/accuracy" in record]
        for record in steps:
            interval = _interval(
                *(record.get(f"heldout/{end}") for end in ("accuracy", "low", "high"))
            )
            found |= {int(record["step"]): interval} if interval else {}
        last = self.summary.get("steps", self.steps[-1] if self.steps else 0)
        for step, key in ((0, "heldout_after_sft"), (last, "heldout_after")):
            interval = (
                self.heldout(0, key) if _finite_or_none(self.summary.get(key)) is not None else None
            )
            found |= {step: interval} if interval and isinstance(step, int) else {}
        return sorted(found.items())

    def sources(self) -> dict[str, list[tuple[int, float | None]]]:
        """(step, share solved) of each source in every evaluation.

        Empty for a run with one source.
        """
        last = self.summary.get("steps", self.steps[-1] if self.steps else 0)
        found: dict[str, dict[int, float | None]] = {}
        for record in self.metrics:
            for key in (key for key in record if key.startswith(_SOURCE)):
                found.setdefault(key.removeprefix(_SOURCE), {})[int(record["step"])] = (
                    _finite_or_none(record[key])
                )
        for step, key in ((0, "heldout_after_sft_sources"), (last, "heldout_after_sources")):
            shares = self.summary.get(key)
            for name, share in (shares if isinstance(shares, Mapping) else {}).items():
                found.setdefault(str(name), {})[step] = _finite_or_none(share)
        return {name: sorted(points.items()) for name, points in sorted(found.items())}

    def part_weights(self) -> dict[str, float]:
        """Weight of each part of the reward, from the dumps. Empty in files of earlier releases."""
        found: dict[str, float] = {}
        for _, records in self.dumps:
            for record in records:
                reward = record.get("reward") or {}
                found |= reward.get("weights") or {}
        return {name: w for name, w in found.items() if _finite_or_none(w) is not None}


def series(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float | None]]:
    """(step, value) of every record with `key`; None if the value was not finite."""
    return [
        (int(record["step"]), _finite_or_none(record[key])) for record in records if key in record
    ]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by dotted name, in order."""
    values: dict[str, Any] = {}
    for key, value in record.items():
        values |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return values


def read_run(path: Path, *, dumps: bool = True) -> RunRecord:
    """Read a run for its report.

    Args:
        dumps: read trajectories too.

    Raises:
        UserError: if `path` is not a run, that is, has neither recipe.toml nor metrics.jsonl.
    """
    if not path.is_dir():
        raise UserError(f"no run at {path}: expected the folder of a run, e.g. runs/demo")
    if not any((path / name).is_file() for name in ("recipe.toml", "metrics.jsonl")):
        raise UserError(f"{path} is not a run: it has neither recipe.toml nor metrics.jsonl")
    run = RunRecord(path)
    run.recipe_text = _read(run, "recipe.toml", _text, "")
    run.recipe = (
        _read(run, "recipe.toml", lambda file: tomllib.loads(_text(file)), {})
        if run.recipe_text
        else {}
    )
    run.metrics = _read(run, "metrics.jsonl", read_metrics, [])
    if (path / "sft.jsonl").is_file():
        run.warm_up = _read(run, "sft.jsonl", read_metrics, [])
    run.summary = _read(run, "summary.json", _json_object, {})
    run.environment = _read(run, "environment.json", _json_object, {})
    nothing: tuple[list[Sample], list[Sample]] = ([], [])
    run.before, run.after = _read(run, "samples.json", read_samples, nothing)
    if (path / NOTES).is_file():
        run.notes = _read(run, NOTES, read_notes, [])
    if (decisions := RunFolder(path).curriculum).is_file():
        run.curriculum = _read(run, decisions.name, _decisions, [])
    if (path / PREDICTION).is_file():
        run.prediction = _read(run, PREDICTION, lambda file: read_prediction(file.parent), None)
    run.dumps = _dumps(run) if dumps else []
    return run


def _decisions(path: Path) -> list[dict[str, Any]]:
    """Decisions of a curriculum. A line that is cut ends them."""
    lines = []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    for number, text in enumerate(whole.splitlines(), 1):
        line = json.loads(text)
        try:
            _ = int(line["step"]), [(t, a, b, float(rate)) for t, a, b, rate in line["moved"]]
            _ = [(task, int(solved), int(of)) for task, (solved, of) in line["seen"].items()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"line {number} is not a decision of a curriculum") from error
        lines.append(line)
    return lines


def _dumps(run: RunRecord) -> list[tuple[int, list[dict[str, Any]]]]:
    """The first, a middle and the last dumped step, if readable."""
    steps = dumped_steps(RunFolder(run.path).rollouts)
    if not steps:
        run.problems.append("rollouts/: no dumps (log.rollouts_every = 0, or no step was finished)")
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    dumps = []
    for step in chosen:
        name = str(RunFolder(run.path).rollout_file(step).relative_to(run.path))
        records: list[dict[str, Any]] = _read(run, name, read_rollouts, [])
        dumps += [(step, records)] if records else []
    return dumps


def _read(run: RunRecord, name: str, reader: Callable[[Path], T], otherwise: T) -> T:
    path = run.path / name
    if not path.is_file():
        run.problems.append(f"{name}: missing")
        return otherwise
    try:
        return reader(path)
    except (UserError, ValueError, OSError, RecursionError) as error:
        run.problems.append(f"{name}: {error}")
        return otherwise


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _json_object(path: Path) -> Mapping[str, Any]:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise UserError("expected a JSON object")
    return value


def _interval(value: object, low: object, high: object, version: object = None) -> Interval | None:
    share, number = _finite_or_none(value), _finite_or_none(version)
    return (
        None
        if share is None
        else Interval(
            share,
            _finite_or_none(low),
            _finite_or_none(high),
            None if number is None else int(number),
        )
    )


def _finite_or_none(value: object) -> float | None:
    return value if isinstance(value, float | int) and math.isfinite(value) else None
